"""From conversations to tokens, and which of the tokens are answers.

Where an answer begins and ends is never searched for in the rendered text. A chat template that
marks its answers (``{% generation %}``) says so itself. With any other one the conversation is
rendered up to the answer, with the prompt that asks for it, and again with it; the first must be
the beginning of the second, and that the beginning of the whole. An answer is thus all that the
model has to write where it is asked to, the mark of its end included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from rapidformer_templates.data.finetuning.chat import Message
from rapidformer_templates.errors import DataError

PLAIN_TEMPLATE = """\
{% for message in messages %}
{% if not loop.first %}{{ '\\n\\n' }}{% endif %}
{{ message['role'] + ':\\n' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '\\n\\nassistant:\\n' }}{% endif %}
"""
"""For tokenizers without a template: ``role:``, a line break and the text, with a blank line between messages.

Answers end with the end token.
"""

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A text with its answers.

    Attributes:
        answers: from which to which character each reaches.
        bare: the text has none of the tokens yet that the tokenizer puts around one.
    """

    text: str
    answers: Sequence[tuple[int, int]] = ()
    bare: bool = False


class ChatTemplate:
    """The tokenizer's chat template; a tokenizer without one is given :data:`PLAIN_TEMPLATE`, to be exported with it.

    Attributes:
        is_plain: the template is the plain one.

    Raises:
        DataError: the tokenizer has several templates and none by default.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.is_plain = not tokenizer.chat_template
        if self.is_plain:
            starts = tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
            tokenizer.chat_template = ("{{ bos_token }}" if starts else "") + PLAIN_TEMPLATE
        try:
            self._source = tokenizer.get_chat_template()
        except ValueError as error:
            hint = "keep one of its templates, under the name default"
            raise DataError("the tokenizer has no default chat template", where="chat template", hint=hint) from error
        self._tokens = tokenizer.special_tokens_map
        self._is_marked = MARKED.search(self._source) is not None

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """The text of some messages; ``asks`` adds the prompt for an answer."""
        return self._render(messages, asks=asks)[0]

    def _render(
        self, messages: Sequence[Message], *, asks: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, spans = self._apply(
                conversations=[list(messages)],
                chat_template=self._source,
                add_generation_prompt=asks,
                return_assistant_tokens_mask=marks,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise DataError(f"the chat template does not take the conversation: {error}") from error
        return texts[0], spans[0] if marks else []

    _apply: Any = staticmethod(render_jinja_template)  # its annotations do not say what it returns

    def answers(self, messages: Sequence[Message], given: int = 0) -> Rendered:
        """The conversation, and where the answers are in it, but for those in the first ``given`` messages.

        Raises:
            DataError: there is no answer, or the template does not tell where one begins.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [i for i in turns if i >= given]
        if not wanted:
            raise DataError("the conversation has no answer: no message is the assistant's")
        if self._is_marked:
            text, marked = self._render(messages, marks=True)
            if len(marked) != len(turns):
                raise DataError(f"the chat template marks {len(marked)} answers of {len(turns)}")
            return Rendered(text, marked[len(turns) - len(wanted) :])
        text = self.render(messages)
        return Rendered(text, [self._answer(messages, turn, text) for turn in wanted])

    def _answer(self, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int]:
        # Nothing asks for a conversation's first message: if that is an answer, its header is to be learned, too.
        asked = self.render(messages[:turn], asks=True) if turn else ""
        through = text if turn == len(messages) - 1 else self.render(messages[: turn + 1])
        if not (text.startswith(through) and through.startswith(asked) and len(asked) < len(through)):
            raise DataError(
                f"the chat template writes what is before message {turn + 1}, or that message, in another way "
                "when more messages follow, so that it is unknown where the answer begins",
                hint="mark the answers in the template with {% generation %}, or learn all tokens with --loss-on all",
            )
        return len(asked), len(through)


@dataclass(frozen=True)
class Encoded:
    """A tokenized text.

    Attributes:
        ids: the tokens.
        learned: whether each is part of an answer.
        split: answers whose first token begins before them.
    """

    ids: np.ndarray
    learned: np.ndarray
    split: int


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[Rendered], *, special: bool) -> Iterator[Encoded]:
    """Tokenize texts and find the tokens of their answers by the characters that each token stands for.

    A token belongs to an answer if its last character does. One that also holds characters from
    before the answer is learned, and counted: asked in this way, the model would not see it begin.

    Args:
        special: add the tokens that the tokenizer puts around a text (rendered conversations have theirs).
    """
    for start in range(0, len(texts), 1000):
        chunk = texts[start : start + 1000]
        encoded = tokenizer(
            [rendered.text for rendered in chunk],
            add_special_tokens=special,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        for rendered, ids, offsets in zip(chunk, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            yield _encoded(rendered, ids, offsets)


def _encoded(rendered: Rendered, ids: list[int], offsets: list[tuple[int, int]]) -> Encoded:
    spans = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    # Tokens added behind the text claim to end at 0; they end where the text does.
    ends = np.maximum.accumulate(spans[:, 1])
    learned, split = np.zeros(len(ids), dtype=bool), 0
    for begin, end in rendered.answers:
        first, stop = np.searchsorted(ends, (begin, end), side="right")
        learned[first:stop] = True
        split += bool(first < stop and spans[first, 0] < begin)
    return Encoded(np.asarray(ids, dtype=np.int32), learned, split)
