"""Windows and documents as samples, compared with plain loops and Megatron-LM, and each objective in the black box."""

import logging
import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForPreTraining, AutoTokenizer, PreTrainedTokenizerFast

from rapidformer_templates import Pretrainer
from rapidformer_templates.data.collate import IGNORED, DocumentCollate, collate_to_shape, count_targets
from rapidformer_templates.data.indexed.corpora import IndexCache
from rapidformer_templates.data.indexed.writer import IndexedWriter
from rapidformer_templates.data.pretraining import samples as samples_module
from rapidformer_templates.data.pretraining.samples import Documents, GPTSamples
from rapidformer_templates.data.shapes import Shape
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.errors import DataError, RapidformerError
from rapidformer_templates.run.folder import read_metrics
from tests.support.indexed_sets import numbered
from tests.support.messages import Says
from tests.support.selection import by_default
from tests.support.texts import TINY, WORDS, Configure, write_jsonl

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def _row_of(samples: GPTSamples, epoch: int) -> list[int]:
    """Return all tokens of an epoch, by drawing the orders again and reading the documents one by one."""
    state = np.random.RandomState(samples.seed if epoch == 0 else [samples.seed, epoch])
    documents = list(range(*samples.part))
    state.shuffle(documents)
    return [int(token) for document in documents for token in samples.dataset[document]]


@given(LENGTHS, st.integers(1, 50), st.integers(0, 1), st.integers(0, 3), st.data())
@settings(max_examples=80, deadline=None)
def test_an_epoch_is_its_documents_cut_into_samples(
    lengths: list[int], length: int, overlap: int, epoch: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    with tempfile.TemporaryDirectory() as folder:
        dataset = numbered(Path(folder) / "set", lengths)
        samples = GPTSamples(dataset, (first, last), length, 7, overlap=overlap)
        row = _row_of(samples, epoch)
        expected = [
            row[i : i + length + overlap] for i in range(0, len(row), length) if i + length + overlap <= len(row)
        ]
        assert len(samples) == len(expected)
        if not expected:
            return
        positions = range(epoch * len(samples), (epoch + 1) * len(samples))
        drawn = [item["input_ids"].tolist() for item in samples.__getitems__(positions)]
        assert sorted(drawn) == sorted(expected)
        assert drawn == [samples[p]["input_ids"].tolist() for p in positions]


def test_batches_may_cross_epochs(tmp_path: Path) -> None:
    samples = GPTSamples(numbered(tmp_path / "set", [5, 9, 4, 12]), (0, 4), 4, 1)
    positions = range(3, 3 + 3 * len(samples))
    together = [item["input_ids"].tolist() for item in samples.__getitems__(positions)]
    assert together == [samples[p]["input_ids"].tolist() for p in positions]
    assert together[: len(samples)] != together[len(samples) : 2 * len(samples)]


def test_marks_change_where_documents_begin(tmp_path: Path) -> None:
    lengths = [5, 1, 9, 4, 12, 2]
    dataset = numbered(tmp_path / "set", lengths)
    begins = {0, *np.cumsum(lengths).tolist()}
    for item in GPTSamples(dataset, (0, 6), 8, 1, marks_documents=True).__getitems__(range(4)):
        changes = np.diff(item["documents"]) != 0
        # Tokens are numbered consecutively, so the first token of a document is known by its number.
        assert changes.tolist() == [int(token) in begins for token in item["input_ids"][1:]]


def test_tables_are_shared_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = numbered(tmp_path / "set", [7, 8, 9] * 10)
    cache = IndexCache(tmp_path / "cache")
    samples = GPTSamples(dataset, (0, 30), 16, 3, cache=cache)
    drawn = [samples[p]["input_ids"].tolist() for p in range(30)]
    folders = sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert len(folders) == 3  # the epochs used by 30 samples
    copy = pickle.loads(pickle.dumps(samples))
    assert len(pickle.dumps(samples)) < 2000
    assert [copy[p]["input_ids"].tolist() for p in range(30)] == drawn
    assert sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()) == folders
    GPTSamples(numbered(tmp_path / "set", [7, 8, 10] * 10), (0, 30), 16, 3, cache=cache)[0]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 4  # a new set, a new index
    for version, kept in (("PAIRS_VERSION", 4), ("WINDOWS_VERSION", 5)):  # each kind of table has a version of its own
        monkeypatch.setattr(samples_module, version, 99)
        GPTSamples(dataset, (0, 30), 16, 3, cache=cache)[0]
        assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == kept


