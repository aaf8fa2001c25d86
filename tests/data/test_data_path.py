"""Values of ``--data-path``: indexed sets, blends, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer_templates.data.indexed.blend import Blend
from rapidformer_templates.data.indexed.corpora import load_corpora, parse_data_path
from rapidformer_templates.data.indexed.tools import merge
from rapidformer_templates.data.indexed.writer import IndexedWriter, read_sums
from rapidformer_templates.data.pretraining.windows import GPTSamples
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.errors import DataError
from rapidformer_templates.models.model_files import load_tokenizer, vocabulary_id
from rapidformer_templates.planning.config import RunConfig
from tests.support.indexed_sets import numbered
from tests.support.texts import DOCUMENTS, write_jsonl

Configure = Callable[..., RunConfig]


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


@pytest.mark.parametrize("impl", ["mmap", "lazy", "cached", "infer"])
def test_every_way_to_read_gives_the_same(
    configure: Configure, flags: dict[str, Any], tmp_path: Path, impl: str
) -> None:
    numbered(tmp_path / "set", [20] * 10)
    train = _blend(configure, flags, (str(tmp_path / "set"),), split="1", data_impl=impl).train
    expected = _blend(configure, flags, (str(tmp_path / "set"),), split="1").train
    assert all((train[i]["input_ids"] == expected[i]["input_ids"]).all() for i in range(len(expected)))


@pytest.mark.parametrize("sums", [True, False])
def test_tokens_beyond_the_vocabulary(configure: Configure, flags: dict[str, Any], tmp_path: Path, sums: bool) -> None:
    numbered(tmp_path / "set", [30] * 15)  # the vocabulary has at most 400 tokens
    size = load_tokenizer(configure(**flags)).backend_tokenizer.get_vocab_size()
    if not sums:
        (tmp_path / "set.sums.json").unlink()
    message = f"token {size} in sequence {size // 30} is not in the vocabulary of {size} tokens"
    for _ in range(2):
        with pytest.raises(DataError, match=message) as caught:
            _blend(configure, flags, (str(tmp_path / "set"),), split="1")
        assert "another tokenizer" in str(caught.value.hint)


def test_checksums_that_a_set_does_not_match_do_not_vouch_for_its_tokens(
    configure: Configure, flags: dict[str, Any], tmp_path: Path
) -> None:
    numbered(tmp_path / "small", [30] * 2)
    numbered(tmp_path / "set", [30] * 15)
    (tmp_path / "small.sums.json").replace(tmp_path / "set.sums.json")  # as if another program had rewritten the set
    with pytest.raises(DataError, match="is not in the vocabulary"):
        _blend(configure, flags, (str(tmp_path / "set"),), split="1")


@pytest.mark.parametrize(("flag", "value"), [("text_column", "body"), ("skip_bad_lines", True)])
def test_flags_about_raw_text_where_there_is_none(
    configure: Configure, flags: dict[str, Any], tmp_path: Path, flag: str, value: object
) -> None:
    numbered(tmp_path / "set", [30] * 5)
    config = configure(**(flags | {"data_path": (str(tmp_path / "set"),), flag: value}))
    with pytest.raises(DataError, match="there is no raw text for --"):
        load_task(config).check()


def test_the_unit_of_a_text_where_no_file_has_one(configure: Configure, flags: dict[str, Any], tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in DOCUMENTS])
    config = configure(**(flags | {"data_path": (str(rows),), "text_unit": "line"}))
    with pytest.raises(DataError, match=r"there is no \.txt file for --text-unit"):
        load_task(config).check()


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
    configure: Configure, flags: dict[str, Any], bert_folder: Path, tmp_path: Path
) -> None:
    own = vocabulary_id(load_tokenizer(configure(**flags)).backend_tokenizer)
    other = vocabulary_id(load_tokenizer(configure(**flags | {"tokenizer_path": str(bert_folder)})).backend_tokenizer)
    assert _blend(configure, flags, (_set(tmp_path / "own", own),), split="1").train
    assert _blend(configure, flags, (_set(tmp_path / "unknown", None),), split="1").train
    with pytest.raises(DataError, match="another vocabulary than this run's"):
        _blend(configure, flags, (_set(tmp_path / "other", other),), split="1")


def test_merged_sets_have_one_vocabulary(tmp_path: Path) -> None:
    a, b, unknown = (_set(tmp_path / name, name) for name in ("a", "b", "unknown"))
    same = _set(tmp_path / "same", "a")
    (tmp_path / "unknown.sums.json").unlink()
    merge([a, same], str(tmp_path / "both"))
    assert (read_sums(tmp_path / "both") or {})["vocabulary"] == "a"
    merge([a, unknown], str(tmp_path / "mixed"))
    assert (read_sums(tmp_path / "mixed") or {})["vocabulary"] is None
    with pytest.raises(DataError, match="another vocabulary") as caught:
        merge([a, b], str(tmp_path / "wrong"))
    assert caught.value.where == b


def test_a_folder_of_indexed_sets_is_told_by_its_prefix(
    configure: Configure, flags: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "sets").mkdir()
    prefix = _set(tmp_path / "sets" / "one", None)
    with pytest.raises(DataError, match="there is no text file in") as caught:
        load_task(configure(**flags | {"data_path": (str(tmp_path / "sets"),)})).check()
    assert f"give its prefix: {prefix}" in str(caught.value.hint)


def test_the_identity_tells_corpora_of_one_size_apart(
    configure: Configure, flags: dict[str, Any], tmp_path: Path
) -> None:
    numbered(tmp_path / "a", [20] * 10)
    numbered(tmp_path / "b", [20] * 10, 100)
    a, b = (_blend(configure, flags, (str(tmp_path / name),), split="1").train.identity for name in "ab")
    assert a != b
    numbered(tmp_path / "moved" / "a", [20] * 10)
    assert _blend(configure, flags, (str(tmp_path / "moved" / "a"),), split="1").train.identity == a
