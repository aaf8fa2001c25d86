"""Conversations, completions and instructions: the tokens that transformers renders, and loss only on the answers."""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rapidformer_templates.commands.main import main
from rapidformer_templates.data.collate import IGNORED
from rapidformer_templates.data.finetuning.chat import ChatExample
from rapidformer_templates.data.finetuning.chat_samples import NO_END_NOTE, ChatReader, ChatTemplate
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.data.tasks.language_models import CausalLM
from rapidformer_templates.errors import DataError
from tests.support.messages import Says
from tests.support.texts import WORDS, Load, write_jsonl

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAST_TURN_DIFFERS = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['role'] == 'assistant' and loop.last %}{{ '(thinks) ' }}"
    "{% endif %}{{ m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
STRICT = "{{ raise_exception('roles must alternate') }}"

ROOT = Path(__file__).parents[3]
Message = dict[str, Any]
Chat = Callable[..., CausalLM]


def _talk(*contents: str, system: str | None = None) -> list[Message]:
    """Build a conversation in which user and assistant take turns."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


TALKS = [
    _talk("say hello", "hello", "and to the dog", "hello dog 🐶"),
    _talk("the cat?", "the cat sleeps\nin the house", system="good and fine"),
    _talk("one", "two", "three"),
]


@pytest.fixture(scope="module")
def chatml_folder(gpt_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the byte-level tokenizer with two special tokens and a chat template that uses them."""
    tokenizer = AutoTokenizer.from_pretrained(gpt_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("chatml")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chat(load: Load, chatml_folder: Path) -> Chat:
    """Return a function that loads a task for rows, with a chat template."""

    def make(rows: list[dict[str, Any]], template: str | None = CHATML, **flags: Any) -> Any:
        task = load("causal_lm", rows, **{"tokenizer_path": str(chatml_folder), "seq_length": 96} | flags)
        task.tokenizer.chat_template = template
        return task

    return make


def _built(task: CausalLM) -> list[dict[str, np.ndarray]]:
    return list(task.build_data().train or ())


def _learned(task: CausalLM, sample: dict[str, np.ndarray]) -> str:
    return task.tokenizer.decode(sample["labels"][sample["labels"] != IGNORED])


def _labels_by_prefixes(tokenizer: PreTrainedTokenizerFast, talk: list[Message]) -> list[int]:
    """Compute the labels by counting the tokens of the conversation up to each answer, without and with it."""
    arguments: dict[str, Any] = {"tokenize": True, "return_dict": False}
    ids = tokenizer.apply_chat_template(talk, **arguments)
    labels = [IGNORED] * len(ids)
    for turn, message in enumerate(talk):
        if message["role"] == "assistant":
            asked = tokenizer.apply_chat_template(talk[:turn], add_generation_prompt=True, **arguments)
            answered = tokenizer.apply_chat_template(talk[: turn + 1], **arguments)
            assert ids[: len(answered)] == answered
            assert answered[: len(asked)] == asked
            labels[len(asked) : len(answered)] = answered[len(asked) :]
    return labels


@pytest.mark.parametrize("template", [CHATML, MARKED, None])
def test_tokens_and_labels_of_conversations(chat: Chat, template: str | None) -> None:
    task = chat([{"messages": talk} for talk in TALKS], template)
    samples = _built(task)
    for talk, sample in zip(TALKS, samples, strict=True):
        rendered = task.tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)
        assert sample["input_ids"].tolist() == rendered
        assert sample["labels"].tolist() == _labels_by_prefixes(task.tokenizer, talk)
    end = "<|endoftext|>" if template is None else "<|im_end|>\n"
    assert [_learned(task, sample) for sample in samples] == [
        f"hello{end}hello dog 🐶{end}", f"the cat sleeps\nin the house{end}", f"two{end}",
    ]  # fmt: skip
    if template == MARKED:
        both = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        masks = [task.tokenizer.apply_chat_template(talk, **both)["assistant_masks"] for talk in TALKS]
        assert [(s["labels"] != IGNORED).astype(int).tolist() for s in samples] == masks
    assert task.notes == (
        ["the tokenizer has no chat template: a plain one is used, and exported with it"] if template is None else []
    )


