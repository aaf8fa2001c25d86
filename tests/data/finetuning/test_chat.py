"""Conversations and completions: the same tokens as transformers renders, and loss only on the answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rapidformer_templates.commands.main import main
from rapidformer_templates.data.collate import IGNORED
from rapidformer_templates.data.finetuning.chat_samples import NO_END_NOTE, ChatTemplate, encode
from rapidformer_templates.data.tasks.language_models import CausalLM
from rapidformer_templates.errors import DataError, Refused
from rapidformer_templates.planning.config import RunConfig
from tests.support.texts import TINY, WORDS, write_jsonl

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
Load = Callable[..., CausalLM]


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
def load(tmp_path: Path, configure: Callable[..., RunConfig], chatml_folder: Path) -> Load:
    """Return a function that writes rows to ``train.jsonl`` and loads a task for them."""

    def make(rows: list[dict[str, Any]], template: str | None = CHATML, **flags: Any) -> CausalLM:
        write_jsonl(tmp_path / "train.jsonl", rows)
        common = {
            "data_dir": str(tmp_path), "model_type": "gpt2", "tokenizer_path": str(chatml_folder), "seq_length": 96,
            "validation_fraction": 0.0, **TINY,
        }  # fmt: skip
        task = CausalLM(configure(task="causal_lm", **(common | flags)))
        task.tokenizer.chat_template = template
        return task

    return make


def _built(task: CausalLM) -> list[dict[str, np.ndarray]]:
    train = task.build_data().train
    assert train is not None
    return list(train)


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
def test_tokens_and_labels_of_conversations(load: Load, template: str | None) -> None:
    task = load([{"messages": talk} for talk in TALKS], template)
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
    (encoded,) = encode(tokenizer, [template.answers(talk)], special=False)
    end = "<|im_end|>\n" if source else "<|endoftext|>"
    answers = "".join(m["content"] + end for m in talk if m["role"] == "assistant")
    assert encoded.split == 0
    assert tokenizer.decode(encoded.ids[encoded.learned]) == answers


def test_older_form_and_other_columns(load: Load) -> None:
    older = {"user": "human", "assistant": "gpt"}
    shares = [[{"from": older.get(m["role"], m["role"]), "value": m["content"]} for m in talk] for talk in TALKS]
    wanted = [s["labels"].tolist() for s in _built(load([{"messages": talk} for talk in TALKS]))]
    for column, rows, flags in (
        ("conversations", shares, {}),
        ("conversations", TALKS, {}),
        ("talk", TALKS, {"text_column": "talk"}),
    ):
        # A text column next to conversations is not used for training.
        task = load([{"text": "the cat", column: row} for row in rows], **flags)
        assert [s["labels"].tolist() for s in _built(task)] == wanted
    assert "labels" not in _built(load([{"text": "the cat", "messages": TALKS[0]}], text_column="text"))[0]


@pytest.mark.parametrize("form", ["json", "parquet", "saved"])
def test_every_format_gives_the_same_samples(load: Load, tmp_path: Path, form: str) -> None:
    rows = [{"messages": talk} for talk in TALKS]
    task = load(rows)
    wanted = [sample["labels"].tolist() for sample in _built(task)]
    (tmp_path / "train.jsonl").unlink()
    table = datasets.Dataset.from_list(rows)
    if form == "json":
        (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    elif form == "parquet":
        table.to_parquet(str(tmp_path / "train.parquet"))
    else:
        table.save_to_disk(str(tmp_path / "saved"))
        task = CausalLM(task.config.replace("command line", data_name="saved"))
    assert [sample["labels"].tolist() for sample in _built(CausalLM(task.config))] == wanted


def test_prompts_with_completions(load: Load) -> None:
    rows = [{"prompt": "say hello", "completion": " hello"}, {"prompt": "", "completion": "the cat"}]
    task = load(rows)
    samples = _built(task)
    for row, sample in zip(rows, samples, strict=True):
        prompt, whole = (task.tokenizer(text).input_ids for text in (row["prompt"], row["prompt"] + row["completion"]))
        end = [task.tokenizer.eos_token_id]
        assert sample["input_ids"].tolist() == whole + end
        # The first token of a sample has no prediction.
        start = max(1, len(prompt))
        assert sample["labels"].tolist() == [IGNORED] * start + (whole + end)[start:]
    assert task.notes == []
    assert [s["labels"].tolist() for s in _built(load([{"q": r["prompt"], "a": r["completion"]} for r in rows],
            text_column="q", label_column="a"))] == [s["labels"].tolist() for s in samples]  # fmt: skip


def test_a_prompt_that_ends_in_a_space_is_told_of(load: Load) -> None:
    task = load([{"prompt": "say ", "completion": "hello"}, {"prompt": "say", "completion": " hello"}])
    samples = _built(task)
    assert samples[0]["labels"].tolist() == samples[1]["labels"].tolist()
    assert task.notes == [
        "train: 1 answers begin inside a token that begins in their prompt; "
        "put the space or line break between them into the answer"
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_in_a_prompt_of_messages_are_not_learned(load: Load, template: str) -> None:
    talk = TALKS[0]
    task = load([{"prompt": talk[:3], "completion": talk[3:]}], template)
    (sample,) = _built(task)
    assert sample["input_ids"].tolist() == _built(load([{"messages": talk}], template))[0]["input_ids"].tolist()
    assert _learned(task, sample) == "hello dog 🐶<|im_end|>\n"


def test_all_tokens_can_be_learned(load: Load) -> None:
    task = load([{"messages": talk} for talk in TALKS], loss_on="all")
    data = task.build_data()
    assert data.train is not None
    assert data.collate is not None
    batch = data.collate(list(data.train))
    tokens = batch["attention_mask"].bool()
    tokens[:, 0] = False
    assert torch.equal(batch["labels"], torch.where(tokens, batch["input_ids"], IGNORED))
    # A conversation without an answer can be learned as a whole.
    assert len(_built(load([{"messages": _talk("the cat")}], loss_on="all"))) == 1
    with pytest.raises(DataError, match="the column 'text' holds plain text") as caught:
        load([{"text": "the cat"}], loss_on="answers").build_data()
    assert caught.value.where == "--loss-on"
    assert main(["plan", "--task", "masked_lm", "--loss-on", "all"]) == Refused.exit_status


def test_batches_are_masked_and_padded(load: Load) -> None:
    data = load([{"messages": talk} for talk in TALKS]).build_data()
    assert data.train is not None
    assert data.collate is not None
    batch = data.collate(list(data.train))
    lengths = [len(sample["input_ids"]) for sample in data.train]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    for row, sample in enumerate(data.train):
        assert batch["labels"][row, : lengths[row]].tolist() == sample["labels"].tolist()
        assert (batch["labels"][row, lengths[row] :] == IGNORED).all()


GOOD = _talk("say hello", "hello")
TEXT_PART = {"type": "text", "text": "say "}
BAD: list[tuple[Any, str]] = [
    ([{"content": "hello"}], "message 1 of the conversation has no role"),
    ([GOOD[0], {"role": "assistant"}], "message 2 of the conversation has no content"),
    ([GOOD[0], {"role": "assistant", "content": " \n"}], "message 2 of the conversation is an empty answer"),
    ([GOOD[0], {"role": "asistant", "content": "a"}], "message 2 of the conversation has the unknown role 'asistant'"),
    ([{"from": ["user"], "value": "a"}, GOOD[0]], "message 1 of the conversation has the unknown role ['user']"),
    (GOOD[:1], "the conversation has no answer: no message is the assistant's"),
    ([], "the conversation has no message"),
    (None, "the conversation is empty, not a list of messages"),
]


@pytest.mark.parametrize("way", ["files", "saved"])
def test_parts_of_text_are_the_text(load: Load, tmp_path: Path, way: str) -> None:
    """Test OpenAI's lists of parts together with messages that have one text, also in a set saved by datasets."""
    parts = [{**GOOD[0], "content": [TEXT_PART, {"type": "text", "text": "hello"}]},
             {**GOOD[1], "content": [{"type": "text", "text": "hello"}]}]  # fmt: skip
    plain = _built(load([{"messages": GOOD}] * 2))
    if way == "files":
        samples = _built(load([{"messages": GOOD}, {"messages": parts}]))
    else:
        task = load([{"messages": parts}] * 2)
        (tmp_path / "train.jsonl").unlink()
        datasets.Dataset.from_list([{"messages": parts}] * 2).save_to_disk(str(tmp_path))
        samples = _built(task)
    for sample, expected in zip(samples, plain, strict=True):
        assert sample["input_ids"].tolist() == expected["input_ids"].tolist()
        assert sample["labels"].tolist() == expected["labels"].tolist()


