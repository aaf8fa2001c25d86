"""Preference training and reward models.

Preference training teaches a model which answers are wanted. A reward model learns to score answers. The losses are
pure functions of the log-probabilities of whole answers, and each follows its paper. All are tested against TRL. They
also follow TRL where a paper leaves a choice open (lengths in IPO, the tokens of the likelihood in ORPO).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import PreTrainedModel

from rapidformer_templates.data.collate import IGNORED, shifted_left
from rapidformer_templates.data.finetuning import preferences
from rapidformer_templates.data.finetuning.chat import find_columns
from rapidformer_templates.data.finetuning.chat_samples import PREDICTION_ADVICE, ChatReader
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.generation import Generation, TrainedModel
from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.data.tasks.base import EvalBatch, Inputs, Record, Task, as_data, padding_of, round_score
from rapidformer_templates.data.tasks.language_models import ContinuesTexts
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.types import Data, Model, ModelOutputs, Sample, Tensors
from rapidformer_templates.models.architectures import dropout_rates
from rapidformer_templates.models.label_use import LabelUse, check_causal
from rapidformer_templates.models.loading import build_model
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.tasks import MESSAGES, preference_metrics
from rapidformer_templates.system.workers import Workers


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of answers. Each tensor has shape (answers,).

    Attributes:
        logps: sums over the tokens of each answer.
        lengths: number of tokens of each answer.
        reference: the same sums from the reference model. Zeros if the loss needs no reference.
        whole_nll: negative log-likelihood summed over all tokens, including the prompt.
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    reference: torch.Tensor
    whole_nll: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probability per token."""
        return self.logps / self.lengths

    @property
    def ratios(self) -> torch.Tensor:
        """Log-ratio of the probabilities under the model and under the reference."""
        return self.logps - self.reference

    def halves(self) -> tuple[Answers, Answers]:
        """Split a batch of pairs into chosen and rejected answers."""
        parts = [tensor.chunk(2) for tensor in (self.logps, self.lengths, self.reference, self.whole_nll)]
        return Answers(*(chosen for chosen, _ in parts)), Answers(*(rejected for _, rejected in parts))