TEXTS = st.text(st.sampled_from("ab \n\té🐶.?<|>"), min_size=1, max_size=12).filter(str.strip)


@given(st.lists(TEXTS, min_size=2, max_size=6), st.booleans(), st.sampled_from([CHATML, MARKED, None]))
@settings(max_examples=60, deadline=None)
def test_learned_tokens_spell_the_answers(
    chatml_folder: Path, contents: list[str], system: bool, source: str | None
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chatml_folder)
    tokenizer.chat_template = source
    template, talk = ChatTemplate(tokenizer), _talk(*contents, system="be good" if system else None)
    reader = ChatReader(tokenizer, seq_length=1000, answers_only=True)
    (encoded,) = reader.encoded([template.answers(ChatExample(talk))])
    end = "<|im_end|>\n" if source else "<|endoftext|>"
    answers = "".join(m["content"] + end for m in talk if m["role"] == "assistant")
    assert encoded.split == 0
    assert tokenizer.decode(encoded.ids[encoded.learned]) == answers


def test_older_form_and_other_columns(chat: Chat) -> None:
    older = {"user": "human", "assistant": "gpt"}
    shares = [[{"from": older.get(m["role"], m["role"]), "value": m["content"]} for m in talk] for talk in TALKS]
    wanted = [s["labels"].tolist() for s in _built(chat([{"messages": talk} for talk in TALKS]))]
    for column, rows, flags in (
        ("conversations", shares, {}),
        ("conversations", TALKS, {}),
        ("talk", TALKS, {"text_column": "talk"}),
    ):
        # A text column next to conversations is not used for training.
        task = chat([{"text": "the cat", column: row} for row in rows], **flags)
        assert [s["labels"].tolist() for s in _built(task)] == wanted
    assert "labels" not in _built(chat([{"text": "the cat", "messages": TALKS[0]}], text_column="text"))[0]


def test_prompts_with_completions(chat: Chat) -> None:
    rows = [{"prompt": "say hello", "completion": " hello"}, {"prompt": "", "completion": "the cat"}]
    task = chat(rows)
    samples = _built(task)
    for row, sample in zip(rows, samples, strict=True):
        prompt, whole = (task.tokenizer(text).input_ids for text in (row["prompt"], row["prompt"] + row["completion"]))
        end = [task.tokenizer.eos_token_id]
        assert sample["input_ids"].tolist() == whole + end
        # The first token of a sample has no prediction.
        start = max(1, len(prompt))
        assert sample["labels"].tolist() == [IGNORED] * start + (whole + end)[start:]
    assert task.notes == []
    assert [s["labels"].tolist() for s in _built(chat([{"q": r["prompt"], "a": r["completion"]} for r in rows],
            text_column="q", label_column="a"))] == [s["labels"].tolist() for s in samples]  # fmt: skip


def test_a_prompt_that_ends_in_a_space_is_told_of(chat: Chat, says: Says) -> None:
    task = chat([{"prompt": "say ", "completion": "hello"}, {"prompt": "say", "completion": " hello"}])
    samples = _built(task)
    assert samples[0]["labels"].tolist() == samples[1]["labels"].tolist()
    says.text("\n".join(task.notes))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_in_a_prompt_of_messages_are_not_learned(chat: Chat, template: str) -> None:
    talk = TALKS[0]
    task = chat([{"prompt": talk[:3], "completion": talk[3:]}], template)
    (sample,) = _built(task)
    assert sample["input_ids"].tolist() == _built(chat([{"messages": talk}], template))[0]["input_ids"].tolist()
    assert _learned(task, sample) == "hello dog 🐶<|im_end|>\n"


