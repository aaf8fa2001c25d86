"""Small models of every architecture of transformers, trained in each layout and compared with one process."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

from rapidformer_templates import Data
from tests.support import parity
from tests.support.architectures import SIZES, tiny
from tests.support.jobs import CausalJob
from tests.support.worker_pool import Failure, outcome, outcomes_in_workers

FLAGS = "--train-iters 3 --lr 1e-3 --weight-decay 0.1 --clip-grad 0.5 --no-export-model --global-batch-size 8"

OBJECTIVES: dict[str, tuple[Any, Any]] = {
    "causal": (transformers.AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": (transformers.AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq": (transformers.AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
}
"""By objective: the auto class, and the architectures that it knows."""


@dataclass(frozen=True)
class Layout:
    """A layout to compare with one process.

    Attributes:
        workers: the number of workers.
        flags: the switches.
        micro_batch: samples per micro batch, in the run of one process as well: some models depend on the padding.
    """

    workers: int
    flags: str
    micro_batch: int = 8


LAYOUTS = {
    "recomputation": Layout(1, "--checkpoint-activations"),
    "fused loss": Layout(1, "--fused-linear-cross-entropy"),
    "FSDP": Layout(2, "--fsdp-memory-optimization", micro_batch=4),
    "tensor": Layout(2, "--tensor-model-parallel-size 2"),
    "sequence": Layout(2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline": Layout(2, "--pipeline-model-parallel-size 2", micro_batch=4),
    "context": Layout(2, "--context-parallel-size 2"),
}

ROUNDING = 5e-5
"""The largest relative difference that sums in another order explain in fp32."""

REFUSALS = {"ModelError", "Refused", "ConfigError", "RapidformerError", "AbsentAttribute"}
"""Errors that say what a switch does not support."""


@dataclass(frozen=True)
class Result:
    """How a run compares with one process.

    Attributes:
        state: "different" and "failed" are bugs.
        text: how far apart they are, the reason of the refusal, or the stack trace.
    """

    state: Literal["equal", "refused", "different", "failed"]
    text: str = ""


class SmallJob(CausalJob):
    """Trains a small model of an architecture, with padded batches."""

    architecture, objective = "", "causal"
    pads = True

    def make(self) -> torch.nn.Module:
        model: torch.nn.Module = built(self.architecture, self.objective).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model

    def build_data(self) -> Data:
        data = super().build_data()
        short = [sample for sample in data.train or () if len(sample["input_ids"]) <= 24]
        for sample in short:
            sample["input_ids"] = sample["input_ids"] % (SIZES["vocab_size"] - 3) + 3
            sample["labels"] = np.where(sample["labels"] == -100, -100, sample["input_ids"])
        if self.pads:
            return Data(train=short, collate=data.collate)
        alike = [{name: values[:8] for name, values in s.items() if name != "label"} for s in short]
        return Data(train=[sample for sample in alike if len(sample["input_ids"]) == 8])


def every() -> Iterator[tuple[str, str]]:
    """Each architecture with its objective."""
    for objective, (_, names) in OBJECTIVES.items():
        yield from ((name, objective) for name in sorted(names))


@cache
def _model(architecture: str, objective: str) -> Any:
    return tiny(architecture, OBJECTIVES[objective][0], blocks=4)


def built(architecture: str, objective: str) -> Any:
    """A new small model. The test is skipped if transformers cannot build one."""
    return copy.deepcopy(_model(architecture, objective))


def train(workers: Any, architecture: str, objective: str, flags: str, pads: bool = True) -> parity.Trained:
    """Train a small model of an architecture."""
    members = {"architecture": architecture, "objective": objective, "pads": pads}
    return parity.trained(type("SmallJob", (SmallJob,), members)([*f"{FLAGS} {flags}".split()]))


@cache
def alone(architecture: str, objective: str, micro_batch: int) -> Any:
    """Return the run of one process, or its failure."""
    return outcome(train, None, architecture, objective, f"--micro-batch-size {micro_batch}")


def compared(architecture: str, objective: str, name: str) -> Result:
    """Train an architecture in a layout and compare its losses and gradient norms with one process."""
    layout = LAYOUTS[name]
    built(architecture, objective)
    wanted = alone(architecture, objective, layout.micro_batch)
    if isinstance(wanted, Failure):
        pytest.skip(f"one process: {wanted.kind}: {wanted.text}")
    job = (architecture, objective, f"--micro-batch-size {layout.micro_batch} {layout.flags}")
    found = [outcome(train, None, *job)] if layout.workers == 1 else outcomes_in_workers(layout.workers, train, *job)
    failures = [each for each in found if isinstance(each, Failure)]
    if failures:
        # If one worker refuses in the middle of a step, the others wait for it.
        refusals = [failure for failure in failures if failure.kind in REFUSALS]
        if refusals and all(failure.kind in {*REFUSALS, "TimeoutError"} for failure in failures):
            return Result("refused", refusals[0].text)
        return Result("failed", "\n".join(f"{failure.kind}: {failure.text}\n{failure.trace}" for failure in failures))
    curve, expected = torch.tensor(found[0]["curve"]), torch.tensor(wanted["curve"])
    apart = float(((curve - expected).abs() / expected.abs().clamp(min=1e-3)).max())
    return Result("equal" if apart <= ROUNDING else "different", f"{apart:.1e}")


def forget() -> None:
    """Free the models and the runs of one process."""
    _model.cache_clear()
    alone.cache_clear()
