"""Batches that reach different parameters on each worker, or none: every engine does what one process does.

If an engine cannot do so, it refuses and names the parameters.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rapidformer_templates.errors import RapidformerError
from tests.support import parallel_jobs, parity
from tests.support.jobs import OTHERS, CausalJob, ClassJob
from tests.support.parity import reference, train, trained
from tests.support.selection import by_default, selected
from tests.support.worker_pool import Failure, outcomes_in_workers, run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytest.importorskip("fairscale", reason="needs fairscale: pip install 'rapidformer_templates[fairscale]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

STEPS = "--clip-grad 0.1 --weight-decay 0.5 --no-export-model --lr-decay-style constant"
DIVIDED = ("tensor", "pipeline", "context")
FLAGS = {
    **parity.ENGINES,
    "fsdp-whole": "--fsdp-memory-optimization --no-fsdp-reshard-after-forward",
    "fsdp-checkpointed": "--fsdp-memory-optimization --checkpoint-activations",
}
ENGINES = [engine for engine in FLAGS if engine not in DIVIDED]
ZERO = ("zero-1", "zero-2", "zero-3")


class TwoHeads(torch.nn.Module):
    """A classifier with one head for each of two tasks. The first token of a sample selects the task."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.second = torch.nn.Linear(16, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        pooled = self.inner.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        logits = pooled.new_zeros(len(pooled), 3)
        for head, rows in ((self.inner.classifier, ~second), (self.second, second)):
            if rows.any():
                logits = logits.index_add(0, rows.nonzero().flatten(), head(pooled[rows]))
        return logits


class HeadsJob(ClassJob):
    """A quarter of the samples use a second head."""

    begins = 0

    def make(self) -> torch.nn.Module:
        return TwoHeads(super().make())

    def second(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        asked = batch["input_ids"][:, 0] % 4 == 0
        return asked & (len(getattr(self, "curve", [])) >= self.begins)

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        second = self.second(batch)
        if torch.is_grad_enabled():
            self.tasks = [*getattr(self, "tasks", []), set(second.tolist())]
        return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"], second), batch["labels"])


class LateJob(HeadsJob):
    """Samples use the second head from the third step on."""

    begins = 2


class Branch(torch.nn.Module):
    """A layer in the middle that only some samples use."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.sometimes = torch.nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        pooled = self.inner.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        if second.any():
            pooled = pooled + self.sometimes(pooled).tanh() * second.unsqueeze(-1)
        return self.inner.classifier(pooled)


class BranchJob(HeadsJob):
    def make(self) -> torch.nn.Module:
        return Branch(super(HeadsJob, self).make())


class Skipping(torch.nn.Module):
    """Skips its second block if ``skips`` is set."""

    skips = False

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        bert = self.inner.bert
        hidden = bert.embeddings(input_ids)
        for place, block in enumerate(bert.encoder.layer):
            if place == 0 or not self.skips:
                hidden = block(hidden)
        return self.inner.classifier(bert.pooler(hidden))


class SkipJob(ClassJob):
    """From some micro batch on, some workers skip a block."""

    def make(self) -> torch.nn.Module:
        return Skipping(super().make())

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        whole = getattr(model, "module", model)
        whole.skips = torch.distributed.get_rank() in self.skipping and len(getattr(self, "curve", [])) >= self.begins
        return F.cross_entropy(model(batch["input_ids"]), batch["labels"])


class LossAlone(torch.nn.Module):
    """Returns only its loss, which is 0/0 if no label counts. The values behind it are infinite in places."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        never = torch.arange(logits.shape[-1]) < 2
        logits, labels = logits.masked_fill(never, -torch.inf), labels[:, 1:]
        counts = labels != -100
        chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=2).unsqueeze(-1)).squeeze(-1)
        return -(chosen * counts).sum() / counts.sum()


class NothingJob(CausalJob):
    """Micro batches without a target, with a model that returns only its loss."""

    def make(self) -> torch.nn.Module:
        return LossAlone(super().make())

    def count_targets(self, batch: Any) -> float:
        return int((batch["labels"][:, 1:] != -100).sum())

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.tasks = [*getattr(self, "tasks", []), {bool((batch["labels"][:, 1:] != -100).any())}]
        return model(**batch)