@pytest.mark.parametrize(("talk", "message"), BAD, ids=[message for _, message in BAD])
def test_rows_that_cannot_be_used_are_named(load: Load, tmp_path: Path, talk: Any, message: str) -> None:
    rows = [{"messages": GOOD}, {"messages": talk}, {"messages": GOOD}]
    with pytest.raises(DataError) as caught:
        load(rows).build_data()
    assert caught.value.message == message
    assert caught.value.where == f"{tmp_path / 'train.jsonl'}:2"
    assert caught.value.hint
    task = load(rows, skip_bad_lines=True)
    assert len(_built(task)) == 2
    assert task.bad.skipped == [f"{tmp_path / 'train.jsonl'}:2: {message}"]


def test_a_misspelt_role_has_a_hint(load: Load) -> None:
    with pytest.raises(DataError) as caught:
        load([{"messages": [{"role": "humna", "content": "a"}]}]).build_data()
    hint = str(caught.value.hint)
    assert hint.startswith("did you mean user? roles are system, developer, user, assistant, tool; ")
    assert hint.endswith("--skip-bad-lines")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": " "}, "the completion is empty"),
        ({"prompt": None, "completion": "a"}, "the prompt is empty"),
        ({"prompt": "a", "completion": None}, "the completion is empty"),
        ({"prompt": "a", "completion": GOOD}, "the prompt is a text and the completion is a list"),
        ({"prompt": GOOD, "completion": GOOD[:1]}, "the conversation has no answer: no message is the assistant's"),
        ({"messages": "hello"}, "the conversation is a text, not a list of messages"),
        ({"messages": [{**GOOD[0], "content": ["a"]}]}, "part 1 of the content of message 1 in 'messages' has no type"),
        ({"messages": [GOOD[0], {**GOOD[1], "content": [{"type": "text"}]}]},
         "part 1 of the content of message 2 in 'messages' has no text"),
        ({"messages": [{**GOOD[0], "content": [TEXT_PART, {"type": "image_url", "image_url": {"url": "a"}}]}, GOOD[1]]},
         "part 2 of the content of message 1 in 'messages' is of the type 'image_url', "
         "which is not supported in this version"),
        ({"messages": [GOOD[0], {**GOOD[1], "content": None, "function_call": {"name": "f"}}]},
         "message 2 of the conversation calls tools, which is not supported in this version"),
        ({"messages": GOOD, "functions": ["f"]}, "tools are not supported in this version"),
        ({"messages": [GOOD[0], {**GOOD[1], "weight": 0}]},
         "message 2 of the conversation has the weight 0, which is not supported in this version"),
        ({"messages": [*GOOD, {**GOOD[1], "tool_calls": ["f"]}]},
         "message 3 of the conversation calls tools, which is not supported in this version"),
        ({"messages": GOOD, "tools": ["f"]}, "tools are not supported in this version"),
    ],
)  # fmt: skip
def test_other_rows_that_cannot_be_used(load: Load, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        load([row]).build_data()
    assert caught.value.message == message
    assert caught.value.where == f"{tmp_path / 'train.jsonl'}:1"


def test_templates_that_cannot_be_used(load: Load, tmp_path: Path) -> None:
    rows = [{"messages": GOOD}, {"messages": TALKS[0]}]
    with pytest.raises(DataError, match="message 2, or that message, in another way when more messages") as caught:
        load(rows, LAST_TURN_DIFFERS).build_data()
    assert caught.value.where == f"{tmp_path / 'train.jsonl'}:2"
    assert "--loss-on all" in str(caught.value.hint)
    assert len(_built(load(rows, LAST_TURN_DIFFERS, loss_on="all"))) == 2
    with pytest.raises(DataError, match="rejects the conversation: roles must alternate, in 2 rows") as caught:
        load(rows, STRICT).build_data()
    places = [f"{tmp_path / 'train.jsonl'}:{line}" for line in (1, 2)]
    assert [line.strip() for line in str(caught.value.where).splitlines()] == places


def test_a_template_sees_the_keys_of_the_row(load: Load) -> None:
    """A table gives every object the keys of all rows. The template gets those that the row has, at any depth."""
    metas: list[dict[str, Any]] = [{"a": 1}, {"b": {"c": [{"d": 2}]}}, {"b": {"e": 3}}, {"b": {"c": [{"f": 4}]}}]
    rows = [{"messages": [{**GOOD[0], "meta": meta}, GOOD[1]]} for meta in metas]
    task = load(rows, CHATML.replace("m['content']", "m['content'] + (m.meta | tojson if m.meta else '')"))
    texts = [task.tokenizer.decode(sample["input_ids"]) for sample in _built(task)]
    assert [json.loads(text[text.index("{") : text.rindex("}") + 1]) for text in texts] == metas


PIECES = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}{% generation %}{{ eos_token }}{% endgeneration %}"
)
"""An answer in two marked pieces. The last piece of the text does not touch an answer."""


