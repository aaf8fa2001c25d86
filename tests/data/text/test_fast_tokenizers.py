"""Fast tokenizer backends are used only if they are proven to give the same tokens."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, BertTokenizer, GPT2Tokenizer

from rapidformer_templates.commands.main import main
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.text import fast_tokenizers, preprocess
from rapidformer_templates.data.text.encoding import Encoded, Encoder, EncodingJob, EncodingRecipe
from rapidformer_templates.data.text.fast_tokenizers import (
    PIECE,
    CachedPieces,
    Gigatoken,
    NotEquivalent,
    Reference,
    compare,
    hard_texts,
    verified,
)
from rapidformer_templates.data.text.preprocess import split_files
from rapidformer_templates.errors import DataError
from tests.support.messages import Says
from tests.support.texts import TEXTS, WORDS, Preprocess, files_of, write_jsonl

needs_gigatoken = pytest.mark.skipif(not fast_tokenizers.is_installed(), reason="gigatoken is not installed")


def _hands_out_wrong_ids(number: int) -> Callable[..., Any]:
    def wrong(self: Gigatoken, texts: Any) -> Any:
        ids, lengths = Reference.__call__(self, texts)  # type: ignore[arg-type]
        if f"№{number}" in "".join(texts):
            ids = ids.copy()
            ids[-1] += 1
        return ids, lengths

    return wrong


@pytest.mark.slow
@needs_gigatoken
def test_a_fast_tokenizer_that_differs_is_not_used(corpus: Path, make: Preprocess, recipe: EncodingRecipe) -> None:
    word_piece = json.dumps(json.loads(recipe.tokenizer) | {"model": {
        "type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        "vocab": {"a": 0, "dog": 1, "cat": 2}}, "added_tokens": []})  # fmt: skip
    made = make(corpus, recipe=EncodingRecipe(word_piece, "uint16", None), backend="auto")
    assert made.way == "pieces"
    assert made.compared == sum(made.tokens.values())  # there is only one part, which is compared
    assert made.notes[0].startswith("gigatoken is not used: it cannot read this tokenizer")
    reference = make(corpus, recipe=EncodingRecipe(word_piece, "uint16", None), prefix="reference")
    assert files_of(made.prefix["text"]) == files_of(reference.prefix["text"])


def test_a_difference_is_found(
    recipe: EncodingRecipe, corpus: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    reference = Reference(recipe.tokenizer)
    monkeypatch.setattr(Gigatoken, "__init__", Reference.__init__)
    monkeypatch.setattr(Gigatoken, "ids", Reference.ids, raising=False)
    monkeypatch.setattr(Gigatoken, "__call__", _hands_out_wrong_ids(50))
    encoder = Encoder(EncodingRecipe(recipe.tokenizer, "uint16", 0, way="gigatoken"))
    first, *_, last = split_files([corpus], ["text"], 20, check_all=True)
    assert encoder(first).compared == sum(reference(TEXTS[:20])[1])
    with says(NotEquivalent):
        encoder(last)
    lengths = [np.array([1, 2]), np.array([1, 1])]
    with says(NotEquivalent):
        compare(*((lambda texts, of=of: (np.arange(3), of)) for of in lengths), "ab", "")


@pytest.mark.slow
def test_a_difference_in_the_middle_starts_again(
    corpus: Path, make: Preprocess, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    real, passes = preprocess.encoded, []

    def encoded(jobs: Any, recipe: EncodingRecipe, workers: int) -> Iterator[tuple[EncodingJob, Encoded]]:
        passes.append(recipe.way)
        for number, found in enumerate(real(jobs, EncodingRecipe(recipe.tokenizer, "uint16", 0), workers)):
            if recipe.way != "whole" and number == 3:
                raise NotEquivalent("it gives other tokens in corpus.jsonl, text 1: 'x'")
            yield found

    monkeypatch.setattr(preprocess, "encoded", encoded)
    monkeypatch.setattr(fast_tokenizers, "is_installed", lambda: True)
    made = make(corpus, backend="auto", chunk_size=5)
    assert passes == ["gigatoken", "pieces", "whole"]
    assert (made.way, made.documents) == ("whole", {"text": 60})
    says.text("\n".join(made.notes))


@needs_gigatoken
def test_hard_texts_are_hard_and_the_same(recipe: EncodingRecipe) -> None:
    fast, reference = verified("gigatoken", recipe.tokenizer)
    texts = hard_texts(["<|endoftext|>"])
    assert texts == hard_texts(["<|endoftext|>"])
    assert sum("<|endoftext|>" in text for text in texts) > 100
    assert {"\u3000", "日", "'", "\r", "\U0010ffff"} <= set("".join(texts))
    assert np.array_equal(fast(TEXTS)[0], reference(TEXTS)[0])


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["gpt_folder", "bert_folder"])
def test_pieces_are_the_text_and_give_the_same_tokens(folder: str, request: pytest.FixtureRequest) -> None:
    description = (request.getfixturevalue(folder) / "tokenizer.json").read_text(encoding="utf-8")
    texts = [*TEXTS, *hard_texts(["<|endoftext|>", "[SEP]"], 5000), "", " ", "\n", "x", "a" * 1000]
    assert all("".join(PIECE.findall(text)) == text for text in texts)
    assert PIECE.findall("don't (a,b)\n\tself.x_1 é") == ["don't", " (a", ",b", ")", "\n\tself", ".x", "_1", " é", ""]
    pieces, whole = verified("pieces", description)
    assert isinstance(pieces, CachedPieces)
    pieces.ROOM = 10_000  # type: ignore[misc]
    for start in range(0, len(texts), 100):
        part = texts[start : start + 100]
        assert compare(pieces, whole, part, "") == sum(whole(part)[1])
        assert len(pieces.cache) < 1500


@pytest.mark.slow
def test_pieces_are_not_used_where_words_run_together(gpt_folder: Path) -> None:
    description = json.loads((gpt_folder / "tokenizer.json").read_text(encoding="utf-8"))
    prepends = description | {"normalizer": {"type": "Prepend", "prepend": "a"}}
    with pytest.raises(NotEquivalent, match="it gives other tokens in made-up hard texts"):
        verified("pieces", json.dumps(prepends))
    description["pre_tokenizer"]["use_regex"] = False  # tokens may now span words, as " the" and "a a" do
    model = description["model"]
    for merge in (["Ġ", "q"], ["q", "Ġq"]):
        model["vocab"].setdefault("".join(merge), len(model["vocab"]))
        model["merges"].append(merge)
    assert CachedPieces(Reference(json.dumps(description))).doubtful == ["q q"]
    with pytest.raises(NotEquivalent, match="made-up hard texts, text 3001: 'q q'"):
        verified("pieces", json.dumps(description))


@pytest.mark.slow
def test_tokens_that_never_come_of_a_text_do_not_matter(bert_folder: Path) -> None:
    description = json.loads((bert_folder / "tokenizer.json").read_text(encoding="utf-8"))
    description["model"]["vocab"]["[unused0]"] = len(description["model"]["vocab"])
    pieces, _ = verified("pieces", json.dumps(description))
    assert isinstance(pieces, CachedPieces)
    assert pieces.doubtful == ["[unused0]"]


def test_the_fast_tokenizer_asked_for_is_absent(
    corpus: Path, make: Preprocess, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with says(DataError):
        make(corpus, backend="gigatoken")
    monkeypatch.undo()


def test_truncation_in_the_description_is_not_used(recipe: EncodingRecipe) -> None:
    cut_short = json.loads(recipe.tokenizer) | {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    }
    assert Reference(json.dumps(cut_short))(TEXTS)[1].tolist() == Reference(recipe.tokenizer)(TEXTS)[1].tolist()


SAMPLES = [f"{' '.join(WORDS[i % 30 :])} Élan №{i}.\n\tHello HELLO" for i in range(30)]


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", [{"text": text, "title": "Zebra zebra"} for text in SAMPLES])


def train(sentences: Path, folder: Path, *words: str) -> int:
    return main(["data", "tokenizer", "--input", str(sentences), "--output", str(folder), *words])


def all_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_bpe_is_at_once_a_gpt2_tokenizer(sentences: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "bpe"
    assert train(sentences, folder, "--vocab-size", "320") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{folder}: 320 tokens of 30 documents, padded to 384 in a model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 320
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    for text in (*SAMPLES, "日本語 unseen\x00 😀", "<|endoftext|>x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.eos_token_id]
    own = GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    assert [own(text)["input_ids"] for text in SAMPLES] == [tokenizer(text)["input_ids"] for text in SAMPLES]
    assert sum(len(tokenizer(text)["input_ids"]) for text in SAMPLES) < 0.6 * sum(
        len(text.encode()) for text in SAMPLES
    )


@pytest.mark.parametrize("lower", [False, True])
def test_wordpiece_is_at_once_a_bert_tokenizer(sentences: Path, tmp_path: Path, lower: bool) -> None:
    folder = tmp_path / "wordpiece"
    assert train(sentences, folder, "--type", "wordpiece", "--vocab-size", "200", *["--lower-case"][: int(lower)]) == 0
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
    assert [own(text)["input_ids"] for text in SAMPLES] == [tokenizer(text)["input_ids"] for text in SAMPLES]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_the_same_text_gives_the_same_files(sentences: Path, tmp_path: Path, kind: str) -> None:
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        assert train(sentences, folder, "--type", kind, "--vocab-size", "300") == 0
    assert all(all_files(folder) == all_files(folders[0]) for folder in folders)
    size = "280" if kind == "bpe" else "150"
    assert train(sentences, folders[0], "--type", kind, "--vocab-size", size, "--overwrite") == 0
    assert all_files(folders[0]) != all_files(folders[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "corpus.jsonl", "d"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_preprocess_with_it_in_both_ways(sentences: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "tokenizer"
    assert train(sentences, folder, "--type", kind, "--vocab-size", "300") == 0
    files = ["--vocab-file", str(folder / "vocab.txt")]
    if kind == "bpe":
        files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    by_type = ["--tokenizer-type", "GPT2BPETokenizer" if kind == "bpe" else "BertWordPieceCase", *files]
    by_folder = ["--tokenizer-type", "HuggingFaceTokenizer", "--pretrained-model-name-or-path", str(folder)]
    made = []
    for name, words in (("type", by_type), ("folder", by_folder)):
        prefix = tmp_path / name
        command = ["preprocess", "--input", str(sentences), "--output-prefix", str(prefix), "--workers", "1"]
        assert main(["data", *command, *words, "--append-eod"]) == 0
        made.append(Path(f"{prefix}_text_document.bin").read_bytes())
    assert made[0] == made[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id if kind == "bpe" else tokenizer.sep_token_id
    for ids, text in zip(IndexedDataset(tmp_path / "type_text_document"), SAMPLES, strict=True):
        assert ids.tolist() == [*tokenizer(text, add_special_tokens=False)["input_ids"], end]


def test_other_columns_and_bad_lines(
    sentences: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    words = ["--vocab-size", "290", "--json-keys", "text", "title", "--json"]
    assert train(sentences, tmp_path / "both", *words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"folder": str(tmp_path / "both"), "vocabulary": 290, "documents": 60, "skipped": []}
    assert "ebra" in (tmp_path / "both" / "vocab.json").read_text(encoding="utf-8")
    sentences.write_bytes(sentences.read_bytes() + b'not json\n{"text": "half \\ud83d"}\n')
    says.command(f"data tokenizer --input {sentences} --output {tmp_path / 'never'}")
    assert not (tmp_path / "never").exists()
    assert train(sentences, tmp_path / "skips", "--skip-bad-lines", "--vocab-size", "999") == 0
    says.text(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words", ["--vocab-size 256", "--type wordpiece --vocab-size 5", "--lower-case", "--json-keys body"]
)
def test_wrong_use(sentences: Path, tmp_path: Path, words: str, says: Says) -> None:
    says.command(f"data tokenizer --input {sentences} --output {tmp_path / 'out'} {words}")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_not_replaced_unasked(sentences: Path, tmp_path: Path, says: Says) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    words = f"data tokenizer --input {sentences} --output {tmp_path / 'out'}"
    says.command(words)
    sentences.write_text('{"text": " "}\n')
    says.command(f"{words} --overwrite")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