@pytest.mark.parametrize("length", [16, 200])
def test_the_first_epoch_is_megatrons(tmp_path: Path, length: int) -> None:
    gpt_dataset = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="needs megatron-core")
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    split = pytest.importorskip("megatron.core.datasets.utils").Split.train
    logging.getLogger("megatron").setLevel(logging.ERROR)

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, 10**6, 10**6 + 1, {}

    lengths = np.random.default_rng(0).integers(1, 120, 500)
    dataset = numbered(tmp_path / "set", lengths.tolist())
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=1234, sequence_length=length, split="1", tokenizer=Tokenizer(), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        path_to_cache=str(tmp_path / "megatron"),
    )  # fmt: skip
    prefix = str(tmp_path / "set")
    documents = np.arange(10, 480, dtype=np.int32)
    theirs = gpt_dataset.GPTDataset(indexed.IndexedDataset(prefix), prefix, documents, None, split, config)
    ours = GPTSamples(dataset, (10, 480), length, 1234)
    assert len(ours) == len(theirs)
    for place in range(len(ours)):
        tokens, sample = ours[place]["input_ids"], theirs[place]
        assert tokens[:-1].tolist() == sample["tokens"].tolist()
        assert tokens[1:].tolist() == sample["labels"].tolist()


SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=20)


def _stream(sizes: list[int]) -> SimpleNamespace:
    """Build an indexed data set with these sequence lengths. All tokens are different."""
    ends = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.arange(ends[-1], dtype=np.int32)
    return SimpleNamespace(tokens=tokens, pointers=ends[:-1] * 4, lengths=np.array(sizes, np.int32), dtype=tokens.dtype)


@given(SIZES, st.integers(1, 12), st.integers(0, 5), st.integers(0, 1))
@settings(max_examples=100, deadline=None)
def test_documents_are_cut_as_by_hand(sizes: list[int], length: int, first: int, overlap: int) -> None:
    stream = _stream(sizes)
    part = (min(first, len(sizes)), len(sizes))
    expected = []
    for number in range(*part):
        begin = sum(sizes[:number])
        tokens = list(range(begin, begin + sizes[number]))
        expected += [tokens[i : i + length + overlap] for i in range(0, len(tokens) - overlap, length)]
    documents = Documents(stream, part, length, overlap=overlap)
    assert [sample["input_ids"].tolist() for sample in documents] == expected
    assert documents.sizes.tolist() == [len(tokens) for tokens in expected]
    assert documents.tokens == sum(map(len, expected))
    shifted = _stream(sizes)
    shifted.tokens = shifted.tokens + 1000
    three = documents + Documents(shifted, part, length, overlap=overlap) + documents
    beyond = [[token + 1000 for token in row] for row in expected]
    assert [sample["input_ids"].tolist() for sample in three] == expected + beyond + expected
    assert three.sizes.tolist() == 3 * documents.sizes.tolist()


@given(SIZES, st.integers(1, 12), st.sampled_from([0.3, 1.0]))
@settings(max_examples=60, deadline=None)
def test_short_samples_lose_nothing(sizes: list[int], length: int, probability: float) -> None:
    stream = _stream(sizes)
    plain = Documents(stream, (0, len(sizes)), length)
    short = Documents(stream, (0, len(sizes)), length, short_probability=probability, seed=3)
    rows = [sample["input_ids"].tolist() for sample in short]
    assert [token for row in rows for token in row] == stream.tokens.tolist()
    assert short.sizes.tolist() == [len(row) for row in rows]
    assert all(rows)
    if probability == 1:
        assert len(short) == sum(2 if size > 1 else 1 for size in plain.sizes.tolist())


def test_each_token_of_a_document_is_a_target_once() -> None:
    """Windows have the same property. With any cut, the last target of a row is the first token of the next."""
    documents = Documents(_stream([7, 1, 4]), (0, 3), 3, overlap=1)
    rows = [documents[i] for i in range(len(documents))]
    batch = collate_to_shape(DocumentCollate(99), rows, Shape(4, 5))
    assert batch["input_ids"].tolist() == [[0, 1, 2, 99, 99], [3, 4, 5, 99, 99], [8, 9, 10, 99, 99], [0, 1, 2, 99, 99]]
    ignored = [IGNORED] * 2
    targets = [[1, 2, 3, *ignored], [4, 5, 6, *ignored], [9, 10, 11, *ignored], [IGNORED] * 5]
    assert batch["shift_labels"].tolist() == targets
    assert count_targets(batch, shifted=True) == 9


