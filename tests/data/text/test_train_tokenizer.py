"""Tokenizers trained on raw text: their files, and that training is reproducible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, BertTokenizer, GPT2Tokenizer

from rapidformer_templates.commands.data import main
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from tests.support.messages import Says
from tests.support.texts import WORDS, write_jsonl

TEXTS = [f"{' '.join(WORDS[i % 30 :])} Élan №{i}.\n\tHello HELLO" for i in range(30)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", [{"text": text, "title": "Zebra zebra"} for text in TEXTS])


def train(corpus: Path, folder: Path, *words: str) -> int:
    return main(["tokenizer", "--input", str(corpus), "--output", str(folder), *words])


def all_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_bpe_is_at_once_a_gpt2_tokenizer(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "bpe"
    assert train(corpus, folder, "--vocab-size", "320") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{folder}: 320 tokens of 30 documents, padded to 384 in a model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 320
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    for text in (*TEXTS, "日本語 unseen\x00 😀", "<|endoftext|>x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.eos_token_id]
    own = GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    assert [own(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert sum(len(tokenizer(text)["input_ids"]) for text in TEXTS) < 0.6 * sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("lower", [False, True])
def test_wordpiece_is_at_once_a_bert_tokenizer(corpus: Path, tmp_path: Path, lower: bool) -> None:
    folder = tmp_path / "wordpiece"
    assert train(corpus, folder, "--type", "wordpiece", "--vocab-size", "200", *["--lower-case"][: int(lower)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, BertTokenizer)
    first = (folder / "vocab.txt").read_text(encoding="utf-8").split()[:5]
    assert first == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id,
            tokenizer.mask_token_id] == [0, 1, 2, 3, 4]  # fmt: skip
    ids = tokenizer("the House")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["[CLS]", "the"]
    assert ids[-1] == tokenizer.sep_token_id
    assert (tokenizer.tokenize("HELLO") == tokenizer.tokenize("hello")) is lower
    assert (tokenizer.tokenize("Élan") == tokenizer.tokenize("elan")) is lower
    assert tokenizer.tokenize("xqQ日z")[0] == "[UNK]"
    assert "[UNK]" not in tokenizer.tokenize("dHHlvw hEl")  # the letters are never inside words in the training text
    own = BertTokenizer(vocab=str(folder / "vocab.txt"), do_lower_case=lower)
    assert [own(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_the_same_text_gives_the_same_files(corpus: Path, tmp_path: Path, kind: str) -> None:
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        assert train(corpus, folder, "--type", kind, "--vocab-size", "300") == 0
    assert all(all_files(folder) == all_files(folders[0]) for folder in folders)
    size = "280" if kind == "bpe" else "150"
    assert train(corpus, folders[0], "--type", kind, "--vocab-size", size, "--overwrite") == 0
    assert all_files(folders[0]) != all_files(folders[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "corpus.jsonl", "d"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_preprocess_with_it_in_both_ways(corpus: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "tokenizer"
    assert train(corpus, folder, "--type", kind, "--vocab-size", "300") == 0
    files = ["--vocab-file", str(folder / "vocab.txt")]
    if kind == "bpe":
        files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    by_type = ["--tokenizer-type", "GPT2BPETokenizer" if kind == "bpe" else "BertWordPieceCase", *files]
    by_folder = ["--tokenizer-type", "HuggingFaceTokenizer", "--pretrained-model-name-or-path", str(folder)]
    made = []
    for name, words in (("type", by_type), ("folder", by_folder)):
        prefix = tmp_path / name
        command = ["preprocess", "--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]
        assert main([*command, *words, "--append-eod"]) == 0
        made.append(Path(f"{prefix}_text_document.bin").read_bytes())
    assert made[0] == made[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id if kind == "bpe" else tokenizer.sep_token_id
    for ids, text in zip(IndexedDataset(tmp_path / "type_text_document"), TEXTS, strict=True):
        assert ids.tolist() == [*tokenizer(text, add_special_tokens=False)["input_ids"], end]


def test_other_columns_and_bad_lines(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    words = ["--vocab-size", "290", "--json-keys", "text", "title", "--json"]
    assert train(corpus, tmp_path / "both", *words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"folder": str(tmp_path / "both"), "vocabulary": 290, "documents": 60, "skipped": []}
    assert "ebra" in (tmp_path / "both" / "vocab.json").read_text(encoding="utf-8")
    corpus.write_bytes(corpus.read_bytes() + b'not json\n{"text": "half \\ud83d"}\n')
    says.command(f"data tokenizer --input {corpus} --output {tmp_path / 'never'}")
    assert not (tmp_path / "never").exists()
    assert train(corpus, tmp_path / "skips", "--skip-bad-lines", "--vocab-size", "999") == 0
    says.text(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words", ["--vocab-size 256", "--type wordpiece --vocab-size 5", "--lower-case", "--json-keys body"]
)
def test_wrong_use(corpus: Path, tmp_path: Path, words: str, says: Says) -> None:
    says.command(f"data tokenizer --input {corpus} --output {tmp_path / 'out'} {words}")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_not_replaced_unasked(corpus: Path, tmp_path: Path, says: Says) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    words = f"data tokenizer --input {corpus} --output {tmp_path / 'out'}"
    says.command(words)
    corpus.write_text('{"text": " "}\n')
    says.command(f"{words} --overwrite")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
