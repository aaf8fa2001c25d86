"""Blends of corpora: exact to within one sample, and the values of ``--data-path``."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer_templates.data.indexed.blend import LONGEST_PERIOD, Blend, quota_order, whole_weights
from rapidformer_templates.data.indexed.corpora import IndexCache, load_corpora, parse_data_path
from rapidformer_templates.data.indexed.tools import merge
from rapidformer_templates.data.indexed.writer import IndexedWriter, read_sums
from rapidformer_templates.data.pretraining.samples import GPTSamples
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.errors import DataError
from rapidformer_templates.models.model_files import load_tokenizer, vocabulary_id
from tests.support.indexed_sets import numbered
from tests.support.messages import Says
from tests.support.texts import DOCUMENTS, Configure


@pytest.mark.slow
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
@settings(max_examples=200, deadline=None)
def test_every_prefix_is_exact_within_one_sample(weights: list[int]) -> None:
    order = quota_order(weights)
    total = sum(weights)
    counts = np.cumsum(order[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, total + 1)[:, None] * np.asarray(weights) / total
    assert (np.abs(counts - shares) < 1 - 1e-9).all()
    assert counts[-1].tolist() == weights


def test_weights_are_taken_as_they_are_written(says: Says) -> None:
    assert whole_weights(["0.3", "0.7"]) == [3, 7]
    assert whole_weights(["2", "1", "1"]) == [2, 1, 1]
    assert whole_weights([10, 20]) == [1, 2]
    assert whole_weights(["1e-1", "0.9"]) == [1, 9]
    odd = ["123456789", "987654321", "1"]
    rounded = whole_weights(odd)
    assert abs(sum(rounded) - LONGEST_PERIOD) <= len(odd)
    shares = np.asarray(rounded) / sum(rounded) - np.asarray(odd, float) / sum(map(float, odd))
    assert (np.abs(shares) < 2 / LONGEST_PERIOD).all()
    for wrong in (["a", "1"], ["0", "1"], ["-1", "2"], [], ["nan", "1"], ["inf", "1"]):
        with says(DataError):
            whole_weights(wrong)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_each_set_is_walked_through_in_its_order(sets: list[tuple[int, int]], start: int) -> None:
    class Endless(list[int]):
        def __getitem__(self, place):  # type: ignore[no-untyped-def, override]
            return place

    blend = Blend([Endless([0] * size) for size, _ in sets], [weight for _, weight in sets])
    assert len(blend) == sum(size for size, _ in sets)
    sources, places = blend.origin(np.arange(start + 50))
    for i in range(len(sets)):
        assert places[sources == i].tolist() == list(range(int((sources == i).sum())))
    assert blend.__getitems__(list(range(start, start + 50))) == places[start:].tolist()


def test_an_evaluation_repeats_nothing(tmp_path: Path) -> None:
    sets = [
        GPTSamples(numbered(tmp_path / name, [50], first), (0, 1), 5, 1, overlap=0)
        for name, first in (("a", 0), ("b", 100), ("c", 200))
    ]
    for weights in (["0.5", "0.3", "0.2"], [1, 1, 1], [7, 1, 2]):
        blend = Blend(sets, weights, repeats=False)
        drawn = [int(blend[p]["input_ids"][0]) for p in range(len(blend))]
        assert len(set(drawn)) == len(drawn)
        sources, places = blend.origin(np.asarray([len(blend)]))
        assert places[0] == len(sets[sources[0]])  # one more would be a repetition
    assert len(Blend(sets, [10, 10, 10], repeats=False)) == 30


def test_a_blend_travels_without_its_tables(tmp_path: Path) -> None:
    sets = [GPTSamples(numbered(tmp_path / name, [500]), (0, 1), 5, 1) for name in "ab"]
    blend = Blend(sets, ["0.123", "0.877"], cache=IndexCache(tmp_path / "cache"))
    drawn = [item["input_ids"].tolist() for item in blend.__getitems__(range(100))]
    packed = pickle.dumps(blend)
    assert len(packed) < 2000
    assert [item["input_ids"].tolist() for item in pickle.loads(packed).__getitems__(range(100))] == drawn


def test_the_words_of_data_path(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    numbered(tmp_path / "a", [3])
    numbered(tmp_path / "b", [3])
    found = [(e.paths, e.indexed, e.weight) for e in parse_data_path(["0.3", a, "0.7", "text.txt"])]
    assert found == [((a,), True, "0.3"), (("text.txt",), False, "0.7")]
    found = [(e.paths, e.indexed, e.weight) for e in parse_data_path(["x.txt", a, "y.txt", f"{b}.bin"])]
    assert found == [(("x.txt", "y.txt"), False, None), ((a,), True, None), ((f"{b}.bin",), True, None)]


def _blend(configure: Configure, flags: dict[str, Any], words: tuple[str, ...], **more: Any) -> Any:
    config = configure(**(flags | {"data_path": words}), **more)
    return load_task(config).build_data()


def test_blends_of_indexed_sets_and_raw_text(configure: Configure, flags: dict[str, Any], tmp_path: Path) -> None:
    numbered(tmp_path / "low", [20] * 10)  # 200 tokens, all of them in the vocabulary of 400
    numbered(tmp_path / "high", [20] * 5, 200)
    low, high, text = str(tmp_path / "low"), str(tmp_path / "high"), flags["data_path"][0]
    train = _blend(configure, flags, ("0.75", low, "0.25", high), split="1").train
    assert isinstance(train, Blend)
    first = [int(item["input_ids"][0]) < 200 for item in train.__getitems__(range(40))]
    assert sum(first) == 30
    # Without weights, the share of each corpus is its number of samples: an epoch of the blend is one epoch of each.
    train = _blend(configure, flags, (low, high), split="1").train
    items = [tuple(item["input_ids"].tolist()) for item in train.__getitems__(range(len(train)))]
    assert len(items) == 12 + 6 == len(set(items))
    mixed = _blend(configure, flags, ("1", low, "1", text), split="1").train
    assert [type(samples) for samples in mixed.sets] == [GPTSamples, GPTSamples]
    valid = _blend(configure, flags, ("1", low, "1", text), split="1,1,0").valid
    assert len({tuple(valid[i]["input_ids"].tolist()) for i in range(len(valid))}) == len(valid)


@pytest.mark.parametrize("sums", ["right", "none", "another set's"])
def test_tokens_beyond_the_vocabulary(
    configure: Configure, flags: dict[str, Any], tmp_path: Path, sums: str, says: Says
) -> None:
    """Checksums that a set does not match do not vouch for its tokens."""
    numbered(tmp_path / "small", [30] * 2)
    numbered(tmp_path / "set", [30] * 15)  # the vocabulary has at most 400 tokens
    if sums == "none":
        (tmp_path / "set.sums.json").unlink()
    elif sums != "right":  # as if another program had rewritten the set
        (tmp_path / "small.sums.json").replace(tmp_path / "set.sums.json")
    for _ in range(2):
        with says(DataError):
            _blend(configure, flags, (str(tmp_path / "set"),), split="1")


@pytest.mark.parametrize(
    "given", [{"text_column": "body"}, {"skip_bad_lines": True}, {"text_unit": "line"}, {}], ids="+".join
)
def test_flags_about_raw_text_where_there_is_none(
    configure: Configure, flags: dict[str, Any], tmp_path: Path, given: dict[str, Any], says: Says
) -> None:
    (tmp_path / "sets").mkdir()
    numbered(tmp_path / "sets" / "set", [30] * 5)
    path = flags["data_path"][0] if "text_unit" in given else str(tmp_path / "sets" / ("set" if given else ""))
    with says(DataError):  # without a flag: a folder of indexed sets in place of their prefix
        load_task(configure(**(flags | {"data_path": (path,)} | given))).check()


def test_documents_of_lines_and_of_files(configure: Configure, flags: dict[str, Any], tmp_path: Path) -> None:
    """Read one text with both units. They have separate caches, and the run's end tokens separate the documents."""
    file = tmp_path / "a.txt"
    file.write_text("\n".join(DOCUMENTS))
    counts = {}
    for unit in ("line", "file"):
        config = configure(**(flags | {"data_path": (str(file),), "text_unit": unit}))
        tokenizer = load_task(config).tokenizer
        (corpus,) = load_corpora(config, tokenizer, tokenizer.eos_token_id)
        counts[unit] = len(corpus.dataset)
    assert counts == {"line": len(DOCUMENTS), "file": 1}


