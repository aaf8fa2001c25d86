from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.model_files import load_tokenizer, padded_vocab_size
from rapidformer_templates.planning.config import RunConfig

pytestmark = pytest.mark.usefixtures("offline")

Configure = Callable[..., RunConfig]


def test_padded_vocab_size() -> None:
    assert [padded_vocab_size(n) for n in (1, 128, 129, 50257)] == [128, 128, 256, 50304]


def test_tokenizers_from_files_equal_those_from_folders(
    bert_folder: Path, gpt_folder: Path, configure: Configure
) -> None:
    text = "The big CAT sleeps, say hello"
    files = {"vocab_file": str(bert_folder / "vocab.txt")}
    lower = load_tokenizer(configure(tokenizer_type="BertWordPieceLowerCase", **files))
    assert lower(text)["input_ids"] == AutoTokenizer.from_pretrained(bert_folder)(text)["input_ids"]
    cased = load_tokenizer(configure(tokenizer_type="BertWordPieceCase", **files))
    assert cased("CAT")["input_ids"] == [2, 1, 3]  # the tokenizer knows only lower case
    files = {"vocab_file": str(gpt_folder / "vocab.json"), "merge_file": str(gpt_folder / "merges.txt")}
    bpe = load_tokenizer(configure(tokenizer_type="GPT2BPETokenizer", **files))
    own = load_tokenizer(configure(tokenizer_type="HuggingFaceTokenizer", tokenizer_path=str(gpt_folder)))
    assert bpe(text)["input_ids"] == own(text)["input_ids"]
    assert own.pad_token_id == own.eos_token_id  # it had no padding token


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "no tokenizer is named"),
        ({"tokenizer_type": "BertWordPieceCase"}, "BertWordPieceCase needs --vocab-file"),
        ({"tokenizer_type": "BertWordPieceCase", "vocab_file": "no.txt"}, "the file no.txt does not exist"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__}, "GPT2BPETokenizer needs --merge-file"),
        ({"tokenizer_path": "no/folder"}, "'no/folder' is neither a folder nor in the cache"),
        ({"tokenizer_path": str(Path(__file__).parent)}, "there is no tokenizer in"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__, "merge_file": __file__}, "cannot be read"),
    ],
)
def test_tokenizers_that_are_not_there(configure: Configure, flags: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(configure(**flags))
    assert message in caught.value.message
