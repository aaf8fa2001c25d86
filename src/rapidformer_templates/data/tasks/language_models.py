"""Language modelling: causal (predict the next token of texts or answers), masked, and sequence to sequence."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from rapidformer_templates.data import collate
from rapidformer_templates.data.collate import IGNORED, PackedRows, PadCollate, Ragged, TokenizedSamples
from rapidformer_templates.data.finetuning import chat
from rapidformer_templates.data.finetuning.chat_samples import (
    PREDICTION_ADVICE,
    ChatReader,
    added_tokens,
    drop_repeated,
    once,
)
from rapidformer_templates.data.finetuning.tables import DataPart, LoadedDataset, UsableRows, part_of_stream
from rapidformer_templates.data.generation import DEFAULT_NEW_TOKENS, Generation, TrainedModel, generate, padded_left
from rapidformer_templates.data.loader import to_device
from rapidformer_templates.data.order import Stream
from rapidformer_templates.data.pretraining.masking import MaskTokens, check_mask_probability
from rapidformer_templates.data.streaming import BlockResult, StreamedRow, StreamedSamples, buffer_of
from rapidformer_templates.data.tasks import base
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.types import Data, Model, ModelOutputs, Sample, SampleSet, Tensors
from rapidformer_templates.errors import DataError
from rapidformer_templates.models.architectures import positions_of
from rapidformer_templates.models.label_use import LabelUse, check_causal
from rapidformer_templates.planning.tasks import SOURCE_COLUMNS, TEXT_COLUMNS

Make = Callable[..., TokenizedSamples]
"""Makes samples from (name, part, block). ``block`` is None for a whole part, else a block of a stream."""


@dataclass(frozen=True)
class Block:
    """Marks a part as a block of a stream. It gets no notes, and it may end up empty.

    Attributes:
        generator: random generator for making the samples.
        bad: receives the rows that cannot be used.
    """

    generator: np.random.Generator
    bad: BadLines


def sets_of(raw: LoadedDataset, task: base.Task, make: Make) -> dict[str, TokenizedSamples | StreamedSamples]:
    """Return the samples of each existing part by name.

    Raises:
        DataError: rows cannot be used.
    """
    whole = {name: part for name, part in raw.parts().items() if name != "train" or raw.stream is None}
    sets: dict[str, TokenizedSamples | StreamedSamples]
    sets = {name: make(name, part, None) for name, part in whole.items()}
    task.bad.raise_all()
    if raw.stream is not None:
        config = task.config
        packed = ", packed" if config.data.pack_sequences else ""
        sets["train"] = StreamedSamples(
            raw.stream,
            partial(_block_of_rows, make, task.usable_rows, config.data.skip_bad_lines),
            seed=config.training.seed,
            buffer=buffer_of(config.data),
            identity=f"{raw.stream.identity} in samples of {config.model.seq_length} tokens{packed}",
        )
    return sets


def _block_of_rows(
    make: Make,
    usable: UsableRows,
    skip: bool,
    rows: list[StreamedRow],
    remainder: object,
    generator: np.random.Generator,
) -> BlockResult:
    """Make one sample per row, or pack several rows. No rows are left over for the next block."""
    block = Block(generator, BadLines(skip=skip))
    part = usable(part_of_stream(rows, block.bad), block.bad)
    samples: SampleSet = make("train", part, block) if len(part) else ()
    block.bad.raise_all(is_part=True)
    return BlockResult(samples, skipped=block.bad.skipped)


class ContinuesTexts(base.Task):
    """Base of tasks whose models predict by continuing texts and answering conversations."""

    @property
    def text_column(self) -> str:
        """Name of the text column for a text given alone. It is continued, regardless of the training data."""
        return self.config.data.text_column or TEXT_COLUMNS[0]

    def inputs(self, part: DataPart) -> base.Inputs:
        """Tokenize texts to continue and conversations to answer.

        Raises:
            DataError: a column is missing, a row cannot be used, or a prompt leaves the model no room to write.
        """
        columns, tokenizer = chat.find_prompt_columns(part, self.config.data, self.columns or {}), self.tokenizer
        reader = ChatReader(tokenizer, self.seq_length, answers_only=True, bad=BadLines(advice=PREDICTION_ADVICE))

        def read_prompt(fields: tuple[object, ...]) -> tuple[str, bool]:
            prompt = chat.read_prompt(columns, fields)
            return (prompt, True) if isinstance(prompt, str) else (reader.question(prompt), False)

        texts = reader.read(part, chat.rows_of(part, columns), read_prompt)
        reader.bad.raise_all()
        ends, added = {tokenizer.eos_token_id, tokenizer.sep_token_id}, added_tokens(tokenizer)
        positions, prompts = positions_of(self.model_config), []
        for row, (text, is_bare) in enumerate(texts):
            ids = tokenizer(text, add_special_tokens=is_bare, verbose=False)["input_ids"]
            ids = ids[once(ids, added)] if is_bare else ids
            if is_bare and ids and ids[-1] in ends:
                ids = ids[:-1]  # the tokenizer ends each text, but this text must be continued
            if not ids:
                message = "the prompt has no token"
                raise DataError(message, where=part.where(row), hint="write a text that the model can continue")
            if positions is not None and len(ids) >= positions:
                message = f"the prompt has {len(ids)} tokens, and the model takes {positions}, including what it writes"
                raise DataError(message, where=part.where(row), hint="shorten it")
            prompts.append(ids)
        return base.Inputs.of(TokenizedSamples({"input_ids": Ragged(prompts)}))

    def records(self, model: TrainedModel, rows: Sequence[Sample], generation: Generation) -> list[base.Record]:
        """Generate the continuation of each prompt."""
        pad = base.padding_of(self.tokenizer)["input_ids"]
        batch = to_device(padded_left([row["input_ids"] for row in rows], pad), base.device_of(model))
        length, positions = batch["input_ids"].shape[1], positions_of(self.model_config)
        room = generation.max_new_tokens or DEFAULT_NEW_TOKENS
        new_tokens = room if positions is None else min(room, positions - length)
        tokens = generate(model, self.tokenizer, batch, new_tokens, generation.temperature)
        texts = self.tokenizer.batch_decode(tokens[:, length:].cpu().numpy(), skip_special_tokens=True)
        return [{"text": text} for text in texts]


class CausalLM(ContinuesTexts):
    """Each text, conversation, or prompt with its completion is one sample, cut to the sequence length.

    Texts and completions end with an end-of-sequence token. All tokens of plain text have a loss. In other data only
    the answers have one (``--loss-on``). With ``--pack-sequences`` several samples share a row. The metric is token
    accuracy.
    """

    name = "causal_lm"
    auto_class = "AutoModelForCausalLM"
    best_metric = "eval_loss"
    _model_shifts = True

    def check(self) -> None:
        super().check()
        if self.packs:
            collate.check_packable(self.model_config.model_type, "--pack-sequences")

    def check_model(self, model: nn.Module) -> None:
        if self.packs:
            collate.check_packable_model(model, "--pack-sequences")

    def use_labels(self, use: LabelUse) -> bool:
        check_causal(use, "--task causal_lm")
        self._model_shifts = use.shifts
        return True

    def compute_loss(self, model: Model, batch: Tensors) -> base.Loss:
        if not self._model_shifts:
            batch = {**batch, "labels": collate.shifted_left(batch["labels"])}
        return model(**batch).loss

    @property
    def packs(self) -> bool:
        """Whether several samples share a row."""
        return self.config.data.pack_sequences

    def read_data(self) -> Data:
        raw = self.read_rows()
        columns = self._columns(raw.train)
        sets = sets_of(raw, self, partial(self._set, columns))
        if raw.stream is not None:
            self._add_notes(columns, raw.train)
        pad = base.padding_of(self.tokenizer)["input_ids"]
        if self.packs:
            padding = {"input_ids": pad, "labels": IGNORED, "position_ids": 0}
            # One shape for all batches: rows are nearly full, and graphs are compiled once.
            return base.as_data(sets, PadCollate(padding, mask=False, length=self.seq_length))
        if self._learns_answers(columns):
            return base.as_data(sets, PadCollate({"input_ids": pad, "labels": IGNORED}))
        return base.as_data(sets, collate.CausalCollate(pad))

    def _add_notes(self, columns: chat.Columns, first: DataPart) -> None:
        """Add the notes that depend on the tokenizer and its template, from the first rows of a stream."""
        rows = list(chat.rows_of(first, columns))
        if columns.kind == "text":
            base.tokenized(self.tokenizer, [text for (text,) in rows if isinstance(text, str)], notes=self.notes)
            return
        reader = self._reader(columns, BadLines(), whole=False, notes=self.notes)
        reader.encoded(reader.rendered(first, columns))

    def _reader(self, columns: chat.Columns, bad: BadLines, *, whole: bool, notes: list[str]) -> ChatReader:
        return ChatReader(
            self.tokenizer,
            self.seq_length,
            self._learns_answers(columns),
            whole=whole,
            bad=bad,
            notes=notes,
            last_only=self.config.data.loss_on == "last",
        )

    def _columns(self, part: DataPart) -> chat.Columns:
        columns = chat.known_columns(self.config.data, self.columns or {}) or chat.find_columns(part, self.config.data)
        self.remember(columns.to_state())
        return columns

    def usable_rows(self, part: DataPart, bad: BadLines) -> DataPart:
        """Return the rows with a text. Conversations are checked when they are read."""
        columns = self._columns(part).of(part)
        if columns.kind != "text":
            return part
        return base.with_texts(part, columns.names, bad)

    def _samples(self, name: str, part: DataPart, columns: chat.Columns, block: Block | None) -> TokenizedSamples:
        if columns.kind == "text":
            if self.config.data.loss_on in ("answers", "last"):
                hint = "plain text has no answers: give messages, or prompt and completion; or leave it out"
                raise DataError(f"the column '{columns.names[0]}' holds plain text", where="--loss-on", hint=hint)
            return self._of_texts(name, part, base.texts_of(part, columns.names[0]), block)
        if block is None:
            reader = self._reader(columns, self.bad, whole=True, notes=self.notes)
        else:
            reader = self._reader(columns, block.bad, whole=False, notes=[])
        return reader.samples(name, part, columns)

    def _of_texts(self, name: str, part: DataPart, texts: Sequence[str], block: Block | None) -> TokenizedSamples:
        rows, end = base.tokenized(self.tokenizer, texts, notes=self.notes)["input_ids"], self.tokenizer.eos_token_id
        ended = []
        for i in range(len(rows)):
            row = rows[i]
            if end is not None and not (len(row) and row[-1] == end):
                row = np.append(row, end)  # it teaches the model where to stop
            ended.append(row[: self.seq_length])
        # The first token of a sample has no context to be predicted from.
        learnable = [row for row in ended if len(row) > 1]
        if len(learnable) < len(ended) and block is None:
            first = next(i for i, row in enumerate(ended) if len(row) < 2)
            if not learnable:
                hint = "longer texts are needed" if self.seq_length > 1 else "use a greater --seq-length"
                raise DataError("no text has a token to predict from another", where=part.where(first), hint=hint)
            unused = f"{len(ended) - len(learnable):,} of {len(ended):,} texts are not used"
            self.notes.append(f"{name}: {unused}: they are empty, or too short to learn from ({part.where(first)} …)")
        return TokenizedSamples({"input_ids": Ragged(learnable)})

    def _set(self, columns: chat.Columns, name: str, part: DataPart, block: Block | None) -> TokenizedSamples:
        samples = self._samples(name, part, columns.of(part), block)
        if not self.packs or not len(samples):
            return samples
        if block is not None:
            return PackedRows(samples, self.seq_length, block.generator)
        stream = Stream.PACKED_TRAINING if name == "train" else Stream.PACKED_VALIDATION
        generator = np.random.default_rng((self.config.training.seed, stream))
        packed = PackedRows(samples, self.seq_length, generator)
        rows = f"{len(packed):,} rows of {self.seq_length} tokens, {packed.lengths.mean() / self.seq_length:.1%} filled"
        self.notes.append(f"{name}: {len(samples):,} samples are packed into {rows}; batch sizes count rows")
        return packed

    def _learns_answers(self, columns: chat.Columns) -> bool:
        return columns.kind != "text" and self.config.data.loss_on != "all"

    def predict(self, outputs: ModelOutputs, batch: Tensors) -> tuple[list[np.ndarray], list[np.ndarray]]:
        # The logits at one token predict the next token.
        return predicted_tokens(outputs.logits[:, :-1].argmax(dim=-1), batch["labels"][:, 1:])

    def compute_metrics(self, predictions: list[np.ndarray], references: list[np.ndarray]) -> dict[str, float]:
        return token_accuracy(predictions, references)


def predicted_tokens(tokens: torch.Tensor, labels: torch.Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the (predicted, true) tokens of each sample at labelled positions. Both inputs are (samples, tokens)."""
    guesses, truths = tokens.cpu().numpy(), labels.cpu().numpy()
    labelled = truths != IGNORED
    return [g[w] for g, w in zip(guesses, labelled, strict=True)], [t[w] for t, w in zip(truths, labelled, strict=True)]


