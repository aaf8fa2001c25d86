"""``--min-workers`` and ``torchrun --max-restarts``: restarts after a worker is lost, with the same random numbers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.errors import ConfigError, RapidformerError, ReportedError, WorkerFailed
from rapidformer_templates.run import new_workers
from rapidformer_templates.run.fit import join_and_train
from rapidformer_templates.run.folder import RunFolder, read_metrics
from rapidformer_templates.run.new_workers import Flags, run_with_restarts, worker_numbers
from rapidformer_templates.system.processes import Failure
from rapidformer_templates.system.workers import Workers
from tests.support.dropout_runs import DropoutJob
from tests.support.lines import Died
from tests.support.messages import Says
from tests.support.parity import trained
from tests.support.worker_pool import free_port, run_in_workers

ROOT = Path(__file__).resolve().parents[2]
BATCH = "--micro-batch-size 2 --global-batch-size 12 --lr 1e-3 --log-interval 1 --device cpu"
STEPS = f"{BATCH} --train-iters 3"


def dropout_losses(workers: Workers | None, flags: str, layers: int = 2) -> list[float]:
    job = DropoutJob(flags.split())
    job.double, job.layers = True, layers
    return [float(line["loss"]) for line in trained(job)["lines"] if "loss" in line]


LAYOUTS = {
    "ddp": (2, ""),
    "fsdp": (2, "--fsdp-memory-optimization"),
    "zero-2": (2, "--zero-2-memory-optimization"),
    "zero-3": (2, "--zero-3-memory-optimization"),
    "checkpointed": (2, "--checkpoint-activations"),
}


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
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


def test_the_numbers_that_do_not_work_are_named(says: Says) -> None:
    possible, note = worker_numbers(DropoutJob(f"{STEPS} --nproc-per-node 6 --min-workers 2".split()))
    assert possible == [2, 3, 6]
    says.text(note)


UNEVEN = "--nproc-per-node 6 --min-workers 5 --pipeline-model-parallel-size 2 --global-batch-size 24"


@pytest.mark.parametrize("flags", ["--nproc-per-node 6 --min-workers 4", "--nproc-per-node 2 --min-workers 3", UNEVEN])
def test_a_number_without_an_alternative_is_refused(flags: str, says: Says) -> None:
    with says(ConfigError):
        worker_numbers(DropoutJob(f"{STEPS} {flags}".split()))


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
    monkeypatch.setattr(new_workers.time, "sleep", slept.append)
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
    attempts = Attempts([killed()])
    run_with_restarts(job("--min-workers 6"), attempts)  # the lowest number stays
    assert attempts.seen == [(6, {}), (6, {"nproc_per_node": 6, "global_batch_size": 12})]


def test_a_new_checkpoint_allows_more_restarts(
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


ENDS: list[tuple[str, RapidformerError]] = [
    ("", killed()),
    ("--min-workers 1", ConfigError("a mistake")),
    ("--min-workers 1", ReportedError("not finite", 3)),
    ("--min-workers 1 --max-restarts 0", killed()),
]


@pytest.mark.parametrize(("flags", "error"), ENDS)
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


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **variables}


def start(folder: Path, *flags: str, **variables: str) -> str:
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [sys.executable, str(script), *f"{BATCH} --train-iters 8 --no-export-model".split(), *flags]
    done = subprocess.run(words, env=environment(**variables), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stderr


def assert_losses_of_one_process(folder: Path, flags: str = "--min-workers 1") -> None:
    """Compare the losses with those of one process that nothing has interrupted."""
    alone = trained(DropoutJob(f"{BATCH} --train-iters 8 {flags}".split()))["lines"]
    wanted = [line["loss"] for line in alone if "loss" in line]
    lines = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["loss"] for line in lines] == pytest.approx(wanted, rel=1e-5)


def die_in_step_5(workers: Workers, flags: list[str]) -> None:
    died = DropoutJob(flags)
    died.dies_after = 5
    with pytest.raises(Died):
        died.fit()


@pytest.mark.distributed
def test_the_remaining_worker_has_the_losses_of_one_process(pauses: list[float], tmp_path: Path) -> None:
    flags = f"{BATCH} --train-iters 8 --no-export-model --min-workers 1 --save-interval 2 --save {tmp_path}/run".split()

    def attempt(workers: int, changes: Flags) -> None:
        if not changes:
            run_in_workers(workers, die_in_step_5, flags)
            raise killed()
        assert (workers, changes["resume"]) == (1, True)
        DropoutJob([*flags, "--resume"]).fit()

    run_with_restarts(DropoutJob([*flags, "--nproc-per-node", "2"]), attempt)
    assert_losses_of_one_process(tmp_path)


KILL, FULL = "error: worker 1 was killed by SIGKILL", "is out of memory"
LOST = [  # (flags, how a worker is lost, how the run continues)
    ("--nproc-per-node 2 --min-workers 1 --save-interval 2", KILL, "1 worker, continues from step-4"),
    ("--nproc-per-node 3 --min-workers 1 --save-interval 2", KILL, "2 workers, continues from step-4"),
    ("--nproc-per-node 3 --min-workers 1 --save-interval 9", KILL, "2 workers, begins at step 0"),
    ("--nproc-per-node 2 --min-workers 2 --save-interval 2", FULL, "2 workers, continues from step-4"),
]


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize(("flags", "lost", "expected"), LOST)
def test_a_lost_worker_costs_the_steps_since_a_save(flags: str, lost: str, expected: str, tmp_path: Path) -> None:
    told = start(tmp_path, *flags.split(), "--save", str(tmp_path / "run"), **({"FULL": "1"} if lost == FULL else {}))
    assert lost in told
    assert f"restart    1 of 3 in 1 s with {expected}" in told
    assert_losses_of_one_process(tmp_path)


ELASTIC = """
import os, signal
from tests.support.dropout_runs import DropoutJob

