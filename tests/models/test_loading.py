"""Architectures from scratch, pretrained folders, and every way in which a folder does not fit."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.adapters import new_modules_of
from rapidformer_templates.models.architectures import dropout_rates, objective_of, positions_of, scratch_config
from rapidformer_templates.models.loading import build_model, check_seq_length
from rapidformer_templates.models.model_files import OWN_EXPERTS, load_tokenizer
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.registry import REGISTRY
from tests.support.messages import Says
from tests.support.texts import TINY, Configure

pytestmark = pytest.mark.usefixtures("offline")


HEADS = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "seq2seq": "AutoModelForSeq2SeqLM"}


@pytest.mark.parametrize(
    ("model_type", "objective"),
    [
        ("gpt2", "causal"), ("llama", "causal"), ("gpt_neox", "causal"), ("mixtral", "causal"), ("qwen2", "causal"),
        ("opt", "causal"), ("bert", "masked"), ("roberta", "masked"), ("t5", "seq2seq"), ("bart", "seq2seq"),
    ],
)  # fmt: skip
def test_from_scratch(
    model_type: str, objective: str, bert_folder: Path, gpt_folder: Path, configure: Configure
) -> None:
    assert objective_of(model_type) == objective
    folder = gpt_folder if objective == "causal" else bert_folder
    config = configure(model_type=model_type, tokenizer_path=str(folder), max_position_embeddings=None, **TINY)
    torch.manual_seed(0)
    model = build_model(config, HEADS[objective]).eval()
    tokenizer = load_tokenizer(config)
    made = model.config
    assert (made.hidden_size, made.num_hidden_layers, made.num_attention_heads, made.use_cache) == (32, 2, 4, False)
    assert made.vocab_size % 128 == 0
    assert made.vocab_size >= len(tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    ids = torch.randint(5, len(tokenizer), (2, 12))
    outputs = model(input_ids=ids, labels=ids)
    assert outputs.loss.isfinite()
    assert outputs.logits.shape == (2, 12, model.config.vocab_size)


def test_an_architecture_whose_configuration_knows_no_padding(gpt_folder: Path, configure: Configure) -> None:
    config = configure(model_type="rwkv", tokenizer_path=str(gpt_folder), num_layers=2, hidden_size=32)
    model = build_model(config, HEADS["causal"])
    assert model.config.eos_token_id == load_tokenizer(config).eos_token_id


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "llama", "gpt_neox", "mixtral", "t5"])
def test_feed_forward_keeps_the_ratio_of_the_architecture(
    model_type: str, bert_folder: Path, configure: Configure
) -> None:
    config = configure(model_type=model_type, tokenizer_path=str(bert_folder), **(TINY | {"hidden_size": 64}))
    sizes = build_model(config, HEADS[objective_of(model_type)]).config.to_dict()
    width = next((sizes[name] for name in ("d_ff", "n_inner", "intermediate_size") if sizes.get(name)), 4 * 64)
    assert width == {"llama": 176, "mixtral": 224}.get(model_type, 256)  # 2.6875 and 3.5 times 64, in multiples of 8


def test_dropout_reaches_every_layer(bert_folder: Path, configure: Configure) -> None:
    config = configure(model_type="bert", tokenizer_path=str(bert_folder), **(TINY | {"dropout": 0.25}))
    model = build_model(config, "AutoModelForSequenceClassification", num_labels=3)
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}
    assert model.config.num_labels == 3


def test_an_encoder_as_causal_model_sees_no_future(bert_folder: Path, configure: Configure) -> None:
    config = configure(model_type="bert", tokenizer_path=str(bert_folder), **TINY)
    model = build_model(config, "AutoModelForCausalLM").eval()
    ids = torch.randint(5, 50, (1, 8))
    changed = ids.clone()
    changed[0, -1] = 60
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[:, :-1], model(changed).logits[:, :-1])


@pytest.fixture
def pretrained(tmp_path: Path, bert_folder: Path, configure: Configure) -> Path:
    """Save a small masked language model with its tokenizer."""
    config = configure(model_type="bert", tokenizer_path=str(bert_folder), max_position_embeddings=64, **TINY)
    folder = tmp_path / "model"
    build_model(config, "AutoModelForMaskedLM").save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)
    return folder


def test_pretrained_weights_are_taken(pretrained: Path, configure: Configure) -> None:
    config = configure(pretrained_model_name_or_path=str(pretrained), dropout=0.3)
    model = build_model(config, "AutoModelForSequenceClassification", num_labels=2)
    saved = load_file(pretrained / "model.safetensors")
    own = model.state_dict()
    shared = [name for name in saved if name in own]
    assert len(shared) > 20
    assert all(torch.equal(saved[name], own[name]) for name in shared)
    assert model.config.hidden_dropout_prob == 0.3


LAYER = "bert.encoder.layer.0.output.dense.weight"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "a missing weight": lambda weights: {name: weight for name, weight in weights.items() if name != LAYER},
    "another shape": lambda weights: weights | {LAYER: torch.zeros(32, 7)},
    "compiled": lambda weights: {f"_orig_mod.{name}": weight for name, weight in weights.items()},
    "wrapped": lambda weights: {f"module.{name}": weight for name, weight in weights.items()},
    "a checkpoint of lightning": lambda weights: {"epoch": 3, "state_dict": {"model.w": torch.ones(1)}},  # type: ignore[dict-item]
}
CONTENTS: dict[str, dict[str, str | None]] = {
    "no tensor": {"model.safetensors": "not a tensor"},
    "no weights": {"model.safetensors": None},
    "no JSON": {"config.json": "{"},
    "no configuration": {"config.json": None},
    "the folder of a run": {"config.json": None, "export/config.json": "{}"},
    **{f"a pointer in {name}": {"model.safetensors": None, "pytorch_model.bin": "", name: POINTER}
       for name in ("model.safetensors", "pytorch_model.bin", "tokenizer.json")},
}  # fmt: skip


@pytest.mark.parametrize("case", [*CHANGES, *CONTENTS])
def test_folders_that_cannot_be_read(case: str, pretrained: Path, configure: Configure, says: Says) -> None:
    weights = pretrained / "model.safetensors"
    if case in CHANGES:
        changed = CHANGES[case](load_file(weights))
        if LAYER in changed or case == "a missing weight":
            save_file(changed, weights, {"format": "pt"})
        else:
            weights.unlink()
            torch.save(changed, pretrained / "pytorch_model.bin")
    for name, content in CONTENTS.get(case, {}).items():
        (pretrained / name).parent.mkdir(exist_ok=True)
        (pretrained / name).unlink(missing_ok=True)
        if content is not None:
            (pretrained / name).write_text(content)
    with says(ModelError):
        build_model(configure(pretrained_model_name_or_path=str(pretrained)), "AutoModelForMaskedLM")


def test_flags_that_do_not_fit_a_folder(pretrained: Path, configure: Configure, says: Says) -> None:
    folder = {"pretrained_model_name_or_path": str(pretrained)}
    with says(ModelError):
        build_model(configure(**folder), "AutoModelForSeq2SeqLM")
    for flags in (
        {"pretrained_model_name_or_path": f"{pretrained}s", "tokenizer_path": str(pretrained)},
        folder | {"num_layers": 3},
        folder | {"seq_length": 65},
    ):
        with says(ModelError):
            build_model(configure(**flags), "AutoModelForMaskedLM")


def test_a_tokenizer_with_more_tokens_than_the_model(
    pretrained: Path, tmp_path: Path, configure: Configure, says: Says
) -> None:
    tokenizer = load_tokenizer(configure(tokenizer_path=str(pretrained)))
    tokenizer.add_tokens([f"extra{i}" for i in range(500)])
    tokenizer.save_pretrained(tmp_path / "large")
    flags = {"pretrained_model_name_or_path": str(pretrained), "tokenizer_path": str(tmp_path / "large")}
    with says(ModelError):
        build_model(configure(**flags), "AutoModelForMaskedLM")


def test_code_in_a_folder_is_not_run(pretrained: Path, configure: Configure, says: Says) -> None:
    own = json.loads((pretrained / "config.json").read_text(encoding="utf-8"))
    own |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForMaskedLM": "mine.Model"}}
    (pretrained / "config.json").write_text(json.dumps(own), encoding="utf-8")
    config = configure(pretrained_model_name_or_path=str(pretrained), tokenizer_path=None)
    with says(ModelError):
        build_model(config, "AutoModelForMaskedLM", load_tokenizer(configure(tokenizer_path=str(pretrained))))


def test_architectures_and_sizes_that_do_not_fit(bert_folder: Path, configure: Configure, says: Says) -> None:
    flags = {"tokenizer_path": str(bert_folder), **TINY}
    for more in (
        {"model_type": "brt"}, {}, {"model_type": "bert", "num_attention_heads": 5},
        {"model_type": "bert", "max_position_embeddings": 16, "seq_length": 32}, {"model_type": "bert", "dropout": 1.0},
        {"model_type": "vit"},
    ):  # fmt: skip
        with says(ModelError):
            build_model(configure(**(flags | more)), "AutoModelForMaskedLM")


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_a_model_takes_sequences_as_long_as_its_positions(
    model_type: str, bert_folder: Path, configure: Configure
) -> None:
    flags = {"model_type": model_type, "tokenizer_path": str(bert_folder), "max_position_embeddings": 16, **TINY}
    model = build_model(configure(**flags, seq_length=16), "AutoModelForMaskedLM").eval()
    assert positions_of(model.config) == 16
    ids = torch.randint(5, 50, (1, 16))
    assert model(ids, labels=ids).loss.isfinite()
    with pytest.raises(ModelError):
        check_seq_length(configure(seq_length=17), model.config)


def test_positions_reach_the_sequence_length(bert_folder: Path, configure: Configure) -> None:
    config = configure(model_type="gpt2", tokenizer_path=str(bert_folder), seq_length=2048, **TINY)
    assert positions_of(build_model(config, "AutoModelForCausalLM").config) == 2048


def test_a_rate_of_zero_may_be_written_as_a_whole_number() -> None:
    default = transformers.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0.0, classifier_dropout=None)
    assert dropout_rates(default, 0.5) == {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}


@pytest.mark.parametrize("model_type", sorted(OWN_EXPERTS))
@pytest.mark.parametrize("experts", [1, 16])
def test_a_token_visits_as_many_experts_as_there_are(experts: int, model_type: str, gpt_folder: Path) -> None:
    given = {"model_type": model_type, "tokenizer_path": str(gpt_folder), "num_experts": experts, **TINY}
    config = REGISTRY.complete(RunConfig()).replace("command line", **given)
    built = scratch_config(config, "AutoModelForCausalLM", load_tokenizer(config))
    usual = transformers.CONFIG_MAPPING[model_type]().num_experts_per_tok
    assert built.num_experts_per_tok == min(experts, usual)
    asked = config.replace("command line", moe_top_k=1)
    assert scratch_config(asked, "AutoModelForCausalLM", load_tokenizer(asked)).num_experts_per_tok == 1


def test_tokenizers_from_files_equal_those_from_folders(
    bert_folder: Path, gpt_folder: Path, configure: Configure
) -> None:
    text = "The big CAT sleeps, say hello"
    files = {"vocab_file": str(bert_folder / "vocab.txt")}
    lower = load_tokenizer(configure(tokenizer_type="BertWordPieceLowerCase", **files))
    assert lower(text)["input_ids"] == transformers.AutoTokenizer.from_pretrained(bert_folder)(text)["input_ids"]
    cased = load_tokenizer(configure(tokenizer_type="BertWordPieceCase", **files))
    assert cased("CAT")["input_ids"] == [2, 1, 3]  # the tokenizer knows only lower case
    files = {"vocab_file": str(gpt_folder / "vocab.json"), "merge_file": str(gpt_folder / "merges.txt")}
    bpe = load_tokenizer(configure(tokenizer_type="GPT2BPETokenizer", **files))
    own = load_tokenizer(configure(tokenizer_type="HuggingFaceTokenizer", tokenizer_path=str(gpt_folder)))
    assert bpe(text)["input_ids"] == own(text)["input_ids"]
    assert own.pad_token_id == own.eos_token_id  # it had no padding token


def test_tokenizers_that_are_not_there(configure: Configure, tmp_path: Path, says: Says) -> None:
    file = tmp_path / "text.txt"
    file.write_text("no tokens")
    for flags in (
        {}, {"tokenizer_type": "BertWordPieceCase"}, {"tokenizer_type": "BertWordPieceCase", "vocab_file": "no.txt"},
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(file)}, {"tokenizer_path": "no/folder"},
        {"tokenizer_path": str(tmp_path)},
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(file), "merge_file": str(file)},
    ):  # fmt: skip
        with says(ModelError):
            load_tokenizer(configure(**flags))


Weights = dict[str, torch.Tensor]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
CAUSAL, TEXTS, MASKED = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"
CLASSES, PAIRS = "AutoModelForSequenceClassification", "AutoModelForPreTraining"
LLAMA = transformers.LlamaConfig(vocab_size=400, **SIZES, pad_token_id=0)
BERT = transformers.BertConfig(vocab_size=400, **SIZES)
GPT2 = transformers.GPT2Config(vocab_size=400, n_embd=16, n_layer=2, n_head=2)
T5 = transformers.T5Config(vocab_size=400, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)


def _without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {other: weight for other, weight in weights.items() if other != name}


def _with(end: str, tensor: torch.Tensor) -> Callable[[Weights], Weights]:
    """Add a tensor to each block, as other architectures or former versions of transformers have it."""

    def add(weights: Weights) -> Weights:
        blocks = {name[: match.end()] for name in weights if (match := re.search(r"\.\d+", name))}
        return weights | {f"{block}.{end}": tensor.clone() for block in blocks}

    return add


def _with_head(weights: Weights) -> Weights:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}


class Folder(NamedTuple):
    """A folder, and what happens with it.

    Attributes:
        saved: the class and configuration that were saved.
        auto_class: the class that the task needs.
        new: the names of the modules that begin with random values. None: the folder is refused.
        change: changes the weights in the folder.
        config: changes of its ``config.json``.
        labels: number of labels of the task.
    """

    saved: tuple[type[transformers.PreTrainedModel], transformers.PreTrainedConfig]
    auto_class: str
    new: set[str] | None = None
    change: Callable[[Weights], Weights] = lambda weights: weights
    config: dict[str, Any] | None = None
    labels: int | None = None


LM = (transformers.LlamaForCausalLM, LLAMA)
DENSE, QUERY = "cls.predictions.transform.dense.weight", "decoder.block.1.layer.0.SelfAttention.q.weight"
TIED = transformers.LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
FOLDERS = {
    "no head": Folder(LM, CAUSAL, change=_without("lm_head.weight")),
    "body": Folder((transformers.LlamaModel, LLAMA), CAUSAL),
    "classifier": Folder((transformers.LlamaForSequenceClassification, LLAMA), CAUSAL),
    "classifier without a head": Folder(
        (transformers.BertForSequenceClassification, BERT), CLASSES, change=_without("classifier.weight"), labels=2
    ),
    "half of a masked head": Folder((transformers.BertForMaskedLM, BERT), MASKED, change=_without(DENSE)),
    "no layer of t5": Folder((transformers.T5ForConditionalGeneration, T5), TEXTS, change=_without(QUERY)),
    "too few blocks": Folder(LM, CAUSAL, config={"num_hidden_layers": 4}),
    "too many blocks": Folder(LM, CAUSAL, config={"num_hidden_layers": 2}),
    "vocabulary": Folder(LM, CAUSAL, config={"vocab_size": 500}),
    "width": Folder(LM, CAUSAL, config={"intermediate_size": 48}),
    "tied in the configuration alone": Folder(LM, CAUSAL, config={"tie_word_embeddings": True}),
    "biases of qwen2": Folder(LM, CAUSAL, change=_with("self_attn.q_proj.bias", torch.zeros(16))),
    "norms of qwen3": Folder(LM, CAUSAL, change=_with("self_attn.q_norm.weight", torch.ones(8))),
    "frequencies of former versions": Folder(LM, CAUSAL, set(), _with("self_attn.rotary_emb.inv_freq", torch.ones(4))),
    "masks of former versions": Folder(
        (transformers.GPT2LMHeadModel, GPT2),
        CAUSAL,
        set(),
        _with("attn.bias", torch.ones(1, 1, 8, 8, dtype=torch.bool)),
    ),
    "tied, in two copies": Folder((transformers.LlamaForCausalLM, TIED), CAUSAL, set(), _with_head),
    "new classifier": Folder((transformers.LlamaModel, LLAMA), CLASSES, {"score"}, labels=3),
    "new pooler": Folder((transformers.BertForMaskedLM, BERT), CLASSES, {"bert.pooler.dense", "classifier"}, labels=3),
    "classifier for other labels": Folder(
        (transformers.BertForSequenceClassification, BERT), CLASSES, {"classifier"}, labels=3
    ),
    "new head for pairs": Folder(
        (transformers.BertForMaskedLM, BERT), PAIRS, {"bert.pooler.dense", "cls.seq_relationship"}
    ),
    "new masked head": Folder(
        (transformers.BertModel, BERT),
        MASKED,
        {"cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"},
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_whole_or_refused(
    name: str, tmp_path: Path, gpt_folder: Path, configure: Configure, says: Says
) -> None:
    (kind, config), auto_class, new, change, changed, labels = FOLDERS[name]
    kind(config).save_pretrained(tmp_path)
    save_file(change(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors", {"format": "pt"})
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | (changed or {})))
    flags = configure(pretrained_model_name_or_path=str(tmp_path), tokenizer_path=str(gpt_folder))
    options = {"num_labels": labels} if labels else {}
    with says(ModelError) if new is None else contextlib.nullcontext():
        model = build_model(flags, auto_class, transformers.AutoTokenizer.from_pretrained(gpt_folder), **options)
        assert set(new_modules_of(model)) >= (new or set())
        assert bool(new_modules_of(model)) == bool(new)