def _set(prefix: Path, vocabulary: str | None) -> str:
    with IndexedWriter(prefix, np.dtype(np.uint16), vocabulary=vocabulary) as writer:
        writer.add(np.arange(200), np.full(10, 20))
    return str(prefix)


def test_a_set_of_another_vocabulary_is_refused(
    configure: Configure, flags: dict[str, Any], bert_folder: Path, tmp_path: Path, says: Says
) -> None:
    own, other = (
        vocabulary_id(load_tokenizer(configure(**flags | more)).backend_tokenizer)
        for more in ({}, {"tokenizer_path": str(bert_folder)})
    )
    assert _blend(configure, flags, (_set(tmp_path / "own", own),), split="1").train
    assert _blend(configure, flags, (_set(tmp_path / "unknown", None),), split="1").train
    with says(DataError):
        _blend(configure, flags, (_set(tmp_path / "other", other),), split="1")


def test_merged_sets_have_one_vocabulary(tmp_path: Path, says: Says) -> None:
    a, b, unknown = (_set(tmp_path / name, name) for name in ("a", "b", "unknown"))
    (tmp_path / "unknown.sums.json").unlink()
    for number, (second, vocabulary) in enumerate([(_set(tmp_path / "same", "a"), "a"), (unknown, None)]):
        merge([a, second], str(tmp_path / f"{number}"))
        assert (read_sums(tmp_path / f"{number}") or {})["vocabulary"] == vocabulary
    with says(DataError):
        merge([a, b], str(tmp_path / "wrong"))


def test_the_identity_tells_corpora_of_one_size_apart(
    configure: Configure, flags: dict[str, Any], tmp_path: Path
) -> None:
    numbered(tmp_path / "a", [20] * 10)
    numbered(tmp_path / "b", [20] * 10, 100)
    a, b = (_blend(configure, flags, (str(tmp_path / name),), split="1").train.identity for name in "ab")
    assert a != b
    numbered(tmp_path / "moved" / "a", [20] * 10)
    assert _blend(configure, flags, (str(tmp_path / "moved" / "a"),), split="1").train.identity == a