PLAIN: Any = parallel_jobs.JOBS["gpt2-4-tied"]
"""Micro batches without a target, with a model that tensor and pipeline parallelism divide."""


class UnusedJob(PLAIN):
    """A part of the model outside its blocks does not contribute to the loss."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        model.unused = torch.nn.Linear(16, 16)
        return model


JOBS = {
    "heads": HeadsJob, "late": LateJob, "branch": BranchJob, "nothing": NothingJob, "idle": NothingJob, "plain": PLAIN,
    "unused": UnusedJob,
}  # fmt: skip
OTHERS |= JOBS  # type: ignore[arg-type]
BY_STEPS = f"--train-iters 3 --global-batch-size 8 {STEPS}"
# The last batch of the epoch leaves one worker without a sample.
ONE_LEFT = f"--epochs 1 --global-batch-size 30 {STEPS}"
LENGTH = dict.fromkeys(JOBS, BY_STEPS) | {"idle": ONE_LEFT}
MICRO = {"heads": 4, "late": 2, "branch": 1, "nothing": 1, "idle": 15, "plain": 1, "unused": 2}
WORKERS_DIFFER = ["heads", "late", "branch", "nothing"]
ALIKE = ("nothing", "idle")  # in the parameters that they reach
CASES = [
    (job, engine)
    for job in JOBS
    for engine in ENGINES
    if job in ALIKE or (job not in ("plain", "unused") and engine != "zero-3")
]
CASES.remove(("nothing", "zero-3"))  # it waits for gradients, and 0/0 in the model's own loss has none
CASES += [("plain", engine) for engine in ("tensor", "pipeline", "zero-3")]
CASES += [("unused", engine) for engine in ("distributed-optimizer", *DIVIDED)]
WORKS = {f"{job}-{engine}": (job, engine) for job, engine in CASES if not (job == "late" and engine in ZERO)}
SHORT = ("branch-sdp", "branch-zero-2", "branch-distributed-optimizer", "nothing-ddp", "plain-pipeline")
"""Each engine that finds out in its own way which parameters a worker has not reached."""


def _is_double(job: str, engine: str) -> bool:
    """Masked words have only rounding errors as gradients, which Adam turns into steps in fp32."""
    return job == "nothing" and engine not in ZERO


def _train_all(workers: Any, cases: list[tuple[str, str]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for job, engine in cases:
        flags = f"{LENGTH[job]} --micro-batch-size {MICRO[job]} {FLAGS[engine]}"
        kept: list[Any] = []
        with mock.patch.object(JOBS[job], "on_train_start", lambda self, kept=kept: kept.append(self)):
            try:
                found[job, engine] = train(job, _is_double(job, engine), flags)
            except RapidformerError as error:
                found[job, engine] = error
        found["tasks", job, engine] = getattr(kept[0], "tasks", []) if kept else []
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    """The runs by rank."""
    compared = [(job, "ddp") for job in selected(request, "job")]
    cases = {*(WORKS[case] for case in selected(request, "case")), *compared}
    cases |= {("late", engine) for engine in selected(request, "refusing")}
    return run_in_workers(2, _train_all, sorted(cases))


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest) -> dict[tuple[str, bool], Any]:
    chosen = [WORKS[case] for case in selected(request, "case")]
    needed = {(job, _is_double(job, engine)) for job, engine in chosen}
    return {(job, double): reference(job, double, _alone(job)) for job, double in needed}


def _alone(job: str) -> str:
    return f"{LENGTH[job]} --micro-batch-size {30 if job == 'idle' else 8}"


@pytest.mark.parametrize("case", by_default(SHORT, WORKS))
def test_engine_follows_one_process(case: str, references: Any, runs: Any) -> None:
    job, engine = WORKS[case]
    double = _is_double(job, engine)
    expected = references[job, double]
    for run in runs:
        actual = run[job, engine]
        assert not isinstance(actual, Exception), actual
        close = {"rtol": 1e-10, "atol": 1e-10} if double else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]), **close)
        assert actual["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            # Adam turns rounding errors into steps if a gradient is zero, as for the bias of keys: 0.5 % of a step,
            # and 2 % where DeepSpeed cannot compute in fp64.
            atol = 2e-5 if job == "nothing" else 5e-6
            torch.testing.assert_close(actual["weights"][name], weight, **close | ({} if double else {"atol": atol}))


@pytest.mark.parametrize("job", by_default(["nothing"], WORKERS_DIFFER))
def test_the_workers_differ(job: str, runs: Any) -> None:
    """Otherwise it would be easy to agree."""
    assert any(mine != theirs for mine, theirs in zip(*(run["tasks", job, "ddp"] for run in runs), strict=True))


@pytest.mark.parametrize("refusing", by_default(["zero-2"], ["zero-1", "zero-2"]))
def test_zero_refuses_what_no_worker_reaches(refusing: str, runs: Any) -> None:
    for run in runs:
        error = run["late", refusing]
        assert isinstance(error, RapidformerError)
        assert error.message == "the loss does not reach 2 parameters: second.weight, second.bias"


class AveragingJob(LateJob):
    """The reference for averages: torch averages all parameters after each step."""

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        if step == 1:
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        self.average.update_parameters(self.model)


AVERAGED = [name for name in ENGINES if name not in ZERO]  # ZeRO refuses a parameter that no worker reaches


def _train_averages(workers: Any, names: list[str]) -> dict[str, Any]:
    flags = f"{BY_STEPS} --ema-decay 0.7 --micro-batch-size 2"
    return {name: train("late", False, f"{flags} {FLAGS[name]}")["averages"] for name in names}


@pytest.fixture(scope="module")
def average() -> dict[str, torch.Tensor]:
    """The averaged weights of one process."""
    job = AveragingJob([*f"{BY_STEPS} --micro-batch-size 8".split(), "--lr", "1e-3"])
    trained(job)
    return dict(job.average.module.state_dict())


@pytest.fixture(scope="module")
def averages(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The averaged weights by rank and engine."""
    return run_in_workers(2, _train_averages, selected(request, "averaged"))


