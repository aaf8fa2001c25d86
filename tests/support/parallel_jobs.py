"""Jobs with enough blocks for a pipeline, built like those of :mod:`tests.support.jobs`."""

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from tests.support.jobs import OTHERS, VOCABULARY, _Job
from tests.support.lines import Died
from tests.support.parity import train

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "max_position_embeddings": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _gpt2(layers: int, tied: bool) -> torch.nn.Module:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": layers, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, tie_word_embeddings=tied))


def _bert(layers: int, tied: bool) -> torch.nn.Module:
    sizes = {**SIZES, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **NO_DROPOUT, tie_word_embeddings=tied))


def _neox(layers: int, tied: bool) -> torch.nn.Module:
    sizes = {**SIZES, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, **no_dropout, tie_word_embeddings=tied))


def _llama(layers: int, tied: bool) -> torch.nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {**SIZES, "num_hidden_layers": layers, "intermediate_size": 32, **heads}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=tied))


FAMILIES = {"gpt2": _gpt2, "bert": _bert, "neox": _neox, "llama": _llama}


def _job(family: str, layers: int, tied: bool) -> type[_Job]:
    make = FAMILIES[family]
    return type(family, (_Job,), {"shift": int(family != "bert"), "make": lambda self: make(layers, tied)})


JOBS = {
    f"{family}-{layers}-{'tied' if tied else 'untied'}": _job(family, layers, tied)
    for family in FAMILIES
    for layers in (4, 8)
    for tied in (False, True)
}


class Frozen(JOBS["bert-8-tied"]):  # type: ignore[misc]
    """The embeddings, the first stage and one block of the second stage are frozen."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        layers = model.bert.encoder.layer
        for part in (model.bert.embeddings, *layers[:4], layers[6]):
            part.requires_grad_(False)
        return model


class Unreached(JOBS["gpt2-4-tied"]):  # type: ignore[misc]
    """Has parameters that no loss reaches.

    Each stage of a pipeline has them: the first one after the embedding, the last one before the tied head.
    """

    def make(self) -> torch.nn.Module:
        model = super().make()
        model.transformer.spare = torch.nn.Linear(4, 4)
        return model


class OwnLoss(JOBS["gpt2-4-tied"]):  # type: ignore[misc]
    """The loss has label smoothing and a second term from the last hidden states.

    The hook returns the sum over the targets and their number.
    """

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        output = model(**inputs, output_hidden_states=True)
        labels = batch["labels"][:, 1:]
        losses = torch.nn.functional.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="none"
        )
        states = (output.hidden_states[-1] + output.hidden_states[-2])[:, :-1]
        count = int((labels != -100).sum())
        return losses.sum() + 0.1 * (states.square().mean(-1) * (labels != -100)).sum(), count


class EndsInTanh(nn.Module):
    """A block whose last operation saves its output for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden + self.linear(hidden))


class TanhModel(nn.Module):
    """Four ``EndsInTanh`` blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(EndsInTanh() for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return SimpleNamespace(logits=self.head(hidden * attention_mask[..., None]))


class Tanh(_Job):
    """The graph of a stage saves the same values that the stage has sent."""

    def make(self) -> nn.Module:
        return TanhModel()


class OnceTwice(JOBS["gpt2-4-tied"]):  # type: ignore[misc]
    """Calls the model twice."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        return super().compute_loss(model, batch) + super().compute_loss(model, batch)


OTHERS |= JOBS | {"frozen-8": Frozen, "unreached-4": Unreached, "own-loss": OwnLoss, "tanh-4": Tanh, "twice": OnceTwice}


def train_all(workers: Any, cases: dict[str, tuple[str, bool, str]]) -> dict[str, Any]:
    """Train the cases ``{name: (job, double, flags)}``."""
    return {name: train(*case) for name, case in cases.items()}


def begin(job: str, folder: str, flags: str, dies_after: int | None = None) -> list[tuple[float, float]]:
    """Train in this group of workers and return the curve. The run can die after a step."""
    template = OTHERS[job]([*flags.split(), "--save", folder])
    template.dies_after = dies_after
    with contextlib.suppress(Died):
        template.fit()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # no worker may continue in a folder that another one still uses
    return template.curve


def resumed(
    workers: Any, job: str, folder: str, flags: str, chain: Sequence[tuple[str, int | None]]
) -> list[tuple[float, float]]:
    """Return the curve of a run that dies and continues in other layouts.

    Args:
        chain: more flags of each part, and the step after which it dies. The next part begins one step before that.
    """
    curve: list[tuple[float, float]] = []
    for more, dies_after in chain:
        curve = [*curve[:-1], *begin(job, folder, f"{flags} {more}", dies_after)]
    return curve
