"""Conversations with tools from every kind of source: the tokens that transformers renders for each row alone."""

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.data.finetuning.messages import read_messages, read_tools
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.run.predictions import samples_as_part
from tests.support.chat_templates import CALL, WEATHER, Row, said, template, tokenizer_with
from tests.support.texts import Load, write_jsonl

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"default": 1}}},
    },
}


def _called(arguments: Any, result: str = "3") -> list[Row]:
    """Return a conversation with a call. A call without a content has none at all, or an empty one."""
    call = {"type": "function", "id": "abcdefgh1", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "one and two?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


ALIKE: list[Row] = [
    {"messages": _called({"a": 1}), "tools": [ADD]},
    {"messages": said("hello", "world"), "tools": None},
    {"messages": _called({"b": 2}), "tools": [ADD, ADD]},
]
"""A table can hold these rows as they are, with None for what a row lacks."""

MIXED: list[Row] = [
    *ALIKE,
    {"messages": said("hello", "world")},
    {"messages": _called({"a": "one", "b": None}), "tools": [ADD, WEATHER]},
    {"messages": _called({"a": [1, {"b": 2}]}), "tools": [WEATHER]},
]
"""Arguments and schemas of several types. Some rows have no tools."""


@pytest.fixture(scope="module")
def tokenizer(gpt_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_with(gpt_folder, tmp_path_factory.mktemp("chat-tokenizer"))
    tokenizer.chat_template = template("qwen25", marked=True)
    return tokenizer


def _wanted(rows: list[Row], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=True, return_dict=False)
        for row in rows
    ]


def _read(task: Any, tokenizer: PreTrainedTokenizerFast, count: int) -> list[list[int]]:
    task.tokenizer = tokenizer
    train = task.build_data().train
    return [train[i]["input_ids"].tolist() for i in range(count)]


def _written_as_text(row: Row) -> Row:
    """Return a row with its tools and arguments as JSON texts."""
    row = copy.deepcopy(row)
    for message in row["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return row | ({"tools": json.dumps(row["tools"])} if row.get("tools") else {})


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


SIZES = {"seq_length": 2000, "max_position_embeddings": 2000}


@pytest.mark.parametrize(
    "source", ["jsonl", "json", "texts", "another column", "parquet", "texts in parquet", "saved", "csv", "stream"]
)
def test_rows_of_every_source(load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, source: str) -> None:
    rows, flags = MIXED, SIZES
    if source == "jsonl":
        write_jsonl(tmp_path / "train.jsonl", rows)
    elif source == "json":
        (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    elif source == "texts":
        write_jsonl(tmp_path / "train.jsonl", [_written_as_text(row) for row in rows])
    elif source == "another column":
        renamed = [{"abilities" if name == "tools" else name: row[name] for name in row} for row in rows]
        write_jsonl(tmp_path / "train.jsonl", renamed)
        flags = flags | {"tools_column": "abilities"}
    elif source == "parquet":
        table = pa.Table.from_pylist(ALIKE)  # it sorts the keys of objects
        pq.write_table(table, tmp_path / "train.parquet")
        rows = _without_none(table.to_pylist())
    elif source == "texts in parquet":
        texts = [_written_as_text(row) for row in rows]
        for message in (message for row in texts for message in row["messages"] if "tool_calls" in message):
            message["tool_calls"] = json.dumps(message["tool_calls"])
        pq.write_table(pa.Table.from_pylist(texts), tmp_path / "train.parquet")
    elif source == "saved":
        rows = ALIKE
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path))
    elif source == "csv":
        rows = [{"instruction": "add", "output": "3", "tools": tools} for tools in ([ADD], None)]
        lines = ["instruction,output,tools", 'add,3,"' + json.dumps([ADD]).replace('"', '""') + '"', "add,3,"]
        (tmp_path / "train.csv").write_text("\n".join(lines), encoding="utf-8")
        rows = [{"messages": said("add", "3"), "tools": row["tools"]} for row in rows]
    else:  # the first rows, which show the columns, have no tools
        rows = [{"messages": said("hello", f"world {i}")} for i in range(110)] + MIXED
        write_jsonl(tmp_path / "train.jsonl", rows)
        flags = flags | {"streaming": True, "shuffle_buffer": 0}
    assert _read(load("causal_lm", **flags), tokenizer, len(rows)) == _wanted(rows, tokenizer)


def test_a_mixture_of_conversations_and_instructions(
    load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "calls.jsonl", MIXED[:3])
    write_jsonl(tmp_path / "alpaca.jsonl", [{"instruction": "add", "input": "1", "output": "3", "tools": [ADD]}] * 3)
    task = load("causal_lm", data_name="1 calls 1 alpaca", **SIZES)
    alpaca = {"messages": said("add\n\n1", "3"), "tools": [ADD]}
    assert sorted(_read(task, tokenizer, 6)) == sorted(_wanted([*MIXED[:3], *[alpaca] * 3], tokenizer))


SHARE_GPT = {
    "conversations": [
        {"from": "human", "value": "one and two?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "It is 3."},
    ],
    "system": "Be brief.",
    "tools": json.dumps([ADD["function"]]),
}
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one and two?"},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ],
    "functions": [ADD["function"]],
}


@pytest.mark.parametrize("row", [SHARE_GPT, OPENAI], ids=["ShareGPT", "OpenAI"])
def test_older_forms(load: Load, tokenizer: PreTrainedTokenizerFast, row: Row) -> None:
    system = {"role": "system", "content": "Be brief."}
    messages = [system, *_called({"a": 1})[:-1], {"role": "assistant", "content": "It is 3."}]
    task = load("causal_lm", [row], **SIZES)
    assert _read(task, tokenizer, 1) == _wanted([{"messages": messages, "tools": [ADD]}], tokenizer)


def _texts(task: Task, sample: Any, prefix: str = "") -> tuple[str, str]:
    ids, labels = sample[f"{prefix}input_ids"], sample[f"{prefix}labels"]
    return task.tokenizer.decode(ids), task.tokenizer.decode(labels[labels != -100])


@pytest.mark.parametrize("form", ["whole", "prompt", "unpaired"])
def test_preferences_with_tools(load: Load, tokenizer: PreTrainedTokenizerFast, form: str) -> None:
    talk = _called({"a": 1})
    prompt, good, bad = talk[:1], talk[1:], said("", "I cannot.")[1:]
    row: Row = {"tools": [ADD]}
    if form == "whole":
        row |= {"chosen": [*prompt, *good], "rejected": [*prompt, *bad]}
    elif form == "prompt":
        row |= {"prompt": prompt, "chosen": good, "rejected": bad}
    rows = [row]
    flags: dict[str, Any] = dict(SIZES)
    if form == "unpaired":
        rows = [row | {"prompt": prompt, "completion": good, "label": True},
                {"prompt": prompt, "completion": bad, "label": False}]  # fmt: skip
        flags["preference_loss"] = "kto"
    task: Any = load("preference", rows, model_type="gpt2", **flags)
    task.tokenizer = tokenizer
    samples = task.build_data().train
    text, learned = _texts(task, samples[0])
    assert text == tokenizer.apply_chat_template(talk, tools=[ADD], tokenize=False)
    assert learned == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n3<|im_end|>\n'
    if form != "unpaired":
        whole = tokenizer.apply_chat_template([*prompt, *bad], tools=[ADD], tokenize=False)
        assert _texts(task, samples[0], "rejected_") == (whole, "I cannot.<|im_end|>\n")
    else:  # the same question with other tools is another prompt
        text, learned = _texts(task, samples[0], "kl_")
        assert text == tokenizer.apply_chat_template([*prompt, *bad], tools=[ADD], tokenize=False)
        assert not any("to one prompt" in note for note in task.notes)


def test_rows_to_predict(load: Load, tokenizer: PreTrainedTokenizerFast) -> None:
    """The prompt ends where the answer begins, with the tools before it. Samples in memory are read like a file's."""
    task: Any = load("causal_lm", **SIZES)
    task.tokenizer = tokenizer
    task.load_label_state({})
    rows = [{"messages": row["messages"][:3], "tools": row.get("tools")} for row in (MIXED[0], *MIXED[4:])]
    inputs = task.inputs(samples_as_part(rows, task.text_column, task.chat_column))
    assert [row["input_ids"].tolist() for row in inputs.rows] == [
        tokenizer.apply_chat_template(
            row["messages"], tools=row["tools"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for row in rows
    ]


def test_reading_what_was_read_changes_nothing() -> None:
    messages = read_messages(OPENAI["messages"], "conversation")
    assert read_messages(messages, "conversation") == messages
    tools = read_tools(OPENAI["functions"])
    assert tools == [ADD] == read_tools(tools) == read_tools(json.dumps(tools))
    alone = json.dumps({"id": "x", **CALL["function"]})  # a single one, and without an object around the function
    (call,) = read_messages([{"role": "assistant", "tool_calls": alone}], "")
    assert call["tool_calls"] == [{"type": "function", "id": "x", "function": CALL["function"]}]


@pytest.mark.parametrize("pack_sequences", [False, True])
def test_the_last_answer(load: Load, tokenizer: PreTrainedTokenizerFast, pack_sequences: bool) -> None:
    rows = [{"messages": said("one", "two", "three", "four")}, {"messages": _called({"a": 1}), "tools": [ADD]}]
    left_out = [*said("one", "two", "three"), {"role": "assistant", "content": "four", "train": False}]
    task: Any = load("causal_lm", [*rows, {"messages": left_out}], loss_on="last", **SIZES)
    if pack_sequences:
        task = load("causal_lm", loss_on="last", pack_sequences=True, model_type="gpt2", **SIZES)
    task.tokenizer = tokenizer
    train = task.build_data().train
    learned = "".join(_texts(task, train[i])[1] for i in range(len(train)))
    assert sorted(learned.split("<|im_end|>\n")) == ["", "3", "four", "two"]
