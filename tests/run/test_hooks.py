"""Errors about unusable return values of hooks name the hook, without a stack trace of the library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from rapidformer_templates import Data, Finetuner
from rapidformer_templates.errors import ConfigError, DataError, ModelError, RapidformerError
from rapidformer_templates.system.launch import port_problem, run_workers
from tests.support.jobs import CausalJob
from tests.support.lines import FLAGS, Line
from tests.support.parity import trained

SAMPLES = [{"x": np.ones(1, np.float32), "y": np.ones(1, np.float32)}] * 4
RUN = [*FLAGS, "--epochs", "1", "--no-save"]


class Stream(IterableDataset[Any]):
    """A data set that can only be iterated."""

    def __iter__(self) -> Any:
        return iter(SAMPLES)


def fails(hook: str, returned: Any, error: type[RapidformerError] = RapidformerError) -> RapidformerError:
    """Return the error of a run whose ``hook`` returns a wrong value."""
    job = type("Job", (Line,), {hook: lambda self, *arguments: returned})(RUN)
    with pytest.raises(error) as caught:
        job.fit()
    assert hook in f"{caught.value.where} {caught.value.message}"
    return caught.value


@pytest.mark.parametrize(
    ("returned", "message", "hint"),
    [
        (SAMPLES, "build_data returned a list", "return Data(train=samples"),
        (None, "build_data returned None", "return Data(train=samples"),
        (DataLoader(SAMPLES), "build_data returned a DataLoader", "Data(train=loader.dataset"),
        (Data(train=DataLoader(SAMPLES)), "the train samples of build_data are a DataLoader", "integer indexing"),
        (Data(train=iter(SAMPLES)), "the train samples of build_data are a list_iterator", "integer indexing"),
        (Data(train=Stream()), "the train samples of build_data are a Stream", "integer indexing"),
        (Data(train={"x": [1.0]}), "the train samples of build_data are a dict", "integer indexing"),
        (Data(train=SAMPLES, valid=Stream()), "the valid samples of build_data are a Stream", "integer indexing"),
        (Data(train=SAMPLES, collate="pad"), "collate of build_data is a str, not a function", ""),
        (Data(train=SAMPLES, collate=lambda samples: None), "collate returned None", "return the batch"),
        (
            Data(train=[{"x": np.ones(i + 1)} for i in range(4)]),
            "samples cannot be combined into a batch",
            "collate function",
        ),
        (Data(train=[{"x": None}] * 4), "samples cannot be combined into a batch", "collate function"),
    ],
)
def test_data(returned: Any, message: str, hint: str) -> None:
    job = type("Job", (Line,), {"build_data": lambda self: returned})(RUN)
    with pytest.raises(DataError) as caught:
        job.fit()
    assert caught.value.message.startswith(message)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(("returned", "kind"), [(None, "None"), ((Line, None), "a tuple"), (Line, "the class Line")])
def test_model(returned: Any, kind: str) -> None:
    assert fails("build_model", returned, ModelError).message == f"build_model returned {kind}"


def test_optimizer_and_schedule() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([parameter])
    told = fails("build_optimizer", optimizer)
    assert told.message == "build_optimizer returned an AdamW"
    assert "OptimizerSpec(torch.optim.AdamW" in str(told.hint)
    later = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert fails("build_scheduler", later).message == "build_scheduler returned a StepLR"
    told = fails("build_scheduler", lambda step: None)
    assert told.message == "the schedule's share of the first step is None"
    assert fails("build_optimizer", torch.optim.AdamW).message == "build_optimizer returned the class AdamW"
    kind = torch.optim.lr_scheduler.CosineAnnealingLR
    assert fails("build_scheduler", kind).message == "build_scheduler returned the class CosineAnnealingLR"


def test_an_optimizer_of_the_models_parameters_is_refused_without_a_stack() -> None:
    job = type("Job", (Line,), {"build_optimizer": lambda self: torch.optim.AdamW(self.model.parameters())})(RUN)
    with pytest.raises(RapidformerError, match="build_optimizer returned an AdamW") as caught:
        job.fit()
    assert "OptimizerSpec(torch.optim.AdamW" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("returned", "what"), [(None, "None"), ("4", "a str"), (-1, "-1"), (torch.ones(2), "a Tensor")]
)
def test_count(returned: Any, what: str) -> None:
    assert fails("count_targets", returned).message == f"count_targets returned {what}"


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (None, "NoneType"),
        (0.5, "float"),
        ((torch.ones(()), 4, {}), "tuple"),
        ((None, 4), "tuple"),
        ((torch.ones(2), 4), "a tensor of shape (2,)"),
    ],
    ids=str,
)
def test_loss(returned: Any, what: str) -> None:
    assert fails("compute_loss", returned).message == f"compute_loss returned {what}"


class WithOutputs(CausalJob):
    """Returns what transformers' ``compute_loss`` returns with ``return_outputs``."""

    def compute_loss(self, model: Any, batch: Any) -> Any:
        outputs = model(**batch)
        return outputs.loss, outputs