@pytest.mark.longer
@pytest.mark.parametrize("averaged", AVERAGED)
def test_a_parameter_that_a_step_does_not_reach_is_averaged_too(
    averaged: str, average: dict[str, torch.Tensor], averages: Any
) -> None:
    """The second head is first updated in the third step, so its average starts with the weight before."""
    for found in averages:
        for name, weight in average.items():
            torch.testing.assert_close(found[averaged][name], weight.double(), rtol=1e-5, atol=5e-6, msg=name)


def _skip(workers: Any, flags: str, begins: int, skipping: tuple[int, ...]) -> None:
    job = SkipJob([*f"{BY_STEPS} --micro-batch-size 2 {flags}".split(), "--lr", "1e-3"])
    job.begins, job.skipping = begins, skipping
    job.fit()


LEFT_OUT = [(engine, begins, ranks) for begins in (2, 0) for ranks in ((0, 1), (1,)) for engine in ("zero-3", "fsdp")]
"""The engine, the step from which batches skip a block, and the ranks whose batches do."""


@pytest.mark.parametrize(("engine", "begins", "skipping"), by_default([LEFT_OUT[5]], LEFT_OUT))
def test_engines_that_gather_blocks_refuse_a_batch_that_leaves_one_out(
    engine: str, begins: int, skipping: tuple[int, ...]
) -> None:
    """A single worker would gather other parameters than the rest. At first all workers see it, later it alone does."""
    ended = outcomes_in_workers(2, _skip, FLAGS[engine], begins, skipping)
    for rank in skipping if begins else (0, 1):
        assert isinstance(ended[rank], Failure), ended
        assert ended[rank].kind == "RapidformerError", ended
        what = "these parameters when others do" if begins or skipping == (1,) else "all parameters"
        assert f"a micro batch does not use {what}: inner.bert.encoder.layer.1." in ended[rank].text
