"""Chat templates in the public formats of ten families, six conversations, and which pairs of them can be trained."""

import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rapidformer_templates.data.collate import IGNORED
from tests.support.texts import Load

FOLDER = Path(__file__).with_name("chat_templates")
Row = dict[str, Any]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": None}},
            "required": ["city"],
        },
    },
}
CALL = {
    "type": "function",
    "id": "abcdefgh1",
    "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": None}},
}


def said(*contents: str) -> list[Row]:
    """Return a conversation in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def _parts(text: str) -> list[Row]:
    first, _, second = text.partition(" ")
    return [{"type": "text", "text": first + " "}, {"type": "text", "text": second}]


CONVERSATIONS: dict[str, Row] = {
    "plain": {"messages": said("say hello", "hello dog 🐶")},
    "system": {"messages": [{"role": "system", "content": "be good"}, *said("say hello", "hello")]},
    "multi-turn": {"messages": said("one", "two", "three", "four")},
    "tool call": {
        "messages": [
            {"role": "user", "content": "the weather in Köln?"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefgh1", "content": "rain"},
            {"role": "assistant", "content": "It rains."},
        ],
        "tools": [WEATHER],
    },
    "reasoning": {"messages": [*said("one and two?"), {**said("", "three")[1], "reasoning_content": "I add."}]},
    "parts": {"messages": [{**m, "content": _parts(m["content"])} for m in said("say hello", "hello dog")]},
}


def table() -> dict[str, dict[str, str]]:
    """Return the cells of the table in the README, by template and conversation."""
    lines = [line.strip("| \n") for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def template(name: str, *, marked: bool) -> str | dict[str, str]:
    """Return a template with or without its marks. Hermes has another one for conversations without tools."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    if not marked:
        source = re.sub(r"(\{%-?) generation", r"\1 if true", re.sub("endgeneration", "endif", source))
    return {"default": str(template("chatml", marked=marked)), "tool_use": source} if name == "hermes" else source


def tokenizer_with(folder: Path, output: Path) -> PreTrainedTokenizerFast:
    """Save a tokenizer with the special tokens of all templates, and return it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sources = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.jinja"))
    special = sorted(set(re.findall(r"<[|｜][^<>]+[|｜]>|<\w+_of_turn>|\[/?[A-Z_]{4,}\]", sources)))
    tokenizer.add_special_tokens({"additional_special_tokens": special, "pad_token": "<|endoftext|>"})
    tokenizer.save_pretrained(output)
    return tokenizer


def learned_by_us(load: Load, row: Row, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[bool]]:
    """Return the tokens of a row of a file as a run reads it, and whether each is learned."""
    task = load("causal_lm", [row], seq_length=2000, max_position_embeddings=2000)
    task.tokenizer = tokenizer
    (sample,) = task.build_data().train or ()
    return sample["input_ids"].tolist(), (sample["labels"] != IGNORED).tolist()
