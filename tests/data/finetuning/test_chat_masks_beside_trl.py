"""The learned tokens of conversations, compared with TRL's trainer. TRL is not a dependency (1.16 was used)."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from rapidformer_templates.errors import DataError
from tests.support.chat_templates import CONVERSATIONS, Row, learned_by_us, table, template, tokenizer_with
from tests.support.texts import Load

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install --no-deps trl")
chat_template_utils = pytest.importorskip("trl.chat_template_utils")

TABLE = table()
Learned = tuple[list[int], list[bool]]


@pytest.fixture(scope="module")
def tokenizers(gpt_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat-tokenizer")
    tokenizer_with(gpt_folder, folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tokenizers: Path) -> GPT2LMHeadModel:
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(AutoTokenizer.from_pretrained(tokenizers)), **sizes))


def _learned_by_trl(row: Row, tokenizer: PreTrainedTokenizerFast, model: Any, folder: Path) -> Learned:
    messages = [
        {**m, "content": "".join(part["text"] for part in m["content"])} if isinstance(m.get("content"), list) else m
        for m in row["messages"]
    ]
    options: dict[str, Any] = {"max_length": None, "report_to": [], "use_cpu": True, "bf16": False}
    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(str(folder / "trl"), assistant_only_loss=True, **options),
        train_dataset=datasets.Dataset.from_list(
            [{"messages": messages} | ({"tools": json.dumps(row["tools"])} if "tools" in row else {})]
        ),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    return batch["input_ids"][0].tolist(), [False, *(batch["labels"][0, 1:] != -100).tolist()]


CELLS = [
    (name, conversation)
    for name, row in TABLE.items()
    for conversation, cell in row.items()
    if not cell.startswith("no ") and name != "hermes"  # TRL reads only one template of a tokenizer
]


@pytest.mark.parametrize(("name", "conversation"), CELLS)
def test_our_templates(
    load: Load, tokenizers: Path, tiny: GPT2LMHeadModel, tmp_path: Path, name: str, conversation: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizers)
    tokenizer.chat_template = template(name, marked=True)
    row = CONVERSATIONS[conversation]
    assert learned_by_us(load, row, tokenizer) == _learned_by_trl(row, tokenizer, tiny, tmp_path)


HEADERS = {
    "qwen2_5": "\n",
    "qwen3": "",
    "llama3": "",
    "gemma": "",
    "gemma3": "",
    "phi3": "",
    "gptoss": "<|start|>assistant",
    "deepseekv3": "<｜Assistant｜>",
}
"""What TRL learns of the prompt of an answer, by the name of the template."""

NOT_BY_PREFIX = {
    "qwen3": ("multi-turn", "tool call"),
    "phi3": ("multi-turn",),
    "gptoss": ("multi-turn",),
    "deepseekv3": ("plain", "system", "multi-turn", "parts"),
}
"""Conversations whose answers the rule of prefixes does not find: DeepSeek V3 asks for a thought."""

WITH_TOOLS, WITH_REASONING = ("qwen2_5", "qwen3", "gptoss"), ("qwen3", "gptoss")


def _refused(name: str, conversation: str) -> str | None:
    if conversation == "tool call" and name not in WITH_TOOLS:
        return "would leave out the tools"
    if conversation == "reasoning" and name not in WITH_REASONING:
        return "would leave out the reasoning"
    return "System role not supported" if (name, conversation) == ("gemma", "system") else None


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", HEADERS)
def test_templates_of_models(
    load: Load, tokenizers: Path, tiny: GPT2LMHeadModel, tmp_path: Path, name: str, conversation: str
) -> None:
    """TRL trains a model's own template with its version that has marks, which can also be set here.

    The rule of prefixes learns the same without the prompt, or refuses the row.
    """
    tokenizer, row = AutoTokenizer.from_pretrained(tokenizers), CONVERSATIONS[conversation]
    own, marked = (getattr(chat_template_utils, f"{name}{of}_chat_template") for of in ("", "_training"))
    if refused := _refused(name, conversation):
        for tokenizer.chat_template in (own, marked):
            with pytest.raises(DataError, match=refused):
                learned_by_us(load, row, tokenizer)
        return
    tokenizer.chat_template = own
    ids, wanted = _learned_by_trl(row, tokenizer, tiny, tmp_path)
    tokenizer.chat_template = marked
    assert learned_by_us(load, row, tokenizer) == (ids, wanted)
    tokenizer.chat_template = own
    if conversation in NOT_BY_PREFIX.get(name, ()):
        with pytest.raises(DataError, match=r"when more messages follow|does not begin so"):
            learned_by_us(load, row, tokenizer)
        return
    by_prefix = learned_by_us(load, row, tokenizer)
    assert by_prefix[0] == ids
    assert not any(here and not there for here, there in zip(by_prefix[1], wanted, strict=True))
    more = [t for t, here, there in zip(ids, by_prefix[1], wanted, strict=True) if there and not here]
    answers = sum(m["role"] == "assistant" for m in row["messages"])
    assert tokenizer.decode(more) == HEADERS[name] * answers