def answers_of(logits: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Answers:
    """Compute the log-probability of the labelled tokens in each row. ``reference`` is zeros.

    Args:
        logits: (rows, tokens, words). They may be sharded over workers.
        input_ids, mask, labels: (rows, tokens).
    """
    targets = shifted_left(torch.where(mask.bool(), input_ids, IGNORED))
    nll = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    nll = nll.float().view(targets.shape) if nll.dtype != torch.float64 else nll.view(targets.shape)
    learned = shifted_left(labels) != IGNORED
    logps = -(nll * learned).sum(1)
    return Answers(logps, learned.sum(1), torch.zeros_like(logps), nll.sum(1))


def dpo(chosen: Answers, rejected: Answers, beta: float) -> torch.Tensor:
    """Rafailov et al., 2023, equation 7."""
    return -logsigmoid(beta * (chosen.ratios - rejected.ratios))


def ipo(chosen: Answers, rejected: Answers, beta: float) -> torch.Tensor:
    """Azar et al., 2023, equation 17, with log-probabilities per token. ``beta`` is their tau."""
    margin = chosen.ratios / chosen.lengths - rejected.ratios / rejected.lengths
    return (margin - 1 / (2 * beta)) ** 2


def simpo(chosen: Answers, rejected: Answers, beta: float, gamma: float) -> torch.Tensor:
    """Meng et al., 2024, equation 6."""
    return -logsigmoid(beta * (chosen.means - rejected.means) - gamma)


def odds_ratio(chosen: Answers, rejected: Answers) -> torch.Tensor:
    """Hong et al., 2024, equation 7: the second term of the ORPO loss, before its weight."""
    return -logsigmoid(_log_odds(chosen.means) - _log_odds(rejected.means))


def _log_odds(means: torch.Tensor) -> torch.Tensor:
    """Compute log(p / (1 - p)) from log p, exact for p near 0 and near 1."""
    means = means.clamp(max=-torch.finfo(means.dtype).tiny)
    return means - torch.log(-torch.expm1(means))


def kto(
    answers: Answers, is_good: torch.Tensor, beta: float, drift: torch.Tensor, weights: tuple[float, float]
) -> torch.Tensor:
    """Ethayarajh et al., 2024, equation 8.

    Args:
        is_good: (answers,).
        drift: mean log-ratio of answers to other prompts over the global batch, at least 0.
        weights: weights of good and of bad answers.
    """
    sign = torch.where(is_good, 1.0, -1.0)
    weight = torch.where(is_good, *weights)
    return weight * (1 - torch.sigmoid(sign * (beta * (answers.ratios - drift))))


Reference = Callable[[Any], AbstractContextManager[Model]]
"""Maps the trained model to a context that yields the reference model."""


class _Preferences(ContinuesTexts):
    """Base of both tasks: reading answers, and the reward metrics of each step.

    Attributes:
        is_unpaired: each answer has its own label, good or bad, instead of being compared with another answer.
    """

    best_metric = "eval_loss"
    measures = True
    is_unpaired = False

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._sums: torch.Tensor | None = None
        self._rewards: list[tuple[float, float]] = []

    def read_data(self) -> Data:
        raw = self.read_rows()
        sets = {name: self._samples(name, part) for name, part in raw.parts().items()}
        self.bad.raise_all()
        return as_data(sets, preferences.PreferenceCollate(padding_of(self.tokenizer)["input_ids"]))

    def _samples(self, name: str, part: DataPart) -> preferences.PreferenceSamples:
        reader = ChatReader(
            self.tokenizer,
            self.seq_length,
            answers_only=True,
            bad=self.bad,
            notes=self.notes,
            learns_to_stop=self.auto_class == "AutoModelForCausalLM",
        )
        columns = self._prompt_columns(part)
        if self.is_unpaired:
            return preferences.labelled_samples(name, preferences.labelled_answers_of(part, *columns, reader), reader)
        return preferences.pair_samples(name, preferences.pairs_of(part, *columns, reader), reader)

    def _prompt_columns(self, part: DataPart) -> tuple[str | None, str | None]:
        """Return the column of prompts and the named column of tools."""
        return self.column_if_any(part, "text_column", (preferences.PROMPT,)), self.config.data.tools_column

    def build_model(self) -> PreTrainedModel:
        """Build the model without dropout unless the user sets it. Both models must see the same answer."""
        rates = {} if self.config.model.dropout is not None else dropout_rates(self.model_config, 0.0)
        return build_model(self.config, self.auto_class, self.tokenizer, **rates, **self.config_overrides())

    def count_targets(self, batch: Tensors, *, shifted: bool) -> float:
        return float(batch["counted"].sum())

    def begin_step(self, microbatches: Iterable[MicroBatch]) -> None:
        self._sums = None
        for microbatch in microbatches:
            if microbatch.idle:
                microbatch.batch["counted"].zero_()

    def _record_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor, counts: torch.Tensor) -> None:
        is_chosen = torch.arange(2 * len(chosen), device=chosen.device) < len(chosen)
        self._record_rewards(torch.cat([chosen, rejected]), is_chosen, counts.repeat(2))
        if not torch.is_grad_enabled():
            self._rewards = list(zip(chosen.tolist(), rejected.tolist(), strict=True))
            return
        assert self._sums is not None
        self._sums[4] += ((chosen > rejected) * counts).sum()

    def _record_rewards(self, rewards: torch.Tensor, is_good: torch.Tensor, counts_of: torch.Tensor) -> None:
        """Record the rewards of a batch for the metrics of this step or of the evaluation."""
        rewards = rewards.detach()
        if not torch.is_grad_enabled():
            self._rewards = list(zip(rewards.tolist(), is_good.tolist(), strict=True))
            return
        sums = [(rewards * counts_of * of).sum() for of in (is_good, ~is_good)]
        counts = [(counts_of * of).sum() for of in (is_good, ~is_good)]
        totals = torch.stack([sums[0], counts[0], sums[1], counts[1], torch.zeros_like(sums[0])]).double()
        self._sums = totals if self._sums is None else self._sums + totals

    def measured(self, workers: Workers) -> dict[str, torch.Tensor]:
        sums = torch.zeros(5, dtype=torch.float64, device=workers.device)
        if self._sums is not None and workers.is_replica_leader:
            sums = self._sums
        good, goods, bad, bads, right = workers.sum_tensor(sums.clone())
        chosen, rejected = good / goods, bad / bads
        metrics = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
        return metrics if self.is_unpaired else metrics | {"rewards/accuracies": right / goods}

    def predict(self, outputs: ModelOutputs, batch: Tensors) -> tuple[list[tuple[float, float]], list[None]]:
        """Return the rewards of each sample. They come from the last loss, which was computed for this batch."""
        rewards, self._rewards = self._rewards, []
        return rewards, [None] * len(rewards)

    def compute_metrics(self, predictions: list[tuple[float, float]], references: list[None]) -> dict[str, float]:
        """Return mean rewards. The mean of a kind of answer that the data do not contain is NaN."""
        rewards = np.asarray(predictions, dtype=np.float64).reshape(-1, 2)
        if self.is_unpaired:
            good = rewards[:, 1] > 0
            chosen, rejected = (float(rewards[of, 0].mean()) if of.any() else math.nan for of in (good, ~good))
        else:
            chosen, rejected = rewards.mean(axis=0).tolist() if len(rewards) else (0.0, 0.0)
        accuracy = float((rewards[:, 0] > rewards[:, 1]).mean()) if len(rewards) else 0.0
        values = (chosen, rejected, chosen - rejected, accuracy)
        return dict(zip(preference_metrics(is_unpaired=self.is_unpaired), values, strict=False))


