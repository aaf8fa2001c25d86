"""Sequence to sequence: generate a target text from a source text (translation, summaries …)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from rapidformer_templates.data.collate import IGNORED, PadCollate, Ragged, TokenizedSamples
from rapidformer_templates.data.finetuning.chat import beside_instruction
from rapidformer_templates.data.finetuning.chat_samples import drop_repeated
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.generation import DEFAULT_NEW_TOKENS, Generation, TrainedModel, generate
from rapidformer_templates.data.loader import to_device
from rapidformer_templates.data.tasks import base
from rapidformer_templates.data.tasks.language_models import Block, sets_of
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.types import Data, Sample, Tensors
from rapidformer_templates.planning.tasks import SOURCE_COLUMNS

TARGET_COLUMNS = ("target", "summary", "output", "response", "answer", "highlights", "label")


class Seq2SeqLM(base.Task):
    """Source and target are text columns. An instruction is combined with its input column.

    The metrics are ROUGE-L and exact match of greedily generated texts.
    """

    name = "seq2seq_lm"
    auto_class = "AutoModelForSeq2SeqLM"
    best_metric = "rouge_l"
    generates = True
    state_fields = ("columns", "longest_target")
    longest_target = 0

    def read_data(self) -> Data:
        raw = self.read_rows()
        sets = sets_of(raw, self, self._set)
        tokenized_sets = [samples for samples in sets.values() if isinstance(samples, TokenizedSamples)]
        lengths = [int(samples.rows_of("labels").lengths.max()) for samples in tokenized_sets]
        self.longest_target = max([self.longest_target if self.is_trained else 0, *lengths])
        return base.as_data(sets, PadCollate({**base.padding_of(self.tokenizer), "labels": IGNORED}))

    def _columns(self, part: DataPart, *, with_targets: bool = True) -> tuple[str, str | None, Sequence[str | None]]:
        """Return the source column, the target column if ``with_targets``, and the columns of an instruction."""
        source = self.column(part, "text_column", SOURCE_COLUMNS)
        target = self.column(part, "label_column", TARGET_COLUMNS) if with_targets else None
        known = self.columns or {}
        if "beside" in known and source == known["text_column"]:
            return source, target, known["beside"]
        is_instruction, begins = source == "instruction", self.config.data.streaming
        extra = beside_instruction(part, (source, target), begins=begins) if is_instruction else ()
        self.remember({"beside": extra})
        return source, target, extra

    def usable_rows(self, part: DataPart, bad: BadLines) -> DataPart:
        """Return the rows with a source and a target. Empty texts are only left out on request."""
        source, target, _ = self._columns(part)
        assert target is not None

        def check(source_text: object, target_text: object) -> None:
            base.text_value(source_text, source, may_be_empty=not bad.skip)
            base.text_value(target_text, target, may_be_empty=not bad.skip)

        return part.usable([source, target], check, bad)

    def _set(self, name: str, part: DataPart, block: Block | None) -> TokenizedSamples:
        source, target, extra = self._columns(part)
        assert target is not None
        sources = self._tokenized_sources(part, source, extra)
        targets = base.texts_of(part, target)
        labels = self.tokenizer(
            text_target=targets, return_attention_mask=False, verbose=False, truncation=True, max_length=self.seq_length
        )
        drop_repeated(self.tokenizer, labels.data, self.notes)
        rows = base.with_tokens(Ragged(labels["input_ids"]), part, target)
        return TokenizedSamples({"input_ids": sources, "labels": rows})

    def _tokenized_sources(self, part: DataPart, source: str, extra: Sequence[str | None]) -> Ragged:
        """Tokenize the sources. A system prompt comes before its text, and an input after it.

        Only ``input_ids`` are kept because the models take no token types.
        """
        inputs, system = (
            base.texts_of(part, name, may_be_missing=True)
            if name and name in part.table.column_names
            else [""] * len(part)
            for name in extra or (None, None)
        )
        rows = zip(system, base.texts_of(part, source), inputs, strict=True)
        texts = ["\n\n".join(text for text in row if text.strip()) for row in rows]
        fields = base.tokenized(self.tokenizer, texts, max_length=self.seq_length, notes=self.notes)
        return base.with_tokens(fields["input_ids"], part, source)

    def merge_decisions(self, others: Sequence[base.Task]) -> None:
        super().merge_decisions(others)
        self.longest_target = max(task.longest_target for task in others if isinstance(task, Seq2SeqLM))

    def generate(self, model: TrainedModel, batch: Tensors) -> list[str]:
        """Generate greedily, up to the length of the longest target in the data."""
        tokens = generate(model, self.tokenizer, batch, self.longest_target, together=True)
        return self._decoded(tokens.cpu().numpy())

    def inputs(self, part: DataPart) -> base.Inputs:
        source, _, extra = self._columns(part, with_targets=False)
        return base.Inputs.of(TokenizedSamples({"input_ids": self._tokenized_sources(part, source, extra)}))

    def records(self, model: TrainedModel, rows: Sequence[Sample], generation: Generation) -> list[base.Record]:
        batch = to_device(PadCollate(base.padding_of(self.tokenizer))(list(rows)), base.device_of(model))
        new_tokens = generation.max_new_tokens or min(DEFAULT_NEW_TOKENS, self.seq_length)
        tokens = generate(model, self.tokenizer, batch, new_tokens, generation.temperature)
        return [{"text": text} for text in self._decoded(tokens.cpu().numpy())]

    def _decoded(self, tokens: np.ndarray) -> list[str]:
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [text.strip() for text in texts]

    def predict(self, outputs: list[str], batch: Tensors) -> tuple[list[str], list[str]]:
        """Return the generated texts in ``outputs``, and the decoded labels."""
        labels = batch["labels"].cpu().numpy()
        return outputs, self._decoded(np.where(labels == IGNORED, self.tokenizer.pad_token_id, labels))

    def compute_metrics(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        pairs = list(zip(predictions, references, strict=True))
        return {
            "rouge_l": float(np.mean([rouge_l(guess, truth) for guess, truth in pairs])),
            "exact_match": float(np.mean([guess == truth for guess, truth in pairs])),
        }


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L: F1 of the longest common subsequence of lower-case words (Lin 2004, section 3, β = 1)."""
    guess, truth = (re.findall(r"\w+", text.lower()) for text in (prediction, reference))
    common = longest_common_subsequence(guess, truth)
    return 2 * common / (len(guess) + len(truth)) if common else 0.0


def longest_common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest common subsequence. The subsequence may have gaps."""
    lengths = [0] * (len(b) + 1)  # for the words of ``a`` so far and each prefix of ``b``
    for word in a:
        diagonal = 0
        for j, other in enumerate(b, start=1):
            diagonal, lengths[j] = lengths[j], diagonal + 1 if word == other else max(lengths[j], lengths[j - 1])
    return lengths[-1]