def test_all_tokens_can_be_learned(chat: Chat, says: Says) -> None:
    data: Any = chat([{"messages": talk} for talk in TALKS], loss_on="all").build_data()
    batch = data.collate(list(data.train))
    tokens = batch["attention_mask"].bool()
    tokens[:, 0] = False
    assert torch.equal(batch["labels"], torch.where(tokens, batch["input_ids"], IGNORED))
    # A conversation without an answer can be learned as a whole.
    assert len(_built(chat([{"messages": _talk("the cat")}], loss_on="all"))) == 1
    with says(DataError):
        chat([{"text": "the cat"}], loss_on="answers").build_data()


GOOD = _talk("say hello", "hello")
ASKED, ANSWERED = GOOD
TEXT = {"type": "text", "text": "say "}
IMAGE = {"type": "image_url", "image_url": {"url": "a"}}


def _row(*messages: Message, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


@pytest.mark.parametrize("way", ["files", "parquet", "saved"])
def test_parts_of_text_are_the_text(chat: Chat, tmp_path: Path, way: str) -> None:
    """Test OpenAI's lists of parts together with messages that have one text, also in a set saved by datasets."""
    parts = [{**GOOD[0], "content": [TEXT, {"type": "text", "text": "hello"}]},
             {**GOOD[1], "content": [{"type": "text", "text": "hello"}]}]  # fmt: skip
    plain, rows = _built(chat([{"messages": GOOD}] * 2)), [{"messages": parts}] * 2
    task = chat([{"messages": GOOD}, *rows[1:]])
    if way != "files":
        (tmp_path / "train.jsonl").unlink()
    if way == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    elif way == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path))
    for sample, expected in zip(_built(task), plain, strict=True):
        assert sample["input_ids"].tolist() == expected["input_ids"].tolist()
        assert sample["labels"].tolist() == expected["labels"].tolist()


BAD: dict[str, dict[str, Any]] = {
    "no role": _row({"content": "hello"}),
    "no content": _row(ASKED, {"role": "assistant"}),
    "an empty answer": _row(ASKED, {"role": "assistant", "content": " \n"}),
    "a misspelt role": _row({"role": "humna", "content": "a"}),
    "a role that is a list": _row({"from": ["user"], "value": "a"}, ASKED),
    "no answer": _row(ASKED),
    "no message": _row(),
    "no messages": {"messages": None},
    "an empty completion": {"prompt": "a", "completion": " "},
    "no prompt": {"prompt": None, "completion": "a"},
    "no completion": {"prompt": "a", "completion": None},
    "a text and a list": {"prompt": "a", "completion": GOOD},
    "a completion without an answer": {"prompt": GOOD, "completion": GOOD[:1]},
    "a text": {"messages": "hello"},
    "a part without a type": _row({**ASKED, "content": ["a"]}),
    "a part without a text": _row(ASKED, {**ANSWERED, "content": [{"type": "text"}]}),
    "an image": _row({**ASKED, "content": [TEXT, IMAGE]}, ANSWERED),
    "a call without a name": _row(*GOOD, {**ANSWERED, "tool_calls": ["f"]}),
    "arguments that are no JSON": _row(ASKED, {"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}),
    "arguments in a list": _row(ASKED, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}),
    "a ShareGPT call that is a text": {
        "conversations": [{"from": "human", "value": "hello"}, {"from": "function_call", "value": "f"}]
    },
    "a call that the template leaves out": _row(ASKED, {"role": "assistant", "tool_calls": [{"name": "f"}]}),
    "a thought that the template leaves out": _row(ASKED, {**ANSWERED, "thinking": "hm"}),
    "tools that the template leaves out": _row(*GOOD, tools=[{"name": "f"}]),
    "tools without a name": _row(*GOOD, functions=["f"]),
    "tools for a plain text": {"prompt": "a", "completion": "b", "tools": '[{"name": "f"}]'},
    "a weight": _row(ASKED, {**ANSWERED, "weight": 0.5}),
    "no instruction": {"instruction": None, "output": "a"},
    "no answer to an instruction": {"instruction": "a", "output": " "},
    "a number for an input": {"instruction": "a", "output": "b", "input": 3},
    "earlier turns": {"instruction": "a", "output": "b", "history": [["c", "d"]]},
    "only answers without a weight": _row(ASKED, {**ANSWERED, "weight": 0}, ASKED, {**ANSWERED, "train": False}),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_cannot_be_used(chat: Chat, name: str, says: Says) -> None:
    with says(DataError):
        chat([_row(*GOOD)] * (name in ("no message", "no messages")) + [BAD[name]]).build_data()


def test_templates_that_cannot_be_used(chat: Chat, says: Says) -> None:
    rows = [{"messages": GOOD}, {"messages": TALKS[0]}]
    for template in (LAST_TURN_DIFFERS, STRICT):
        with says(DataError):
            chat(rows, template).build_data()
    assert len(_built(chat(rows, LAST_TURN_DIFFERS, loss_on="all"))) == 2


def test_a_template_sees_the_keys_of_the_row(chat: Chat) -> None:
    """A table gives every object the keys of all rows. The template gets those that the row has, at any depth."""
    metas: list[dict[str, Any]] = [{"a": 1}, {"b": {"c": [{"d": 2}]}}, {"b": {"e": 3}}, {"b": {"c": [{"f": 4}]}}]
    rows = [{"messages": [{**GOOD[0], "meta": meta}, GOOD[1]]} for meta in metas]
    task = chat(rows, CHATML.replace("m['content']", "m['content'] + (m.meta | tojson if m.meta else '')"))
    texts = [task.tokenizer.decode(sample["input_ids"]) for sample in _built(task)]
    assert [json.loads(text[text.index("{") : text.rindex("}") + 1]) for text in texts] == metas


PIECES = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}{% generation %}{{ eos_token }}{% endgeneration %}"
)
"""An answer in two marked pieces. The last piece of the text does not touch an answer."""