def test_an_answer_in_several_marked_pieces(load: Load) -> None:
    template = PIECES.removesuffix("{% generation %}{{ eos_token }}{% endgeneration %}")
    rows = [{"messages": TALKS[0]}, {"prompt": TALKS[0][:3], "completion": TALKS[0][3:]}]
    for row, learned in zip(rows, ("hello<|im_end|>hello dog 🐶<|im_end|>", "hello dog 🐶<|im_end|>"), strict=True):
        task = load([row], template)
        assert [_learned(task, sample) for sample in _built(task)] == [learned]
    with pytest.raises(DataError, match="the chat template marks 3 answers of 2"):
        load(rows[:1], PIECES).build_data()


def test_a_template_that_opens_a_thought(load: Load) -> None:
    template = CHATML.replace("assistant\n'", "assistant\n<think>\n'")
    with pytest.raises(DataError) as caught:
        load([{"messages": GOOD}], template).build_data()
    assert caught.value.message == (
        r"the chat template asks for an answer with 'sistant\n<think>\n', and message 2 does not begin so"
    )
    assert "docs/fine-tuning-data.md" in str(caught.value.hint)
    thought = [GOOD[0], {**GOOD[1], "content": "<think>\na tree</think>hello"}]
    task = load([{"messages": thought}], template)
    assert [_learned(task, sample) for sample in _built(task)] == ["a tree</think>hello<|im_end|>\n"]


