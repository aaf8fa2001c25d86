"""A conversation with a language model: its messages, and answers that are streamed word by word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, TextStreamer

from rapidformer_templates.data.finetuning.chat_template import ChatTemplate
from rapidformer_templates.data.finetuning.messages import Message
from rapidformer_templates.data.generation import DEFAULT_NEW_TOKENS, Generation, generate
from rapidformer_templates.errors import DataError
from rapidformer_templates.models.architectures import positions_of

MIN_ROOM = 16
"""Minimum number of tokens that must remain for an answer."""


class Conversation:
    """Messages in the chat template of the tokenizer, and the model that answers them.

    Args:
        model: an unsharded causal language model, on the device where it runs.
        system: a message that comes before all others.

    Attributes:
        messages: the messages so far.
        is_plain: whether a plain template is used because the tokenizer has none.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerFast, generation: Generation, system: str | None = None
    ) -> None:
        self.model, self.tokenizer, self.generation = model, tokenizer, generation
        self._template = ChatTemplate(tokenizer)
        self.is_plain = self._template.is_plain
        self._first: list[Message] = [{"role": "system", "content": system}] if system else []
        self._positions = positions_of(model.config)
        self.reset()
        torch.manual_seed(generation.seed)

    def reset(self) -> None:
        """Forget all messages except the system message."""
        self.messages = list(self._first)

    def answer(self, text: str, tell: Callable[[str], object]) -> int:
        """Send a message and stream the answer. After an interruption, the conversation keeps the streamed part.

        Args:
            tell: receives the pieces of the answer.

        Returns:
            Number of the oldest messages that were forgotten because the model has no room for them.

        Raises:
            DataError: the message itself leaves no room for an answer, or the template rejects it.
        """
        ids, forgotten = self._prompt({"role": "user", "content": text})
        streamer = _WordStreamer(self.tokenizer, tell)
        room = self.generation.max_new_tokens or DEFAULT_NEW_TOKENS
        if self._positions is not None:
            room = min(room, self._positions - ids.shape[1])
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        try:
            with torch.no_grad():
                generate(self.model, self.tokenizer, batch, room, self.generation.temperature, streamer=streamer)
        finally:
            try:
                streamer.end()
            finally:
                self.messages.append({"role": "assistant", "content": "".join(streamer.pieces).strip()})
        return forgotten

    def _prompt(self, message: Message) -> tuple[torch.Tensor, int]:
        """Return (the tokens up to the answer, number of forgotten messages). After an error nothing is forgotten."""
        first, forgotten = len(self._first), 0
        messages = [*self.messages, message]
        while True:
            text = self._template.render(messages, add_generation_prompt=True)
            ids = torch.tensor([self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]])
            if not ids.shape[1]:
                raise DataError("the message has no token", hint="write it in the characters that the tokenizer knows")
            if self._positions is None or ids.shape[1] + MIN_ROOM <= self._positions:
                self.messages = messages
                return ids.to(next(self.model.parameters()).device), forgotten
            if len(messages) <= first + 1:
                problem = (
                    f"the message has {ids.shape[1]} tokens, and the model takes {self._positions}, "
                    "including its answer"
                )
                raise DataError(problem, hint="shorten it")
            del messages[first : first + 2]
            forgotten += 2


class _WordStreamer(TextStreamer):
    """Passes on the output of ``generate``, word by word."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, tell: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._tell = tell
        self.pieces: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by ``generate`` and by :meth:`end`."""
        if text:
            self.pieces.append(text)
            self._tell(text)