class Preference(_Preferences):
    """Learns from preferred answers, or from answers labelled good or bad (``--preference-loss kto``).

    DPO, IPO and KTO compare the model with a reference. The reference is the model without its adapters, a frozen copy,
    or log-probabilities that were computed once. ORPO and SimPO need no reference.
    """

    name = "preference"
    auto_class = "AutoModelForCausalLM"
    # The run sets both. See run/reference.py.
    reference: Reference | None = None
    is_tried = False  # set while transforms inspect the loss, whose value does not matter to them

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._loss = config.training.preference_loss
        self.is_unpaired = self._loss == "kto"
        self.needs_reference = self._loss in ("dpo", "ipo", "kto")
        self.needs_prepass = self._loss in ("kto", "orpo")

    def for_other_data(self, config: RunConfig) -> Task:
        other = super().for_other_data(config)
        assert isinstance(other, Preference)
        other.reference = self.reference
        return other

    def use_labels(self, use: LabelUse) -> bool:
        check_causal(use, "--task preference")
        return True

    def prepass(self, evaluate: EvalBatch, microbatches: Iterable[MicroBatch], workers: Workers) -> None:
        """Compute KTO's drift, or ORPO's pairs per token, over the whole global batch."""
        # Summed on the device, because the host need not know them.
        totals = torch.zeros(2, dtype=torch.float64, device=workers.device)

        def log_ratios(model: Model, batch: Tensors) -> tuple[torch.Tensor, int]:
            ratios = self._answers(model, batch).ratios
            return ratios.sum(), len(ratios)

        for microbatch in microbatches:
            batch = microbatch.batch
            number: torch.Tensor | int
            if self.is_unpaired:
                value, _ = evaluate(_mismatched_answers(microbatch), log_ratios)
                number = len(microbatch.samples)
            else:
                chosen = batch["attention_mask"][: len(batch["counted"])]
                value, number = chosen[:, 1:].sum(), batch["counted"].sum()
            if not microbatch.idle and workers.is_replica_leader:
                totals[0] += value
                totals[1] += number
        total, count = workers.sum_tensor(totals)
        self._drift = (total / count).clamp(min=0.0) if self.is_unpaired else count / total.clamp(min=1.0)

    _drift = torch.zeros(())  # drift for KTO, pairs per token for ORPO

    def reference_of(self, evaluate: EvalBatch, microbatch: MicroBatch) -> list[list[float]]:
        """Return the reference's log-probabilities of the two rows of each sample.

        The list is empty on workers that do not see the outputs.
        """
        outputs: list[float] = []

        def note_reference(model: Model, batch: Tensors) -> tuple[torch.Tensor, int]:
            logps = self._reference_logps(model, batch)
            outputs.extend(logps.tolist())
            return logps.sum(), len(logps)

        for part in [microbatch, _mismatched_answers(microbatch)] if self.is_unpaired else [microbatch]:
            evaluate(part, note_reference)
        count = len(microbatch.samples)
        return [[outputs[i], outputs[count + i]] for i in range(count)] if outputs else []

    def compute_loss(self, model: Model, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        training, counts = self.config.training, batch["counted"]
        answers, beta = self._answers(model, batch), training.preference_beta
        if self._loss == "kto":
            weights = training.kto_desirable_weight, training.kto_undesirable_weight
            each = kto(answers, batch["is_good"], beta, self._drift, weights)
            self._record_rewards(beta * answers.ratios, batch["is_good"], counts)
            return (each * counts).sum(), counts.sum()
        chosen, rejected = answers.halves()
        if self._loss == "orpo":
            each = chosen.whole_nll * self._drift + beta * odds_ratio(chosen, rejected)
        elif self._loss == "simpo":
            each = simpo(chosen, rejected, beta, training.simpo_gamma)
        else:
            each = {"dpo": dpo, "ipo": ipo}[self._loss](chosen, rejected, beta)
        scores = [half.ratios if self.needs_reference else half.means for half in (chosen, rejected)]
        self._record_pairs(beta * scores[0].detach(), beta * scores[1].detach(), counts)
        return (each * counts).sum(), counts.sum()

    def _answers(self, model: Model, batch: Tensors) -> Answers:
        """Return log-probabilities from the model and, if the loss needs them, from the reference."""
        # Run the reference first. Recorders and the backward must see the trained model's forward last.
        reference = self._reference_logps(model, batch) if self.needs_reference else None
        answers = self._logps(model, batch)
        return answers if reference is None else Answers(answers.logps, answers.lengths, reference, answers.whole_nll)

    def _logps(self, model: Model, batch: Tensors) -> Answers:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        return answers_of(model(input_ids=ids, attention_mask=mask).logits, ids, mask, batch["labels"])

    @torch.no_grad()
    def _reference_logps(self, model: Model, batch: Tensors) -> torch.Tensor:
        if "reference_logps" in batch:
            return batch["reference_logps"]
        if "reference_chosen_logps" in batch:
            return torch.cat([batch["reference_chosen_logps"], batch["reference_rejected_logps"]])
        if self.is_tried:
            return torch.zeros(len(batch["input_ids"]), device=batch["input_ids"].device)
        assert self.reference is not None, "the reference was not provided"
        with self.reference(model) as other:
            return self._logps(other, batch).logps


def _mismatched_answers(microbatch: MicroBatch) -> MicroBatch:
    """Return the mismatched answers (to other prompts) as a separate micro batch."""
    prefix, batch = "kl_", microbatch.batch
    fields = {name.removeprefix(prefix): tensor for name, tensor in batch.items() if name.startswith(prefix)}
    if "reference_kl_logps" in batch:
        fields["reference_logps"] = batch["reference_kl_logps"]
    count = 0 if microbatch.idle else len(microbatch.samples)
    return MicroBatch(fields, microbatch.samples, targets=count, idle=microbatch.idle)


class Reward(_Preferences):
    """Learns to score answers so that chosen ones score higher: a classifier with one output (Bradley and Terry)."""

    name = "reward"
    auto_class = "AutoModelForSequenceClassification"

    @property
    def chat_column(self) -> str:
        return self.config.data.text_column or MESSAGES

    def config_overrides(self) -> dict[str, object]:
        return {"num_labels": 1}

    def use_labels(self, use: LabelUse) -> bool:
        return False

    def compute_loss(self, model: Model, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].float()
        chosen, rejected = scores.chunk(2)
        self._record_pairs(chosen.detach(), rejected.detach(), batch["counted"])
        # The negative log-likelihood of the choice (Bradley and Terry).
        return (-logsigmoid(chosen - rejected) * batch["counted"]).sum(), batch["counted"].sum()

    @classmethod
    def planned_batch(cls, rows: int, tokens: int) -> dict[str, torch.Tensor]:
        return {**super().planned_batch(rows, tokens), "labels": torch.zeros(rows, dtype=torch.long)}

    def inputs(self, part: DataPart) -> Inputs:
        """Tokenize answers with their prompts. Each row has one answer, or a chosen and a rejected one."""
        reader = ChatReader(self.tokenizer, self.seq_length, answers_only=True, bad=BadLines(advice=PREDICTION_ADVICE))
        if preferences.has_pairs(part):
            pairs = preferences.pairs_of(part, *self._prompt_columns(part), reader)
            answers = [[answer.rendered for answer in pair] for pair in pairs]
        else:
            columns = find_columns(part, self.config.data)
            answers = [[rendered] for rendered in reader.rendered(part, columns)]
        reader.bad.raise_all()
        tokens = [[encoded.ids for encoded in reader.encoded(row)] for row in answers]
        return Inputs(tokens, np.asarray([max(map(len, row)) for row in tokens]))

    def records(self, model: TrainedModel, rows: Sequence[Sample], generation: Generation) -> list[Record]:
        outputs, _ = self.outputs(model, [{"input_ids": ids} for row in rows for ids in row])
        scores = iter(map(round_score, outputs.logits[:, 0].float().tolist()))
        names = ("chosen", "rejected")
        return [{"score": next(scores)} if len(row) == 1 else {name: next(scores) for name in names} for row in rows]
