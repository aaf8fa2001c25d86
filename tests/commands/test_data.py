"""``rapidformer data``: the output of the tools, the files that they write, and wrong use."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rapidformer_templates.commands.main import main
from rapidformer_templates.data.indexed import tools as indexed_tools
from rapidformer_templates.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from rapidformer_templates.data.indexed.writer import BLOCK, IndexedWriter
from rapidformer_templates.data.text.encoding import split_sentences
from tests.support.indexed_sets import contents, write, write_with_megatron
from tests.support.messages import Says
from tests.support.texts import WORDS, write_jsonl

pytestmark = pytest.mark.usefixtures("offline")

FIRST = [[[1, 2, 3]], [[4], [5, 6]]]
SECOND = [[[7] * 9]]
SETS = {"a": [[[1], [2]], [[3]]], "b": FIRST, "c": FIRST}


def answer(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    """Run the command and return its output."""
    assert main(["data", *map(str, words)]) == status
    shown = capsys.readouterr()
    return shown.err if status == 2 else shown.out


@pytest.mark.slow
def test_preprocess(tmp_path: Path, gpt_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [" ".join(WORDS[i : i + 5]) for i in range(20)]
    folder = tmp_path / "raw"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"text": text} for text in texts[:10]])
    write_jsonl(folder / "b.jsonl", [{"text": text} for text in [*texts[10:], ""]])
    (folder / "b.jsonl").open("a").write("broken\n")
    words = ["preprocess", "--output_prefix", tmp_path / "out", "--append-eod", "--workers", 1, "--skip-bad-lines"]
    files = ["--vocab-file", gpt_folder / "vocab.json", "--merge-file", gpt_folder / "merges.txt"]
    files += ["--tokenizer-type", "GPT2BPETokenizer", "--tokenizer-backend", "transformers", "--dataset-impl", "mmap"]
    shown = answer(capsys, *words, *files, "--input", folder).splitlines()
    tokenizer = AutoTokenizer.from_pretrained(gpt_folder)
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    count, size = sum(map(len, ids)), len(tokenizer)
    assert shown.pop(2).startswith("tokenizer: transformers' tokenizer with a memory of pieces, same tokens as the")
    assert shown[:4] == [
        f"{tmp_path}/out_text_document: 20 documents, {count:,} tokens (uint16); 1 empty document left out",
        f"vocabulary: {size} tokens, padded to {-(-size // 128) * 128} in the model",
        f"1 bad lines left out, listed in {tmp_path}/out.skipped.txt:",
        f"  {folder}/b.jsonl:12: broken JSON: Expecting value (column 1)",
    ]
    assert shown[4].endswith(" documents/s")
    assert contents(IndexedDataset(tmp_path / "out_text_document")) == [[one] for one in ids]
    assert f"out_text_document.idx exists\n" in answer(capsys, *words, *files, "--input", folder, status=2)  # noqa: F541
    glob = ["--input", folder / "*.jsonl", "--overwrite", "--json", "--tokenizer-path", gpt_folder]
    facts = json.loads(answer(capsys, *words, *glob))
    assert facts["sets"] == [{"prefix": f"{tmp_path}/out_text_document", "documents": 20, "tokens": count, "empty": 1}]
    assert (facts["vocabulary"], facts["skipped"], facts["dtype"]) == (size, 1, "uint16")
    assert facts["seconds"] > 0


IN = "preprocess --input {in} --output-prefix o"


@pytest.mark.parametrize(
    "words",
    [
        "inspect none", "preprocess --output-prefix o --tokenizer-path {gpt}", IN, f"{IN} --vocab-file x",
        f"{IN} --tokenizer-type GPT2BPETokenizer --tokenizer-path {{gpt}}",
        f"{IN} --tokenizer-type GPT2BPETokenizer --vocab-file {{gpt}}/vocab.json",
        "preprocess --input nowhere --output-prefix o --tokenizer-path {gpt}",
        f"{IN} --tokenizer-path {{gpt}} --workers 0", f"{IN} --tokenizer-path {{gpt}} --dataset-impl lazy",
        f"{IN} --tokenizer-path {{gpt}} --json-keys a/b", f"{IN.replace(' o', ' {in}/o')} --tokenizer-path {{gpt}}",
        f"{IN} --inptu x", "inspect {set} --tokenizer-path {gpt}", "merge --input {set} --output-prefix {set}",
        "merge --input {set}x --output-prefix o", "merge --input {empty} --output-prefix o",
    ],
    ids=str,
)  # fmt: skip
def test_wrong_use(tmp_path: Path, gpt_folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, says: Says) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"in": write_jsonl(tmp_path / "in.jsonl", [{"text": "a dog"}]), "gpt": gpt_folder,
              "set": write(tmp_path / "set", FIRST), "empty": tmp_path / "empty"}  # fmt: skip
    says.command(f"data {words.format(**places)}")
    assert not list(tmp_path.glob("o_*")) + list(tmp_path.glob("o.*"))


def test_a_merged_set_is_that_of_all_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sets"
    folder.mkdir()
    write(folder / "a", FIRST)
    write(folder / "b", SECOND)
    whole = write(tmp_path / "whole", FIRST + SECOND)
    shown = answer(capsys, "merge", "--input", folder, "--output-prefix", folder / "merged")
    assert shown.startswith(f"{folder}/merged: 3 documents, 15 tokens (uint16) of 2 sets\n")
    for end in ("bin", "idx", "sums.json"):
        assert Path(f"{folder}/merged.{end}").read_bytes() == Path(f"{whole}.{end}").read_bytes()
    # The output of an earlier run is not used as an input.
    assert main(["data", "merge", "--input", str(folder), "--output-prefix", f"{folder}/merged", "--overwrite"]) == 0
    assert idx_path(folder / "merged").read_bytes() == idx_path(whole).read_bytes()
    assert (
        main(["data", "merge", "--input", f"{folder}/b.idx", f"{folder}/a", "--output-prefix", f"{tmp_path}/turned"])
        == 0
    )
    assert contents(IndexedDataset(tmp_path / "turned")) == SECOND + FIRST


@pytest.mark.parametrize(
    ("types", "wider"),
    [(("uint16", "int32"), "int32"), (("uint16", "int16"), "int32"), (("uint8", "uint16"), "uint16"),
     (("uint16", "uint16"), "uint16"), (("int32", "int64"), "int64"), (("int32", "float32"), "float64")],
)  # fmt: skip
def test_types_are_widened(tmp_path: Path, types: tuple[str, str], wider: str) -> None:
    prefixes = [str(write(tmp_path / name, FIRST, dtype)) for name, dtype in zip("ab", types, strict=True)]
    merged = indexed_tools.merge(prefixes, str(tmp_path / "merged"))
    assert merged.dtype == np.dtype(wider)
    assert contents(merged) == FIRST + FIRST


def test_merging_is_done_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(0)
    documents = [
        [chance.integers(0, 99, chance.integers(1, 9)).tolist() for _ in range(chance.integers(1, 4))]
        for _ in range(50)
    ]
    monkeypatch.setattr(indexed_tools, "CHUNK", 20)
    prefix = write(tmp_path / "set", documents)
    assert contents(indexed_tools.merge([str(prefix)], str(tmp_path / "merged"))) == documents


@pytest.mark.longer
@pytest.mark.slow
def test_sets_with_modes_are_not_merged(tmp_path: Path, megatron: Any, says: Says) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "set.bin"), dtype=np.int32, multimodal=True)
    builder.add_document([1, 2, 3], [1, 2], [0, 1])
    builder.finalize(str(tmp_path / "set.idx"))
    says.command(f"data merge --input {tmp_path / 'set'} --output-prefix {tmp_path / 'm'}")


def test_inspect(tmp_path: Path, gpt_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gpt_folder)
    texts = ["a small dog", "the river and the house and the tree " * 4]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    prefix = write(tmp_path / "set", [[one] for one in ids])
    shown = answer(capsys, "inspect", prefix, "--show", 2, "--tokenizer-path", gpt_folder)
    total = sum(map(len, ids))
    for words in ("documents           │ 2", f"tokens              │ {total}  (uint16)", f"{total / 2:,.1f} mean, "
                  f"{len(ids[0])} shortest, {len(ids[1])} longest", f"{max(map(max, ids))}", "Lengths of documents",
                  f"document 0, {len(ids[0])} tokens: {' '.join(map(str, ids[0]))}\n  'a small dog'\n"):  # fmt: skip
        assert words in shown, words
    facts = json.loads(answer(capsys, "inspect", prefix, "--json", "--show", 1, "--split", "1,1,0"))["sets"][0]
    assert facts["unigram_loss"] == indexed_tools.unigram_loss(IndexedDataset(prefix), (0, 1), (1, 2))
    assert facts["first"] == [{"length": len(ids[0]), "tokens": ids[0]}]
    assert (facts["documents"], facts["sequences"], facts["tokens"], facts["dtype"]) == (2, 2, total, "uint16")
    assert sum(share[1] for share in facts["shares"]) == 2
    for bound, documents, tokens in facts["shares"]:
        inside = [len(one) for one in ids if bound // 2 <= len(one) < bound]
        assert (documents, tokens) == (len(inside), sum(inside))
    Path(f"{prefix}.sums.json").unlink()
    assert "unknown: no checksums" in answer(capsys, "inspect", tmp_path)


def test_lengths_are_those_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_tools, "CHUNK", 2)
    facts = indexed_tools.statistics_of(str(write(tmp_path / "set", [[[1], [2, 3]], [[1] * 8], [[5]], [[1] * 9, [2]]])))
    assert facts.shares == [(2, 1, 1), (4, 1, 3), (16, 2, 18)]
    assert (facts.documents, facts.sequences, facts.mean, facts.longest, facts.shortest) == (4, 6, 5.5, 10, 1)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_verify_names_the_damaged_block_and_its_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    length = 1000
    count = 2 * BLOCK // (2 * length) + 100  # a little more than two blocks
    with IndexedWriter(tmp_path / "set", np.dtype(np.uint16)) as writer:
        writer.add(np.arange(count * length) % 60000, np.full(count, length))
    prefix = tmp_path / "set"
    assert answer(capsys, "verify", prefix) == f"{prefix}: intact\n"
    flip(bin_path(prefix), BLOCK + 77)
    first, last = BLOCK // (2 * length), (2 * BLOCK - 1) // (2 * length)
    lines = answer(capsys, "verify", prefix, status=1).splitlines()
    assert lines[:2] == [
        f"{prefix}: damaged",
        f"  {prefix}.bin: bytes {BLOCK:,} to {2 * BLOCK - 1:,} differ from what was written: "
        f"documents {first:,} to {last:,}",
    ]
    flip(bin_path(prefix), 2 * BLOCK + 1)
    report = json.loads(answer(capsys, "verify", prefix, "--json", status=1))
    assert report["ok"] is False
    assert [part["what"].partition(" to ")[0] for part in report["sets"][0]["damage"]] == [
        f"bytes {BLOCK:,}", f"bytes {2 * BLOCK:,}"
    ]  # fmt: skip


def test_verify_finds_damage_of_the_index(tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says) -> None:
    prefix, whole, lost = (write(tmp_path / name, documents) for name, documents in SETS.items())
    idx_path(lost).unlink()
    data = idx_path(prefix).read_bytes()
    idx_path(prefix).write_bytes(data[:-16] + np.array([1, 3], "<i8").tobytes())  # is consistent, but differs
    says.text(answer(capsys, "verify", prefix, status=1))
    idx_path(prefix).write_bytes(data[:-1])
    says.text(answer(capsys, "verify", tmp_path, status=1))  # the others are still checked
    idx_path(prefix).write_bytes(data)
    Path(f"{prefix}.sums.json").write_bytes(Path(f"{whole}.sums.json").read_bytes())
    says.text(answer(capsys, "verify", prefix, status=1))


def test_verify_of_a_set_without_checksums(
    tmp_path: Path, megatron: Any, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    theirs = write_with_megatron(megatron, tmp_path / "theirs", FIRST)
    ours = write(tmp_path / "ours", FIRST)
    for words in (["verify", theirs], ["verify", theirs, "--write-sums"]):
        says.text(answer(capsys, *words))
    assert Path(f"{theirs}.sums.json").read_bytes() == Path(f"{ours}.sums.json").read_bytes()
    flip(bin_path(theirs), 3)
    says.text(answer(capsys, "verify", theirs, status=1))


@pytest.mark.parametrize(
    "sentences",
    [
        ["One.", "Two!", "Three?", "Four…", "Five"], ["Mr. Smith met J. K. Rowling, e.g. Today.", "He left."],
        ['He said "Go."', "Then (it ended.)", "They left."], ["version 3.5 of it. then more"], [],
    ],
)  # fmt: skip
def test_sentences(sentences: list[str]) -> None:
    assert split_sentences(" ".join(sentences)) == split_sentences("  ".join(["", *sentences, "\n"])) == sentences
    assert split_sentences("A title\n\nwith text\nin lines. End") == ["A title", "with text\nin lines.", "End"]
    assert split_sentences("これは本です。はい！そう") == ["これは本です。", "はい！", "そう"]
