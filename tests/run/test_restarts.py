"""``--min-workers``: random numbers independent of the number of workers, and restarts after a worker is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rapidformer_templates.errors import ConfigError, RapidformerError, ReportedError, WorkerFailed
from rapidformer_templates.run import restarts
from rapidformer_templates.run.folder import RunFolder, read_metrics
from rapidformer_templates.run.restarts import Flags, run_with_restarts, worker_numbers
from rapidformer_templates.system.processes import Failure
from rapidformer_templates.system.workers import Workers
from tests.support.dropout_runs import DropoutJob
from tests.support.parity import trained
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

ROOT = Path(__file__).resolve().parents[2]
BATCH = "--micro-batch-size 2 --global-batch-size 12 --lr 1e-3 --log-interval 1 --device cpu"
STEPS = f"{BATCH} --train-iters 3"


def dropout_losses(workers: Workers | None, flags: str, layers: int = 2) -> list[float]:
    job = DropoutJob(flags.split())
    job.double, job.layers = True, layers
    return [float(line["loss"]) for line in trained(job)["lines"] if "loss" in line]


LAYOUTS = {
    "ddp": (3, ""),
    "fsdp": (2, "--fsdp-memory-optimization"),
    "zero-2": (2, "--zero-2-memory-optimization"),
    "zero-3": (2, "--zero-3-memory-optimization"),
    "checkpointed": (2, "--checkpoint-activations"),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default(["ddp"], LAYOUTS))
def test_dropout_does_not_depend_on_the_number_of_workers(layout: str) -> None:
    count, flags = LAYOUTS[layout]
    alone = dropout_losses(None, f"{STEPS} --min-workers 1")
    found = run_in_workers(count, dropout_losses, f"{STEPS} --min-workers 1 {flags}")[0]
    assert found == pytest.approx(alone, rel=1e-6)
    assert alone != pytest.approx(dropout_losses(None, STEPS), rel=1e-4)


@pytest.mark.longer
@pytest.mark.distributed
def test_dropout_of_a_pipeline_does_not_depend_on_its_replicas() -> None:
    flags = f"{STEPS} --min-workers 2 --pipeline-model-parallel-size 2"
    one, two = (run_in_workers(count, dropout_losses, flags, 4)[0] for count in (2, 4))
    assert two == pytest.approx(one, rel=1e-6)


def test_the_numbers_that_do_not_work_are_named() -> None:
    numbers = worker_numbers(DropoutJob(f"{STEPS} --nproc-per-node 6 --min-workers 2".split()))
    assert numbers is not None
    assert numbers.possible == [2, 3, 6]
    reasons = [
        f"; not with {count}: global batch size 12 is not divisible by micro batch 2 × data-parallel size {count}"
        for count in (4, 5)
    ]
    assert numbers.note == f"note       --min-workers: the run can continue with 2, 3 or 6 workers{''.join(reasons)}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nproc-per-node 6 --min-workers 4", "numbers that work with these flags: 1, 2, 3 or 6 workers"),
        ("--nproc-per-node 2 --min-workers 3", "there are only 2 workers"),
        ("--nproc-per-node 6 --min-workers 5 --pipeline-model-parallel-size 2", "numbers .* flags: 2, 4 or 6 workers"),
    ],
)
def test_a_number_without_an_alternative_is_refused(flags: str, message: str) -> None:
    batch = STEPS.replace("size 12", "size 24") if "pipeline" in flags else STEPS
    with pytest.raises(ConfigError, match=message):
        worker_numbers(DropoutJob(f"{batch} {flags}".split()))


class Attempts:
    """Replaces the local workers: each attempt ends with the next of some errors, and the last one succeeds."""

    def __init__(self, errors: list[RapidformerError], saves: Path | None = None) -> None:
        self.errors, self.saves = errors, saves
        self.seen: list[tuple[int, Flags]] = []

    def __call__(self, workers: int, flags: Flags) -> str:
        self.seen.append((workers, flags))
        if self.saves:
            (self.saves / "checkpoints" / f"step-{len(self.seen)}").mkdir(parents=True)
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def killed(count: int = 1) -> WorkerFailed:
    return WorkerFailed("killed", lost_workers=count)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(restarts.time, "sleep", slept.append)
    return slept


def job(flags: str) -> DropoutJob:
    return DropoutJob(f"{STEPS} --nproc-per-node 6 {flags}".split())


def test_each_restart_has_the_next_lower_number_and_the_same_batch(pauses: list[float], tmp_path: Path) -> None:
    attempts = Attempts([killed(), killed(2), killed()])
    assert run_with_restarts(job(f"--min-workers 1 --save {tmp_path}"), attempts) == "done"
    assert [workers for workers, _ in attempts.seen] == [6, 3, 1, 1]
    flags = {"global_batch_size": 12, "resume": True, "overwrite": False}
    assert [changed for _, changed in attempts.seen[1:]] == [{"nproc_per_node": n, **flags} for n in (3, 1, 1)]
    assert pauses == [1, 2, 4]


def test_the_number_stays_if_it_is_the_lowest(pauses: list[float]) -> None:
    attempts = Attempts([killed()])
    run_with_restarts(job("--min-workers 6"), attempts)
    assert attempts.seen == [(6, {}), (6, {"nproc_per_node": 6, "global_batch_size": 12})]


def test_restarts_are_limited_until_there_is_a_new_checkpoint(
    pauses: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = Attempts([killed() for _ in range(9)])
    with pytest.raises(WorkerFailed):
        run_with_restarts(job("--min-workers 1 --max-restarts 2"), attempts)
    assert len(attempts.seen) == 3
    assert "no restart: 2 restarts without a new checkpoint" in capsys.readouterr().err
    attempts = Attempts([killed() for _ in range(5)], saves=tmp_path)
    run_with_restarts(job(f"--min-workers 1 --max-restarts 2 --save {tmp_path}"), attempts)
    assert len(attempts.seen) == 6
    assert pauses[2:] == [1] * 5


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("", killed()),
        ("--min-workers 1", ConfigError("a mistake")),
        ("--min-workers 1", ReportedError("not finite", 3)),
        ("--min-workers 1 --max-restarts 0", killed()),
    ],
)
def test_a_run_is_not_restarted(flags: str, error: RapidformerError) -> None:
    attempts = Attempts([error])
    with pytest.raises(type(error)):
        run_with_restarts(job(flags), attempts)
    assert len(attempts.seen) == 1


def test_overwrite_is_repeated_until_it_has_emptied_the_folder(pauses: list[float], tmp_path: Path) -> None:
    RunFolder(tmp_path).prepare({"engine_options": {}}, overwrite=False)
    os.utime(tmp_path / "plan.json", (1, 1))
    attempts = Attempts([killed()])
    run_with_restarts(job(f"--min-workers 1 --overwrite --save {tmp_path}"), attempts)
    assert "resume" not in attempts.seen[1][1]


def test_a_peer_of_a_killed_worker_is_not_lost() -> None:
    """The peer has an error to report. The launcher has ended the third worker."""
    ended = [
        Failure(0, 1, 10.0, {"told_at": 9.0}),
        Failure(1, -signal.SIGSEGV, 9.5),
        Failure(2, -signal.SIGTERM, 11.0),
        Failure(3, -signal.SIGKILL, float("inf")),
    ]
    assert [failure.rank for failure in ended if failure.is_loss] == [1]


SCRIPT = """
import os, signal
from tests.support.dropout_runs import DropoutJob