def test_an_answer_in_several_marked_pieces(chat: Chat, says: Says) -> None:
    template = PIECES.removesuffix("{% generation %}{{ eos_token }}{% endgeneration %}")
    rows = [{"messages": TALKS[0]}, {"prompt": TALKS[0][:3], "completion": TALKS[0][3:]}]
    for row, learned in zip(rows, ("hello<|im_end|>hello dog 🐶<|im_end|>", "hello dog 🐶<|im_end|>"), strict=True):
        task = chat([row], template)
        assert [_learned(task, sample) for sample in _built(task)] == [learned]
    with says(DataError):
        chat(rows[:1], PIECES).build_data()


def test_a_template_that_opens_a_thought(chat: Chat, says: Says) -> None:
    template = CHATML.replace("assistant\n'", "assistant\n<think>\n'")
    with says(DataError):
        chat([{"messages": GOOD}], template).build_data()
    thought = [GOOD[0], {**GOOD[1], "content": "<think>\na tree</think>hello"}]
    task = chat([{"messages": thought}], template)
    assert [_learned(task, sample) for sample in _built(task)] == ["a tree</think>hello<|im_end|>\n"]


NO_END = CHATML.replace("'<|im_end|>' + ", "")
UNMARKED_END = MARKED.replace("'<|im_end|>' + '\n' }}{% endgeneration %}", "'' }}{% endgeneration %}<|im_end|>")
ENDS: dict[str, tuple[str | None, bool, dict[str, Any]]] = {
    "end": (CHATML, True, {}),
    "marked": (MARKED, True, {}),
    "plain": (None, True, {}),
    "none": (NO_END, False, {}),
    "not marked": (UNMARKED_END, False, {}),
    "all tokens": (NO_END, False, {"loss_on": "all"}),
    "stream": (NO_END, False, {"streaming": True}),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_template_without_an_end_after_answers_is_noted(chat: Chat, name: str) -> None:
    template, has_end, flags = ENDS[name]
    task = chat([{"messages": talk} for talk in TALKS], template, **flags)
    task.build_data()
    assert (NO_END_NOTE in task.notes) == (not has_end)


TRAINING = {
    "qwen3": "<think>\n\n</think>\n\n{}<|im_end|>\n",
    "phi3": "{}<|end|>\n",
    "gpt-oss": "<|channel|>final<|message|>{}<|end|>",
}


@pytest.mark.parametrize("name", TRAINING)
def test_the_templates_for_training(chat: Chat, name: str) -> None:
    """Each answer is learned as it is written after its generation prompt, no matter what follows."""
    template = (ROOT / f"examples/chat-templates/{name}.jinja").read_text(encoding="utf-8")
    task = chat([{"messages": talk} for talk in TALKS], template, seq_length=400)
    tokenizer, rendered = task.tokenizer, ChatTemplate(task.tokenizer)
    for talk in TALKS:
        found = rendered.answers(ChatExample(talk))
        assert found.text == tokenizer.apply_chat_template(talk, tokenize=False)
        answers = [turn for turn, message in enumerate(talk) if message["role"] == "assistant"]
        for (begin, end), turn in zip(found.answers, answers, strict=True):
            prompt = tokenizer.apply_chat_template(talk[:turn], tokenize=False, add_generation_prompt=True)
            assert found.text[:begin] == prompt
            wanted = TRAINING[name].format(talk[turn]["content"])
            is_last_of_gpt_oss = name == "gpt-oss" and turn == len(talk) - 1
            assert found.text[begin:end] == (wanted.replace("<|end|>", "<|return|>") if is_last_of_gpt_oss else wanted)
    assert len(_built(task)) == len(TALKS)


def test_long_conversations_are_cut_and_counted(chat: Chat, says: Says) -> None:
    rows = [{"messages": talk} for talk in (_talk("a " * 60, "the cat"), _talk("the cat", "a " * 60), GOOD)]
    whole, task = _built(chat(rows)), chat(rows, seq_length=48)
    samples = _built(task)
    for name in ("input_ids", "labels"):
        assert [s[name].tolist() for s in samples] == [s[name][:48].tolist() for s in whole[1:]]
    assert len(samples[0]["input_ids"]) == 48
    says.text("\n".join(task.notes))
    with says(DataError):
        chat(rows, seq_length=4).build_data()


def _words(draw: np.random.Generator) -> str:
    return " ".join(draw.choice(WORDS, draw.integers(1, 6)))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_black_box_run(tmp_path: Path, gpt_folder: Path, packed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The exported folder generates with the chat template of the training, and its loss equals the reported loss."""
    draw = np.random.default_rng(3)
    talks = [_talk(*(_words(draw) for _ in range(2 + 2 * (i % 2)))) for i in range(40)]
    write_jsonl(tmp_path / "chat-train.jsonl", [{"messages": talk} for talk in talks[:30]])
    write_jsonl(tmp_path / "chat-valid.jsonl", [{"messages": talk} for talk in talks[30:]])
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --dropout 0 --seq-length 128"
    words = f"--task causal_lm --data-dir {tmp_path} --data-name chat --model-type gpt2 --tokenizer-path {gpt_folder}"
    more = f"--epochs 2 --lr 5e-3 --micro-batch-size 2 --log-interval 1 --device cpu --save {tmp_path / 'run'}"
    assert main([*words.split(), *sizes.split(), *more.split(), *(["--pack-sequences"] if packed else [])]) == 0
    assert "note       the tokenizer has no chat template: a plain one is used" in capsys.readouterr().err
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    assert lines[-2 if "loss" not in lines[-1] else -1]["samples"] == 60
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/export").eval()
    total = count = right = 0.0
    for talk in talks[30:]:
        ids = torch.tensor([tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)])
        labels = torch.tensor(_labels_by_prefixes(tokenizer, talk))[1:]
        wanted = labels != IGNORED
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits[wanted], labels[wanted], reduction="sum").item()
        count += int(wanted.sum())
        right += int((logits.argmax(-1) == labels)[wanted].sum())
    described = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))
    summary = described["metrics"]
    assert summary["eval_loss"] == pytest.approx(total / count, rel=1e-4)
    assert summary["token_accuracy"] == pytest.approx(right / count, abs=1.5 / count)
    # The summary says how the run was started, and the card how to load its model.
    age = datetime.now().astimezone() - datetime.fromisoformat(described["started"])
    assert timedelta(seconds=described["wall_seconds"] - 2) < age < timedelta(minutes=5)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    assert (described["git_commit"] or "").removesuffix("-dirty") == head
    assert described["host"] == platform.node()
    assert described["command"] == shlex.join(sys.orig_argv)
    card = (tmp_path / "run/export/README.md").read_text(encoding="utf-8")
    assert f"| eval_loss | {summary['eval_loss']:.4f} |" in card
    assert "\ndatasets:" not in card  # a folder is not a name on the hub
    assert str(tmp_path) not in card
    names: dict[str, Any] = {}
    exec(card.split("```python\n")[1].split("```")[0].replace("EXPORT", str(tmp_path / "run/export")), names)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in names["model"].state_dict().items())


SHORT_CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ALPACA = [
    {"instruction": "say hello", "input": "", "output": "hello"},
    {"instruction": "say the number", "input": "the cat sees two", "output": "two"},
]
PROMPTS = ["<|user|>say hello\n<|assistant|>", "<|user|>say the number\n\nthe cat sees two\n<|assistant|>"]
COMPLETIONS = ["hello\n", "two\n"]


@pytest.fixture
def instructed(load: Load) -> Load:
    def make(rows: list[dict[str, Any]], task: str = "causal_lm", **flags: Any) -> Task:
        made = load(task, rows, seq_length=96, **flags)
        made.tokenizer.chat_template = SHORT_CHATML
        return made

    return make


def prompts_of(task: Task) -> list[tuple[str, ...]]:
    """Return (prompt, learned text) for each sample."""
    found = []
    for sample in task.build_data().train or ():  # type: ignore[attr-defined]
        learned = sample["labels"] != IGNORED
        found.append(tuple(task.tokenizer.decode(sample["input_ids"][part]) for part in (~learned, learned)))
    return found


@pytest.mark.parametrize("flags", [{}, {"text_column": "instruction"}, {"label_column": "output"}])
def test_an_instruction_and_its_input_are_the_prompt(instructed: Load, flags: dict[str, str]) -> None:
    """Naming one of the columns drops no other, and the whole text of a row does not win over its instruction."""
    for more in ({}, {"text": "below is an instruction"}):
        assert prompts_of(instructed([row | more for row in ALPACA], **flags)) == list(
            zip(PROMPTS, COMPLETIONS, strict=True)
        )


@pytest.mark.parametrize("task", ["causal_lm", "seq2seq_lm"])
def test_a_stream_reads_an_input_that_its_first_rows_do_not_have(load: Load, task: str) -> None:
    rows = [{"instruction": "say hello", "output": "hello"}] * 150 + [ALPACA[1]] * 20
    stream: Any = load(task, rows, seq_length=96, streaming=True, shuffle_buffer=0).build_data()
    tokenizer = load(task).tokenizer
    for place in range(150, 170):
        assert "the cat sees two" in tokenizer.decode(stream.train[place]["input_ids"])


def test_rows_of_dolly_and_a_system_prompt(instructed: Load) -> None:
    rows = [{"instruction": "say hello", "context": "in the house", "response": "hello", "system": "good and fine"}]
    assert prompts_of(instructed(rows)) == [
        ("<|system|>good and fine\n<|user|>say hello\n\nin the house\n<|assistant|>", "hello\n")
    ]


def test_the_name_of_a_prompt_brings_its_completion(instructed: Load) -> None:
    task = instructed([{"prompt": "say", "completion": " hello"}], text_column="prompt")
    task.tokenizer.eos_token = None
    assert prompts_of(task) == [("say", " hello")]


def test_sequence_to_sequence_reads_the_instruction_too(instructed: Load, says: Says) -> None:
    task: Any = instructed(ALPACA, "seq2seq_lm")
    sources = [task.tokenizer.decode(s["input_ids"], skip_special_tokens=True) for s in task.build_data().train]
    assert sources == ["say hello", "say the number the cat sees two"]
    with says(DataError):
        instructed([{**ALPACA[0], "input": 3}], "seq2seq_lm").build_data()