NO_END = CHATML.replace("'<|im_end|>' + ", "")
ENDS: dict[str, tuple[str | None, bool, dict[str, Any]]] = {
    "end": (CHATML, True, {}),
    "marked": (MARKED, True, {}),
    "plain": (None, True, {}),
    "none": (NO_END, False, {}),
    "not marked": (
        MARKED.replace("'<|im_end|>' + '\n' }}{% endgeneration %}", "'' }}{% endgeneration %}<|im_end|>"),
        False,
        {},
    ),
    "all tokens": (NO_END, False, {"loss_on": "all"}),
    "all tokens, end": (CHATML, True, {"loss_on": "all"}),
    "stream": (NO_END, False, {"streaming": True}),
    "stream, end": (CHATML, True, {"streaming": True}),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_template_without_an_end_after_answers_is_noted(load: Load, name: str) -> None:
    template, has_end, flags = ENDS[name]
    task = load([{"messages": talk} for talk in TALKS], template, **flags)
    task.build_data()
    assert (NO_END_NOTE in task.notes) == (not has_end)


TRAINING = {
    "qwen3": "<think>\n\n</think>\n\n{}<|im_end|>\n",
    "phi3": "{}<|end|>\n",
    "gpt-oss": "<|channel|>final<|message|>{}<|end|>",
}


@pytest.mark.parametrize("name", TRAINING)
def test_the_templates_for_training(load: Load, name: str) -> None:
    """Each answer is learned as it is written after its generation prompt, no matter what follows."""
    template = (ROOT / f"examples/chat-templates/{name}.jinja").read_text(encoding="utf-8")
    task = load([{"messages": talk} for talk in TALKS], template, seq_length=400)
    tokenizer, rendered = task.tokenizer, ChatTemplate(task.tokenizer)
    for talk in TALKS:
        found = rendered.answers(talk)
        assert found.text == tokenizer.apply_chat_template(talk, tokenize=False)
        answers = [turn for turn, message in enumerate(talk) if message["role"] == "assistant"]
        for (begin, end), turn in zip(found.answers, answers, strict=True):
            prompt = tokenizer.apply_chat_template(talk[:turn], tokenize=False, add_generation_prompt=True)
            assert found.text[:begin] == prompt
            wanted = TRAINING[name].format(talk[turn]["content"])
            is_last_of_gpt_oss = name == "gpt-oss" and turn == len(talk) - 1
            assert found.text[begin:end] == (wanted.replace("<|end|>", "<|return|>") if is_last_of_gpt_oss else wanted)
    assert len(_built(task)) == len(TALKS)


def test_long_conversations_are_cut_and_counted(load: Load) -> None:
    talks = [_talk("a " * 60, "the cat"), _talk("the cat", "a " * 60), GOOD]
    rows = [{"messages": talk} for talk in talks]
    whole = _built(load(rows))
    task = load(rows, seq_length=48)
    samples = _built(task)
    assert [s["input_ids"].tolist() for s in samples] == [s["input_ids"][:48].tolist() for s in whole[1:]]
    assert [s["labels"].tolist() for s in samples] == [s["labels"][:48].tolist() for s in whole[1:]]
    assert len(samples[0]["input_ids"]) == 48
    assert task.notes == [
        "train: 2 of 3 samples are cut to 48 tokens; 1 with no part of an answer left are not used",
    ]
    with pytest.raises(DataError, match="within the first 4 tokens of any of the 3 samples"):
        load(rows, seq_length=4).build_data()


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
    summary = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))["metrics"]
    assert summary["eval_loss"] == pytest.approx(total / count, rel=1e-4)
    assert summary["token_accuracy"] == pytest.approx(right / count, abs=1.5 / count)