class Job(DropoutJob):
    def on_step_end(self, step, result):
        is_victim = os.environ["RANK"] == os.environ.get("KILLED") or "KILLED_NODE" in os.environ
        if step == 5 and is_victim and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if "KILLED_NODE" in os.environ:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

Job.main()
"""


def agents(victims: list[dict[str, str]], folder: Path, words: list[str], *flags: str) -> list[tuple[int, str]]:
    """Run the script under some torchruns, and return the status and the output of each.

    Args:
        victims: environment variables of each torchrun, which name the worker to kill.
        words: of the torchruns.
    """
    (folder / "train.py").write_text(ELASTIC, encoding="utf-8")
    given = f"{BATCH} --train-iters 8 --no-export-model --save-interval 2 --save {folder / 'run'}".split()
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(folder / "train.py"), *given, *flags]
    started = []
    for variables in victims:  # the first one holds the rendezvous and must survive
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=environment(**variables), **pipes))
        if len(victims) > 1:
            time.sleep(8)
    try:
        outputs = [agent.communicate(timeout=400)[0] for agent in started]
    finally:
        for agent in started:
            agent.terminate()
            agent.wait(60)
    return [(agent.returncode, output) for agent, output in zip(started, outputs, strict=True)]


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize("flags", ["", "--min-workers 2"])
def test_a_restart_of_torchrun_resumes_without_being_told(flags: str, tmp_path: Path) -> None:
    """One worker without ``--min-workers``, two of which one is killed with it."""
    count = "2" if flags else "1"
    words = ["--standalone", "--nproc-per-node", count, "--max-restarts", "1"]
    ((status, told),) = agents([{"KILLED": "1" if flags else "0"}], tmp_path, words, *flags.split())
    assert status == 0, told
    assert "resuming from" in told
    assert_losses_of_one_process(tmp_path, "--min-workers 1" if flags else "")


@pytest.mark.longer
@pytest.mark.distributed
def test_the_remaining_node_continues_alone(tmp_path: Path) -> None:
    """A torchrun is killed with its worker. The other one starts one worker, which has the same dropout and batch."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "elastic"]
    nodes = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2", *meeting]
    ended = agents([{}, {"KILLED_NODE": "1"}], tmp_path, nodes, "--min-workers", "1")
    told = "\n".join(output for _, output in ended)
    assert sorted(status for status, _ in ended) == [-9, 0], told
    assert "plan       1 × cpu" in told
    assert "saved by 2 workers: reseeded for 1; dropout does not depend on them" in told
    assert_losses_of_one_process(tmp_path)


@pytest.mark.parametrize(
    ("launch", "restarts", "is_old"), [("a", "1", False), ("b", "1", False), ("a", "0", False), ("a", "1", True)]
)
def test_a_restart_is_recognized(
    launch: str, restarts: str, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither another launch counts, nor an earlier one with the same id, from before the parent of this process."""
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    folder.prepare({"engine_options": {}}, overwrite=False)
    if is_old:
        os.utime(folder.plan, (1, 1))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    assert folder.is_of_restarted_launch() is ((launch, restarts, is_old) == ("a", "1", False))


def test_torchrun_needs_its_own_limit_of_restarts(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with says(ConfigError):
        join_and_train(DropoutJob(f"{STEPS} --min-workers 1 --max-restarts 2".split()))