class Job(DropoutJob):
    def on_step_end(self, step, result):
        if step == 5 and os.environ.get("RANK") == "1" and not self.config.training.resume:
            if "FULL" in os.environ:
                raise MemoryError
            os.kill(os.getpid(), signal.SIGKILL)

Job.main()
"""


def start(folder: Path, *flags: str, **variables: str) -> str:
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [sys.executable, str(script), *f"{BATCH} --train-iters 8 --no-export-model".split(), *flags]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stderr


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


KILLED = [  # (workers, steps between checkpoints, how the run continues)
    (2, "2", "1 worker, continues from step-4"),
    (3, "2", "2 workers, continues from step-4"),
    (3, "9", "2 workers, begins at step 0"),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("workers", "saves", "expected"), by_default(KILLED[:1], KILLED))
def test_a_killed_worker_costs_only_the_steps_since_the_checkpoint(
    workers: int, saves: str, expected: str, tmp_path: Path
) -> None:
    flags = ["--nproc-per-node", str(workers), "--min-workers", "1", "--save-interval", saves]
    told = start(tmp_path, *flags, "--save", str(tmp_path / "run"))
    assert "error: worker 1 was killed by SIGKILL" in told
    assert f"restart    1 of 3 in 1 s with {expected}" in told
    alone = trained(DropoutJob(f"{BATCH} --train-iters 8 --min-workers 1".split()))["lines"]
    wanted = [line["loss"] for line in alone if "loss" in line]
    assert losses(tmp_path / "run") == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in enumerate(wanted, 1)]


@pytest.mark.longer
@pytest.mark.distributed
def test_a_worker_out_of_memory_is_restarted(tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--min-workers", "2", "--save-interval", "2", "--save", str(tmp_path / "run")]
    told = start(tmp_path, *flags, FULL="1")
    assert "restart    1 of 3 in 1 s with 2 workers, continues from step-4" in told
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 9))