def token_accuracy(predictions: list[np.ndarray], references: list[np.ndarray]) -> dict[str, float]:
    """Return the fraction of target tokens that were predicted correctly."""
    total = sum(map(len, references))
    right = sum(int((p == r).sum()) for p, r in zip(predictions, references, strict=True))
    return {"token_accuracy": right / total if total else 0.0}


BEST = 5
"""Number of candidate tokens reported for each mask."""


class MaskedLM(base.Task):
    """Each text is one sample, cut to the sequence length. Masks change in each epoch. The metric is token accuracy."""

    name = "masked_lm"
    auto_class = "AutoModelForMaskedLM"
    best_metric = "eval_loss"

    def check(self) -> None:
        super().check()
        check_mask_probability(self.config.data.mask_prob)
        self._mask()

    def _mask(self) -> MaskTokens:
        flags = self.config.data
        return MaskTokens(self.tokenizer, flags.mask_prob, whole_words=flags.whole_word_mask)

    def read_data(self) -> Data:
        raw = self.read_rows()
        padding = {**base.padding_of(self.tokenizer), "labels": IGNORED}
        return base.as_data(sets_of(raw, self, self._set), PadCollate(padding), self._mask())

    def usable_rows(self, part: DataPart, bad: BadLines) -> DataPart:
        return base.with_texts(part, [self.column(part, "text_column", TEXT_COLUMNS)], bad)

    def _set(self, name: str, part: DataPart, block: Block | None) -> TokenizedSamples:
        column = self.column(part, "text_column", TEXT_COLUMNS)
        return TokenizedSamples(self.tokens_of(part, column, base.texts_of(part, column)))

    def predict(self, outputs: ModelOutputs, batch: Tensors) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return predicted_tokens(outputs.logits.argmax(dim=-1), batch["labels"])

    def compute_metrics(self, predictions: list[np.ndarray], references: list[np.ndarray]) -> dict[str, float]:
        return token_accuracy(predictions, references)

    def inputs(self, part: DataPart) -> base.Inputs:
        column = self.column(part, "text_column", TEXT_COLUMNS)
        samples = self._set("input", part, None)
        for row, sample in enumerate(samples):
            if self.tokenizer.mask_token_id not in sample["input_ids"]:
                mask, length = self.tokenizer.mask_token, self.seq_length
                message = f"there is no {mask} within the first {length} tokens of the column '{column}'"
                raise DataError(message, where=part.where(row), hint=f"write {mask} in place of the word to predict")
        return base.Inputs.of(samples)

    def records(self, model: TrainedModel, rows: Sequence[Sample], generation: Generation) -> list[base.Record]:
        """Return the most likely tokens for each mask, and the text with the first candidates filled in."""
        outputs, batch = self.outputs(model, rows)
        hidden = batch["input_ids"] == self.tokenizer.mask_token_id
        best = outputs.logits.float().softmax(dim=-1).topk(BEST, dim=-1)
        filled = torch.where(hidden, best.indices[..., 0], batch["input_ids"])
        records: list[base.Record] = []
        for i in range(len(rows)):
            masks = []
            for place in hidden[i].nonzero()[:, 0].tolist():
                texts = [str(self.tokenizer.decode([token])).strip() for token in best.indices[i, place].tolist()]
                scores = map(base.round_score, best.values[i, place].tolist())
                masks.append([{"token": token, "score": score} for token, score in zip(texts, scores, strict=True)])
            text = self.tokenizer.decode(filled[i][batch["attention_mask"][i] > 0], skip_special_tokens=True)
            records.append({"text": text, "masks": masks})
        return records


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
        extra = chat.beside_instruction(part, (source, target), begins=begins) if is_instruction else ()
        self.remember({"beside": extra})
        return source, target, extra

    def usable_rows(self, part: DataPart, bad: BadLines) -> DataPart:
        source, target, _ = self._columns(part)
        assert target is not None
        return base.with_texts(part, [source, target], bad)

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
        return self.tokens_of(part, source, texts)["input_ids"]

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