@pytest.mark.parametrize("flags", ["--model-type t5", "--model-type bert --sentence-pairs", "--model-type gpt2"])
def test_samples_of_other_kinds_and_weights_are_refused(
    flags: str, tmp_path: Path, gpt_folder: Path, says: Says
) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": "the cat"}])
    data = f"--tokenizer-path {gpt_folder} --data-path 1 {corpus} 2 {corpus} --data-iterator dynamic-shape"
    with says(DataError):
        Pretrainer(f"{flags} {data} --train-iters 1 --lr 1 --no-save".split()).fit()


def test_the_asked_share_is_cut_and_by_the_seed() -> None:
    stream = _stream([100] * 5000)
    counts = [len(Documents(stream, (0, 5000), 100, short_probability=0.1, seed=seed)) for seed in (1, 2)]
    assert counts[0] != counts[1]
    assert counts[0] == pytest.approx(5500, abs=100)
    heads = Documents(stream, (0, 5000), 100, short_probability=1.0, seed=1).sizes[::2]
    assert (heads.min(), heads.max()) == (1, 99)
    assert heads.mean() == pytest.approx(50, abs=2)


MODELS = [("gpt2", "gpt_folder"), ("bert", "bert_folder")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "folder"), by_default(MODELS[:1], MODELS))
def test_a_corpus_is_trained_on_document_by_document(
    model: str, folder: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Run the black box on a raw corpus. Lengths are known in advance although some sequences are short."""
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS, draw.integers(1, 60))) for _ in range(300)]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", ({"text": text} for text in texts))
    short = "--short-seq-prob 0.5" if model == "bert" else ""
    template = Pretrainer(
        f"--model-type {model} --num-layers 1 --hidden-size 16 --num-attention-heads 2 --dropout 0 --seq-length 32"
        f" --tokenizer-type HuggingFaceTokenizer --tokenizer-path {request.getfixturevalue(folder)}"
        f" --data-path {corpus} --split 9,1 --data-iterator dynamic-shape --tokens-per-batch 512 --max-shapes 4"
        f" --epochs 2 --lr 1e-2 --save {tmp_path / 'run'} --device cpu {short}".split()
    )
    summary = template.fit()
    train, augment, lengths = template.data.train, template.data.augment, template.data.lengths
    assert isinstance(train, Documents)
    # There are 270 documents. For BERT, half of them are halved. Documents above 32 tokens are cut into pieces.
    assert summary["samples"] == 2 * len(train)
    assert len(train) > (400 if model == "bert" else 290)
    samples = [augment(train[i], draw) if augment else train[i] for i in range(len(train))]
    assert template.data.collate is not None
    assert [template.data.collate([sample])["input_ids"].shape[1] for sample in samples] == lengths.tolist()
    assert summary["tokens"] == summary["receipts"]["useful_tokens"] == 2 * lengths.sum()
    assert lengths.max() == 32
    assert 0.7 < summary["receipts"]["fill"] < 1
    assert len(summary["receipts"]["batch_shapes"]) <= 4
    if model == "gpt2":  # a document keeps its end token, from which the model learns where to stop
        assert sum(sample["input_ids"][-1] == template.tokenizer.eos_token_id for sample in samples) == 270


@pytest.fixture
def t5_folder(tmp_path: Path) -> Path:
    tokens = ["<pad>", "</s>", "<unk>", *dict.fromkeys(WORDS)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=[f"<extra_id_{i}>" for i in range(20)],
    )  # fmt: skip
    fast.save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


def write_sentences(prefix: Path, tokenizer: Any, seed: int = 0) -> str:
    """Write sixty documents. WordPiece has to split their words: each consists of two."""
    glue = "" if tokenizer.cls_token else " "
    generator = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(60):
            lengths = generator.integers(2, 9, size=generator.integers(1, 8))
            pairs = [generator.choice(WORDS, (length, 2)).tolist() for length in lengths]
            texts = [" ".join(glue.join(pair) for pair in text) for text in pairs]
            rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
            writer.add(np.concatenate(rows), np.array([len(row) for row in rows]), np.array([len(rows)]))
    return str(prefix)


def flags_of(folder: Path, tokenizer: Path, *, blend: bool = False, **more: Any) -> dict[str, Any]:
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    path: tuple[str, ...] = (write_sentences(folder / "a", loaded),)
    if blend:
        path = ("0.25", *path, "0.75", write_sentences(folder / "b", loaded, seed=1))
    return {
        "task": "pretraining", "tokenizer_path": str(tokenizer), "seq_length": 32, "data_path": path, "split": "8,2",
        "data_cache_dir": str(folder / "cache"), **TINY, **more,
    }  # fmt: skip


def fit(flags: dict[str, Any], folder: Path, **more: Any) -> list[Any]:
    """Return the metrics lines of a short run."""
    run = {"train_iters": 4, "lr": 1e-3, "log_interval": 1, "global_batch_size": 8, "micro_batch_size": 8}
    Pretrainer([], **(flags | run | {"save": str(folder), "device": "cpu"} | more)).fit()
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize(("model_type", "blend"), [("bert", False), ("bert", True), ("albert", False)])
def test_pairs_through_the_black_box(model_type: str, blend: bool, bert_folder: Path, tmp_path: Path) -> None:
    flags = flags_of(tmp_path, bert_folder, model_type=model_type, sentence_pairs=True, blend=blend)
    lines = fit(flags, tmp_path / "whole")
    # The loss does not depend on how a batch is divided, although it is a sum of two losses.
    cut = fit(flags, tmp_path / "cut", micro_batch_size=2)
    for whole, parts in zip(lines, cut, strict=True):
        for name in {"loss", "grad_norm", "eval_loss"} & whole.keys():
            assert whole[name] == pytest.approx(parts[name], rel=2e-5)
    assert np.isfinite([line["loss"] for line in lines if "loss" in line]).all()
    head = AutoModelForPreTraining.from_pretrained(tmp_path / "whole" / "export")
    assert type(head).__name__.endswith("ForPreTraining")


def test_spans_through_the_black_box(t5_folder: Path, tmp_path: Path) -> None:
    flags = flags_of(tmp_path, t5_folder, model_type="t5", mask_prob=0.25, mean_span_length=2.0)
    lines = fit(flags, tmp_path / "run")
    assert np.isfinite([line["loss"] for line in lines if "loss" in line]).all()
    assert any("eval_loss" in line for line in lines)


def test_spans_fill_the_sequence_length(configure: Configure, t5_folder: Path, tmp_path: Path) -> None:
    task = load_task(configure(**flags_of(tmp_path, t5_folder, model_type="t5")))
    task.check()
    data: Any = task.build_data()
    batch = data.collate([data.augment(data.train[i], np.random.default_rng(i)) for i in range(4)])
    assert batch["input_ids"].shape == (4, 32)
    assert "attention_mask" not in batch
    with torch.no_grad():
        outputs = task.build_model()(**batch)
    guesses, truths = task.predict(outputs, batch)
    assert sum(map(len, truths)) == int((batch["labels"] != IGNORED).sum())
    assert len(guesses) == 4


def test_windows_mask_whole_words(configure: Configure, bert_folder: Path, tmp_path: Path) -> None:
    task: Any = load_task(configure(**flags_of(tmp_path, bert_folder, model_type="bert", whole_word_mask=True)))
    data, words = task.build_data(), 0
    starts = task.mask.starts
    for i in range(10):
        sample = data.augment(data.train[i], np.random.default_rng(i))
        chosen = sample["labels"] != IGNORED
        tokens = np.where(chosen, sample["labels"], sample["input_ids"])
        goes_on = np.flatnonzero(~starts[tokens[2:]]) + 2
        assert (chosen[goes_on] == chosen[goes_on - 1]).all()
        words += len(goes_on)
    assert words > 20


def test_flags_of_other_objectives_are_refused(configure: Configure, bert_folder: Path, says: Says) -> None:
    for model_type, flag, value in (
        ("bert", "mean_span_length", 2.0), ("gpt2", "mask_prob", 0.2), ("gpt2", "sentence_pairs", True),
        ("t5", "short_seq_prob", 0.0), ("t5", "whole_word_mask", True), ("roberta", "sentence_pairs", True),
        ("fnet", "sentence_pairs", True),
    ):  # fmt: skip
        with says(RapidformerError):
            given = {"model_type": model_type, "tokenizer_path": str(bert_folder), flag: value}
            load_task(configure(task="pretraining", **given))
