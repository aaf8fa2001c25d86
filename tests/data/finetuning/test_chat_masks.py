"""The learned tokens of ten chat templates and six conversations, compared with transformers' masks."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rapidformer_templates.errors import DataError
from tests.support.chat_templates import CALL, CONVERSATIONS, Row, learned_by_us, said, table, template, tokenizer_with
from tests.support.texts import Load

TABLE = table()
REFUSED = {
    "no tools": "would leave out the tools",
    "no reasoning": "would leave out the reasoning",
    "needs marks": "in another way when more messages follow",
}


@pytest.fixture(scope="module")
def tokenizers(gpt_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat-tokenizer")
    tokenizer_with(gpt_folder, folder)
    return folder


def _by_transformers(row: Row, tokenizer: AutoTokenizer) -> tuple[list[int], list[bool]]:
    """Return the tokens, and whether they are within the marks. The first one has no context to be predicted from."""
    messages = [
        {**m, "content": "".join(part["text"] for part in m["content"])} if isinstance(m.get("content"), list) else m
        for m in row["messages"]
    ]
    of = tokenizer.apply_chat_template(
        messages, tools=row.get("tools"), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return of["input_ids"], [False, *map(bool, of["assistant_masks"][1:])]


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TABLE)
def test_learned_tokens(load: Load, tokenizers: Path, name: str, conversation: str, marked: bool) -> None:
    row, cell = CONVERSATIONS[conversation], TABLE[name][conversation]
    tokenizer = AutoTokenizer.from_pretrained(tokenizers)
    tokenizer.chat_template = template(name, marked=marked)
    if cell in ("no tools", "no reasoning") or (cell == "needs marks" and not marked):
        with pytest.raises(DataError, match=REFUSED[cell]):
            learned_by_us(load, row, tokenizer)
        return
    ours = learned_by_us(load, row, tokenizer)
    tokenizer.chat_template = template(name, marked=True)
    wanted = _by_transformers(row, tokenizer)
    assert any(wanted[1])
    assert ours == wanted


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
def test_a_template_that_takes_arguments_as_text(load: Load, tokenizers: Path, marked: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizers)
    row = {"messages": CONVERSATIONS["tool call"]["messages"]}
    tokenizer.chat_template = template("deepseek", marked=marked)
    ours = learned_by_us(load, row, tokenizer)
    function = {"name": "get_weather", "arguments": '{"city": "Köln", "days": null}'}
    call = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]}
    tokenizer.chat_template = template("deepseek", marked=True)
    asked, _, *after = row["messages"]
    assert ours == _by_transformers({"messages": [asked, call, *after]}, tokenizer)
    assert '{"city": "Köln", "days": null}' in tokenizer.decode(ours[0])


CALLED = {"role": "assistant", "tool_calls": [CALL]}
TWO_CALLS = {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "abcdefgh2"}]}


@pytest.mark.parametrize(
    ("name", "answer", "lost"),
    [
        ("gpt_oss", TWO_CALLS, "a call"),
        ("llama31", CALLED | {"content": "I ask."}, "the content next to a call"),
        ("mistral", CALLED | {"content": "I ask."}, "the content next to a call"),
        ("qwen25", TWO_CALLS | {"content": "I ask."}, None),
        ("mistral", TWO_CALLS, None),
    ],
)
def test_what_a_template_leaves_out_of_a_call(
    load: Load, tokenizers: Path, name: str, answer: Row, lost: str | None
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizers)
    tokenizer.chat_template = template(name, marked=True)
    row = CONVERSATIONS["tool call"] | {"messages": [said("hello")[0], answer]}
    if lost is not None:
        with pytest.raises(DataError, match=f"leaves out {lost} in message 2"):
            learned_by_us(load, row, tokenizer)
    else:
        assert learned_by_us(load, row, tokenizer) == _by_transformers(row, tokenizer)


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("key", ["weight", "train"])
def test_answers_that_are_left_out(load: Load, tokenizers: Path, key: str, marked: bool) -> None:
    """The mask of a conversation is the sum of those of its answers alone."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizers)
    tokenizer.chat_template = template("qwen25", marked=marked)
    talk = said("one", "two", "three", "four", "five", "six")
    ids, every = learned_by_us(load, {"messages": talk}, tokenizer)
    masks = []
    for kept in (1, 3, 5):
        without = [m if i == kept or m["role"] == "user" else {**m, key: False if key == "train" else 0}
                   for i, m in enumerate(talk)]  # fmt: skip
        again, mask = learned_by_us(load, {"messages": without}, tokenizer)
        assert again == ids
        assert tokenizer.decode([t for t, here in zip(ids, mask, strict=True) if here]) == (
            f"{talk[kept]['content']}<|im_end|>\n"
        )
        masks.append(mask)
    assert [sum(of) for of in zip(*masks, strict=True)] == every