class WithLogits(CausalJob):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        outputs = model(**batch)
        return outputs.loss, outputs.logits


@pytest.mark.slow
@pytest.mark.parametrize("job", [WithOutputs, WithLogits])
def test_the_first_of_loss_and_outputs_is_the_mean_loss(job: type[CausalJob]) -> None:
    flags = "--train-iters 2 --lr 1e-2 --global-batch-size 8 --micro-batch-size 2 --eval-interval 1"
    found, wanted = trained(job(flags.split())), trained(CausalJob(flags.split()))
    assert found["curve"] == wanted["curve"]
    assert found["evaluations"] == wanted["evaluations"]


def test_a_detached_loss_is_refused() -> None:
    error = fails("compute_loss", torch.ones(()))
    assert error.message == "compute_loss returned a loss that does not depend on the trained parameters"
    assert ".detach()" in str(error.hint)


@pytest.mark.parametrize(
    ("hook", "returned", "message"),
    [
        ("read_outputs", None, "read_outputs returned None"),
        ("read_outputs", [1, 2, 3], "read_outputs returned a list"),
        ("read_outputs", ([1], [1]), "read_outputs returned 1 predictions and 1 references for a batch of 4 samples"),
        ("compute_metrics", 0.5, "compute_metrics returned a float"),
        ("compute_metrics", {"accuracy": [0.5, 0.7]}, "compute_metrics returned a list as accuracy"),
        ("compute_metrics", {"accuracy": None}, "compute_metrics returned None as accuracy"),
    ],
)
def test_evaluation(hook: str, returned: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "build_data", lambda self: Data(train=SAMPLES, valid=SAMPLES))
    assert fails(hook, returned).message == message


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification"])
def test_the_default_model_of_labels_needs_the_task_s_data(task: str) -> None:
    class Own(Finetuner):
        def build_data(self) -> Data:
            return Data(train=SAMPLES)

    sizes = "--model-type bert --num-layers 1 --hidden-size 8 --num-attention-heads 1 --max-position-embeddings 8"
    with pytest.raises(ModelError, match="has a head for the labels that the task's own data name") as caught:
        Own(["--task", task, *sizes.split(), *RUN]).fit()
    assert "override build_model() as well" in str(caught.value.hint)


@pytest.mark.parametrize("port", [0, 65536, 80000])
def test_a_port_that_there_is_not(port: int) -> None:
    with pytest.raises(ConfigError, match="--master-port must be at"):
        Line([*RUN, "--master-port", str(port)])


def test_a_port_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("socket.socket.bind", refused, raising=False)
    assert port_problem(80) == "port 80 is reserved for the administrator of this machine"
    with pytest.raises(ConfigError, match="port 80 is reserved"):
        run_workers(["true"], 2, 80)
