"""Small texts and tokenizers that tests create, and configurations. All tests can use the fixtures."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.data.tasks import Task, load_task
from rapidformer_templates.data.text import preprocess
from rapidformer_templates.data.text.encoding import EncodingRecipe
from rapidformer_templates.data.text.preprocess import PreprocessResult
from rapidformer_templates.planning.config import RunConfig

WORDS = re.findall(
    r"\w+",
    "the a cat dog house tree river runs sleeps eats sees big small red green old new and or not in on under over "
    "good bad fine awful great never always today tomorrow yesterday he she it they we you number say hello world",
)

TEXTS = [f"{' '.join(WORDS[i % 40 : i % 40 + i % 9 + 1])}\n\t café №{i} 日本 ’s" for i in range(60)]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use neither the Hub nor the user's caches."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a WordPiece tokenizer with ``[CLS] … [SEP]``."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator([WORDS], trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("bert-tokenizer")
    fast.save_pretrained(folder)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("\n".join(word for word, _ in vocabulary), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def gpt_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a byte-level BPE tokenizer with an end token and no padding token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>", unk_token="<|endoftext|>"
    )
    folder = tmp_path_factory.mktemp("gpt-tokenizer")
    fast.save_pretrained(folder)
    tokenizer.model.save(str(folder))  # writes vocab.json and merges.txt
    return folder


Configure = Callable[..., RunConfig]
Preprocess = Callable[..., PreprocessResult]


@pytest.fixture
def configure() -> Configure:
    """A function that builds a configuration with values from the command line."""

    def make(**values: Any) -> RunConfig:
        return RunConfig().replace("command line", **values)

    return make


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "dropout": 0.0}


Load = Callable[..., Task]
ARCHITECTURES = {"causal_lm": "gpt2", "preference": "gpt2", "reward": "gpt2", "seq2seq_lm": "t5"}
"""The architecture of a task, if it is not BERT."""


ANSWER = {"text": ["tree"], "answer_start": [6]}
PAIR = {"chosen": " sees a tree", "rejected": " eats"}
ROW_OF: dict[str, Callable[[str], dict[str, Any]]] = {
    "sequence_classification": lambda text: {"text": text, "label": "xy"[len(text) % 2]},
    "token_classification": lambda text: {"tokens": text.split(), "ner_tags": ["X"] * len(text.split())},
    "question_answering": lambda text: {"question": text, "context": "a big tree", "answers": ANSWER},
    "multiple_choice": lambda text: {"context": text, "choices": ["sees a tree", "eats"], "label": 1},
    "masked_lm": lambda text: {"text": text},
    "causal_lm": lambda text: {"text": text},
    "seq2seq_lm": lambda text: {"source": text, "target": "sees a tree under the big house"},
    "preference": lambda text: {"prompt": text, **PAIR},
    "reward": lambda text: {"prompt": text, **PAIR},
}
"""How each task of fine-tuning gets a row with a text."""


@pytest.fixture
def load(tmp_path: Path, configure: Configure, bert_folder: Path, gpt_folder: Path) -> Load:
    """A function that writes rows to ``train.jsonl`` and ``valid.jsonl``, if there are any, and loads a task for them.

    No row is held out. Flags replace the architecture of :data:`ARCHITECTURES`, and the tokenizer that belongs to it.
    """

    def make(
        task: str, rows: Iterable[dict[str, Any]] = (), valid: Iterable[dict[str, Any]] = (), **flags: Any
    ) -> Task:
        for part, content in {"train": rows, "valid": valid}.items():
            if content:
                write_jsonl(tmp_path / f"{part}.jsonl", content)
        if "pretrained_model_name_or_path" not in flags:
            flags = TINY | {"model_type": ARCHITECTURES.get(task, "bert")} | flags
        tokenizer = gpt_folder if flags.get("model_type") == "gpt2" else bert_folder
        common = {"data_dir": str(tmp_path), "tokenizer_path": str(tokenizer), "validation_fraction": 0.0}
        return load_task(configure(task=task, **(common | flags)))

    return make


DOCUMENTS = [" ".join(np.random.default_rng(i).choice(WORDS, 5 + i % 17)) for i in range(60)]


@pytest.fixture
def flags(tmp_path: Path, gpt_folder: Path) -> dict[str, Any]:
    write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in DOCUMENTS])
    return {
        "task": "pretraining", "model_type": "gpt2", "tokenizer_path": str(gpt_folder), "seq_length": 16,
        "data_path": (str(tmp_path / "corpus.jsonl"),), "data_cache_dir": str(tmp_path / "cache"), **TINY,
    }  # fmt: skip


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A JSON Lines file with ``TEXTS``."""
    return write_jsonl(tmp_path / "corpus.jsonl", [{"text": text, "id": i} for i, text in enumerate(TEXTS)])


@pytest.fixture
def recipe(gpt_folder: Path) -> EncodingRecipe:
    """How to use the tokenizer of ``gpt_folder``."""
    return EncodingRecipe((gpt_folder / "tokenizer.json").read_text(encoding="utf-8"), "uint16", end=0)


@pytest.fixture
def make(tmp_path: Path, recipe: EncodingRecipe) -> Preprocess:
    """A function that preprocesses into ``tmp_path/out_…``, with one worker by default."""

    def run(*files: Path, recipe: EncodingRecipe = recipe, prefix: str = "out", **options: Any) -> PreprocessResult:
        options = {"workers": 1, "backend": "transformers", **options}
        return preprocess.preprocess(files, str(tmp_path / prefix), recipe, **options)

    return run


def files_of(prefix: str | Path) -> list[bytes]:
    """Return the contents of all files of a data set."""
    return [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx", "sums.json")]
