"""Samples of chat and instruction data: tokens, and labels on the tokens of the answers.

The rendered text is never searched for the start or end of an answer. A chat template can mark its answers with
``{% generation %}``. With any other template the conversation is rendered twice: up to the answer, with the generation
prompt that asks for it, and again including the answer. The first text must be a prefix of the second, and the second a
prefix of the whole conversation. An answer is thus everything that the model must write after its prompt, including the
end marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeVar

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from rapidformer_templates.data.collate import IGNORED, Ragged, TokenizedSamples
from rapidformer_templates.data.finetuning.chat import ChatExample, Columns, Completion, Example, read_example, rows_of
from rapidformer_templates.data.finetuning.messages import Message, common_length, is_learned
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.errors import DataError, counted

PLAIN_TEMPLATE = """\
{% for message in messages %}
{% if not loop.first %}{{ '\\n\\n' }}{% endif %}
{{ message['role'] + ':\\n' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '\\n\\nassistant:\\n' }}{% endif %}
"""
"""Template for tokenizers without one: ``role:``, a line break and the text, with a blank line between messages.

Answers end with the end token.
"""

PLAIN_NOTE = "the tokenizer has no chat template: a plain one is used, and exported with it"
DATE_NOTE = "the chat template writes the date, so a resume on another day has other samples (--allow-changed-data)"

TRAINING_HINT = (
    "use a template for training, which marks the answers with {% generation %} (docs/fine-tuning-data.md has some, "
    "and trl.chat_template_utils), or learn all tokens with --loss-on all"
)
NO_END_NOTE = (
    "no answer ends with an end token, so the model does not learn to stop: write the end token after an answer in the "
    "chat template, inside of {% generation %} if it has that"
)

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLACES = {"tools": {"tools"}, "calls": {"tool_calls"}, "reasoning": {"reasoning_content", "thinking"}}
"""The names by which a template reads what it would otherwise leave out without a word."""


@dataclass(frozen=True)
class Rendered:
    """A text with the positions of its answers.

    Attributes:
        answers: the first character of each answer, and the character after its last one.
        bare: the text does not contain special tokens yet, so the tokenizer must add them.
    """

    text: str
    answers: Sequence[tuple[int, int]] = ()
    bare: bool = False


class ChatTemplate:
    """The tokenizer's chat template. A tokenizer without one gets :data:`PLAIN_TEMPLATE`, which is exported with it.

    Attributes:
        is_plain: the template is the plain one.
        notes: remarks about it for the user.

    Raises:
        DataError: the tokenizer has several templates and no default.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.is_plain = not tokenizer.chat_template
        if self.is_plain:
            starts = tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
            tokenizer.chat_template = ("{{ bos_token }}" if starts else "") + PLAIN_TEMPLATE
        try:
            # The template for a conversation without tools, and for one with tools.
            self._sources = tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[])
        except ValueError as error:
            hint = "keep one of its templates, under the name default"
            raise DataError("the tokenizer has no default chat template", where="chat template", hint=hint) from error
        self.notes = [PLAIN_NOTE] if self.is_plain else []
        if "strftime_now" in "".join(self._sources):
            self.notes.append(DATE_NOTE)
        self._are_marked = [MARKED.search(source) is not None for source in self._sources]
        self._tokens = tokenizer.special_tokens_map

    def render(self, example: ChatExample, *, add_generation_prompt: bool = False) -> str:
        """Render messages and tools as text. ``add_generation_prompt`` adds the generation prompt."""
        return self._render(example, add_generation_prompt=add_generation_prompt)[0]

    def _render(
        self, example: ChatExample, *, add_generation_prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        source, messages = self._sources[bool(example.tools)], example.messages
        # Refuse a conversation with something that the template would leave out.
        keys = {key for message in messages for key in message} | ({"tools"} if example.tools else set())
        for what, names in PLACES.items():
            if names & keys and not names & _names_in(source):
                hint = f"use the template of a model that has them, or remove the {what} from the row"
                raise DataError(f"the chat template would leave out the {what}", hint=hint)
        has_calls = "tool_calls" in keys
        for conversation in (messages, _with_texts_of_calls(messages))[: 1 + has_calls]:
            try:
                texts, spans = self._apply(
                    conversations=[list(conversation)],
                    tools=example.tools,
                    chat_template=source,
                    add_generation_prompt=add_generation_prompt,
                    return_assistant_tokens_mask=marks,
                    **self._tokens,
                )
                return texts[0], spans[0] if marks else []
            except (jinja2.TemplateError, TypeError) as error:
                rejected = DataError(f"the chat template rejects the conversation: {error}")
        raise rejected

    def check_calls(self, example: ChatExample, text: str) -> None:
        """Check that the text of a conversation has all calls, and the content of their messages. Not all templates do.

        Raises:
            DataError: the text is the same without a call, or without the content of its message.
        """
        for i, message in enumerate(example.messages):
            calls: Any = message.get("tool_calls", [])
            content = message.get("content")
            if len(calls) + bool(content) < 2 or not calls:
                continue  # a message that is only a call cannot lose it
            bare = {key: value for key, value in message.items() if key != "tool_calls"}
            without = {"a call": bare | ({"tool_calls": calls[:-1]} if len(calls) > 1 else {})}
            if content:
                without["the content next to a call"] = {key: message[key] for key in message if key != "content"}
            for what, other in without.items():
                messages = [*example.messages[:i], other, *example.messages[i + 1 :]]
                if self._renders_as(replace(example, messages=messages), text):
                    hint = "write it as a separate message, or use another template"
                    raise DataError(f"the chat template leaves out {what} in message {i + 1}", hint=hint)

    def _renders_as(self, example: ChatExample, text: str) -> bool:
        try:
            return self.render(example) == text
        except DataError:  # the template needs what is not there
            return False

    _apply: Any = staticmethod(render_jinja_template)  # its annotations do not show what it returns

    def answers(self, example: ChatExample, *, last: bool = False) -> Rendered:
        """Render the conversation and find the answers that are learned.

        Args:
            last: only the last of them is.

        Raises:
            DataError: there is no such answer, or the template does not show where an answer begins.
        """
        messages = example.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        asked = [i for i in turns if i >= example.prompt_length]
        learned = [i for i in asked if is_learned(messages[i])]
        if not learned:
            why = " to learn: weight and train leave out all of them" if asked else ": no message is the assistant's"
            raise DataError(f"the conversation has no answer{why}")
        learned = learned[-1:] if last else learned
        if self._are_marked[bool(example.tools)]:
            text, pieces = self._render(example, marks=True)
            marked = pieces[:1]
            for begin, end in pieces[1:]:
                if begin == marked[-1][1]:  # one answer in several pieces, such as a text and its end marker
                    marked[-1] = marked[-1][0], end
                else:
                    marked.append((begin, end))
            if len(marked) != len(turns):
                raise DataError(f"the chat template marks {len(marked)} answers of {len(turns)}")
            return Rendered(text, [span for turn, span in zip(turns, marked, strict=True) if turn in learned])
        text = self.render(example)
        return Rendered(text, [self._answer(example, turn, text) for turn in learned])

    def _answer(self, example: ChatExample, turn: int, text: str) -> tuple[int, int]:
        def render(count: int, *, add_generation_prompt: bool = False) -> str:
            beginning = replace(example, messages=example.messages[:count])
            return self.render(beginning, add_generation_prompt=add_generation_prompt)

        # The first message has no prompt. If it is an answer, its header is learned, too.
        prompt = render(turn, add_generation_prompt=True) if turn else ""
        through = text if turn == len(example.messages) - 1 else render(turn + 1)
        if text.startswith(through) and through.startswith(prompt) and len(prompt) < len(through):
            return len(prompt), len(through)
        common = common_length(prompt, through)
        if text.startswith(through) and common < len(prompt):  # it opens a thought that the answer does not have
            what = f"asks for an answer with {prompt[max(common - 8, 0) :]!r}, and message {turn + 1} does not begin so"
        else:
            what = (
                f"writes what is before message {turn + 1}, or that message, in another way when more messages follow, "
                "so that it is unknown where the answer begins"
            )
        raise DataError(f"the chat template {what}", hint=TRAINING_HINT)


@cache
def _names_in(template: str) -> set[str]:
    """Return the names and the plain texts in the code of a template, without its comments."""
    tokens = jinja2.Environment().lex(template)
    return {text.strip("'\"") for _, kind, text in tokens if kind in ("name", "string")}


def _with_texts_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages for a template that joins arguments as texts, or the content of a call, which may have none."""

    def as_text(call: Any) -> dict[str, object]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {"content": "", **message, "tool_calls": [as_text(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


@dataclass(frozen=True)
class EncodedChat:
    """A tokenized text.

    Attributes:
        ids: the tokens.
        learned: whether each token is part of an answer.
        split: number of answers whose first token begins before the answer.
        is_truncated: whether there were more tokens.
    """

    ids: np.ndarray
    learned: np.ndarray
    split: int
    is_truncated: bool

    @property
    def labels(self) -> np.ndarray:
        """The tokens of the answers, and -100 elsewhere and at the first token, which nothing predicts."""
        labels = np.where(self.learned, self.ids, IGNORED)
        labels[:1] = IGNORED
        return labels


T = TypeVar("T")
Fields = TypeVar("Fields")
PREDICTION_ADVICE = "fix the row: each row gets an answer"
"""Advice for a row to predict that cannot be used."""


@dataclass
class ChatReader:
    """Reads, renders and tokenizes the rows of a data set of conversations or completions.

    Attributes:
        tokenizer: a tokenizer without a chat template gets the plain one.
        seq_length: maximum number of tokens. Longer samples are truncated at the end.
        answers_only: only answers are learned. Otherwise all tokens are.
        whole: parts are complete. False for blocks of a stream, which may end up with no rows.
        bad: receives rows that cannot be used. The caller raises an error about them.
        notes: remarks about the data for the user.
        learns_to_stop: the model will write answers, so that they need an end.
        last_only: only the last answer of a conversation is learned.
    """

    tokenizer: PreTrainedTokenizerFast
    seq_length: int
    answers_only: bool
    whole: bool = True
    bad: BadLines = field(default_factory=BadLines)
    notes: list[str] = field(default_factory=list)
    learns_to_stop: bool = True
    last_only: bool = False

    @cached_property
    def _template(self) -> ChatTemplate:
        template = ChatTemplate(self.tokenizer)
        self.notes += [note for note in template.notes if note not in self.notes]
        return template

    def samples(self, name: str, part: DataPart, columns: Columns) -> TokenizedSamples:
        """Return ``input_ids``, and with ``answers_only`` also ``labels``, which are -100 outside of answers.

        Args:
            name: name of the part, for the notes.

        Raises:
            DataError: a row cannot be used, or no answer has a token within the length.
        """
        chats = self.encoded(self.rendered(part, columns))
        usable = [tokens for tokens in chats if not self.answers_only or tokens.learned[1:].any()]
        self._add_notes(name, part, chats, len(usable))
        samples = {"input_ids": Ragged(tokens.ids for tokens in usable)}
        if self.answers_only:
            samples["labels"] = Ragged(tokens.labels for tokens in usable)
        return TokenizedSamples(samples)

    def rendered(self, part: DataPart, columns: Columns) -> list[Rendered]:
        """Return the text of each row that can be used."""
        return self.read(part, rows_of(part, columns), lambda fields: self.render(read_example(columns, fields)))

    def read(self, part: DataPart, rows: Iterable[Fields], read_row: Callable[[Fields], T]) -> list[T]:
        """Apply a function to each row. Rows that cannot be used are left out and noted in ``bad``.

        Raises:
            DataError: no row can be used.
        """
        results: list[T] = []
        for row, fields in enumerate(rows):
            try:
                results.append(read_row(fields))
            except DataError as error:
                self.bad.note_at(part.where(row), error.message, error.hint or "")
        if not results and self.whole:
            self.bad.raise_all()
            message = f"none of the {len(part)} rows can be used; the last: {self.bad.skipped[-1]}"
            raise DataError(message, where=part.files[0], hint="fix the rows")
        return results

    def encoded(self, texts: Sequence[Rendered]) -> list[EncodedChat]:
        """Tokenize texts of one kind, truncated to the length, and find the tokens of their answers.

        A token belongs to an answer if its last character does. A token that also has characters from before the answer
        is learned and counted in ``split``. At inference such a prompt would end inside that token. Texts without a
        chat template get the special tokens of the tokenizer, and an end token.
        """
        end, length = self.tokenizer.eos_token_id, self.seq_length
        bare = bool(texts) and texts[0].bare  # a column holds one kind of value
        if texts and self.learns_to_stop and NO_END_NOTE not in self.notes and not self._have_ends(texts):
            self.notes.append(NO_END_NOTE)
        chats = []
        for start in range(0, len(texts), 1000):
            chunk = texts[start : start + 1000]
            encoded = self.tokenizer(
                [rendered.text for rendered in chunk],
                add_special_tokens=bare,
                return_attention_mask=False,
                return_offsets_mapping=True,
                verbose=False,
            )
            if bare:
                drop_repeated(self.tokenizer, encoded.data, self.notes)
            for rendered, row, offsets in zip(chunk, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                spans = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
                # Tokens added after the text have the end offset 0. They end where the text ends.
                ends = np.maximum.accumulate(spans[:, 1])
                ids, learned, split = np.asarray(row, dtype=np.int32), np.zeros(len(row), dtype=bool), 0
                for begin, stop in rendered.answers:
                    first, last = np.searchsorted(ends, (begin, stop), side="right")
                    learned[first:last] = True
                    split += bool(first < last and spans[first, 0] < begin)
                if bare and end is not None and end not in row[-1:]:
                    ids, learned = np.append(ids, end), np.append(learned, True)
                chats.append(EncodedChat(ids[:length], learned[:length], split, is_truncated=len(ids) > length))
        return chats

    def _have_ends(self, texts: Sequence[Rendered]) -> bool:
        """Whether an answer of some text, or the whole text, ends with a token that cannot be part of a word."""
        if texts[0].bare:
            return self.tokenizer.eos_token_id is not None
        ends = ((one.text, end) for one in texts for end in [end for _, end in one.answers] or [len(one.text)])
        end_tokens = tuple(self.tokenizer.get_added_vocab())
        return any(text[:end].rstrip().endswith(end_tokens) for text, end in ends)

    def render(self, example: Example) -> Rendered:
        """Return the text of a conversation or completion, and the positions of its answers."""
        if isinstance(example, Completion):
            text = example.prompt + example.completion
            return Rendered(text, [(len(example.prompt), len(text))], bare=True)
        template = self._template
        answers = template.answers(example, last=self.last_only) if self.answers_only else None
        rendered = answers or Rendered(template.render(example))
        template.check_calls(example, rendered.text)
        return rendered

    def question(self, example: ChatExample) -> str:
        """Return the text of a conversation up to the answer that it asks for."""
        return self._template.render(example, add_generation_prompt=True)

    def _add_notes(self, name: str, part: DataPart, chats: Sequence[EncodedChat], usable: int) -> None:
        count, length, unused = len(chats), self.seq_length, len(chats) - usable
        if not usable and self.whole:
            message = f"no token of an answer is within the first {length} tokens of any of the {count} samples"
            raise DataError(message, where=part.files[0], hint="use a greater --seq-length, or shorter prompts")
        if truncated := sum(chat.is_truncated for chat in chats):
            note = f"{name}: {truncated:,} of {count:,} samples are cut to {length} tokens"
            self.notes.append(note + (f"; {unused:,} with no part of an answer left are not used" if unused else ""))
        elif unused:
            self.notes.append(f"{name}: {unused:,} of {count:,} samples are not used: their answers have no token")
        if self.answers_only and (split := sum(chat.split for chat in chats)):
            self.notes.append(
                f"{name}: the answers of {counted(split, 'sample')} begin inside a token that begins in their prompt; "
                "put the space or line break between them into the answer"
            )


def added_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer adds before and after a text."""
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    starts = [i for i in range(len(whole)) if bare and whole[i : i + len(bare)] == bare]
    return (whole[: starts[0]], whole[starts[0] + len(bare) :]) if starts else ([], [])


def once(ids: list[int], added: tuple[list[int], list[int]]) -> slice:
    """Return which tokens of a text remain if the added ones are not there twice, as with a text that was rendered."""
    begin, end = added
    if len(ids) <= len(begin) + len(end):
        return slice(0, len(ids))
    begins_twice = bool(begin) and ids[: 2 * len(begin)] == begin * 2
    ends_twice = bool(end) and ids[-2 * len(end) :] == end * 2
    return slice(len(begin) * begins_twice, len(ids) - len(end) * ends_twice)


def drop_repeated(
    tokenizer: PreTrainedTokenizerFast,
    encoded: MutableMapping[str, list[Any]],
    notes: list[str] | None,
    pairs: Sequence[str] | None = None,
) -> None:
    """Remove special tokens that the tokenizer has added to texts that have them already, in all fields.

    Args:
        notes: receives a remark for the user, once.
        pairs: the second texts. An empty one stands between two separators that belong there.
    """
    (begin, end), names, repeats = added_tokens(tokenizer), list(encoded), 0
    for row, ids in enumerate(encoded["input_ids"]):
        tokens = once(ids, (begin, [] if pairs and not pairs[row] else end))
        if tokens != slice(0, len(ids)):
            repeats += 1
            for name in names:
                encoded[name][row] = encoded[name][row][tokens]
    note = "texts begin or end with special tokens that the tokenizer adds, so it does not add them again"
    if repeats and notes is not None and note not in notes:
        notes.append(note)
