"""Local workers: all end together, by signals, kills or errors, the first error is reported once, and SIGTERM saves."""

import json
import math
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import rapidformer_templates
from rapidformer_templates.commands import main as cli
from rapidformer_templates.errors import ConfigError, Interrupted, ReportedError, WorkerFailed
from rapidformer_templates.run import scripts
from rapidformer_templates.run.fit import join_and_train
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.system import launch, processes
from rapidformer_templates.system.processes import Failure, StopRequest, WorkerOutput
from tests.support.jobs import ClassJob
from tests.support.lines import FLAGS, Line
from tests.support.messages import Says
from tests.support.programs import is_running, run_script, wait_until
from tests.support.selection import by_default
from tests.support.worker_pool import end_pool, new_process

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from tests.support.jobs import ClassJob

class Job(ClassJob):
    def on_step_end(self, step, result):
        if step == 3 and os.environ.get("FAIL") == os.environ.get("RANK", "0"):
            raise ValueError("a bug in a hook")
        if step == 3 and os.environ.get("KILL") == os.environ.get("RANK", "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(os.environ.get("NAP", "0")))

Job.main(lr=1e-3, micro_batch_size=2, log_interval=1, save_interval=2)
print("what follows")
if "AGAIN" in os.environ:
    steps = Job(lr=1e-3, micro_batch_size=2, train_iters=2).fit()["steps"]
    sys.stdout.write(str(steps) + " more steps\\n")  # at once: torchrun's workers write without a buffer, into one pipe
    sys.stdout.flush()
    sys.argv += ["--nproc-per-node", "2"]
    Job.main(lr=1e-3, micro_batch_size=2)  # the folder holds a run by now
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT.format(root=str(ROOT)))
    return path


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> pytest.CaptureFixture[str]:
    """Capture the output of workers that start as in a new program, without the calls of earlier tests."""
    end_pool()
    monkeypatch.setattr(scripts, "_outcomes", [])
    return capfd


KILLED = """
import os, signal
from rapidformer_templates.system.launch import report_errors
from rapidformer_templates.system.workers import join

def work():
    with join("cpu") as workers:
        workers.barrier()
        if workers.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        workers.barrier()

report_errors(work)
"""


@pytest.mark.distributed
def test_killed_worker_is_named() -> None:
    """The other worker loses it in a collective, and its error is not the first one."""
    with pytest.raises(WorkerFailed, match=r"worker 1 was killed by SIGKILL .*; the others were stopped"):
        launch.run_workers([sys.executable, "-c", KILLED], 2)


FAILING = """
import os
import torch.distributed as dist
from rapidformer_templates.system.launch import report_errors
from rapidformer_templates.system.workers import close_group_by, join

def close():  # NCCL waits for peers that are inside a collective, and for minutes
    os._exit(9)

dist.destroy_process_group = close

def work():
    with join("cpu") as workers:
        {by_library} and close_group_by(close)
        workers.barrier()
        if workers.rank == 1:
            raise ValueError("a bug in a hook")
        workers.barrier()

report_errors(work)
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "by_library", by_default([False], [False, True]), ids=["closed by torch", "closed by DeepSpeed"]
)
def test_an_error_is_reported_before_the_group_is_closed(by_library: bool) -> None:
    with pytest.raises(ReportedError, match="ValueError: a bug in a hook"):
        launch.run_workers([sys.executable, "-c", FAILING.format(by_library=by_library)], 2)


GOING_ON = """
import contextlib
from rapidformer_templates.system.workers import join

with contextlib.suppress(ValueError), join("cpu"):
    raise ValueError
with join("cpu") as workers:
    assert workers.sum(workers.rank + 1.0) == [3.0]
"""


@pytest.mark.longer
@pytest.mark.distributed
def test_workers_join_again_after_an_error() -> None:
    launch.run_workers([sys.executable, "-c", GOING_ON], 2)


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize(("how", "message"), [("FAIL", "ValueError: a bug in a hook"), ("KILL", "killed by SIGKILL")])
def test_error_of_one_worker_of_a_script_ends_all_and_is_told_once(
    how: str, message: str, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    monkeypatch.setenv(how, "1")
    folder = ["--save", str(tmp_path / "run")]
    assert run_script(script, "--nproc-per-node", "2", "--train-iters", "1000", *folder) == 1
    said = told.readouterr().err
    assert said.count(message) == 1
    assert ("on_step_end" in said) == ("Traceback" in said) == (how == "FAIL")  # a bug is shown with its stack trace


@pytest.mark.longer
@pytest.mark.distributed
def test_sigterm_saves_and_resume_goes_on(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NAP", "0.1")
    folder = tmp_path / "run"
    flags = ["--train-iters", "40", "--save", str(folder), "--nproc-per-node", "2", "--no-export-model"]
    process = new_process(lambda: sys.exit(run_script(script, *flags)))
    process.start()
    wait_until((folder / "checkpoints" / "step-2").exists, "there is no checkpoint")
    os.kill(process.pid, signal.SIGTERM)
    process.join(timeout=120)
    said = told.readouterr().err
    assert process.exitcode == 75, said
    assert "continue with --resume" in said
    assert "Traceback" not in said
    done = read_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert done < 40
    assert (folder / "checkpoints" / "latest").read_text() == f"step-{done}\n"
    monkeypatch.delenv("NAP")
    assert run_script(script, *flags, "--resume") == 0
    assert told.readouterr().out.count("what follows") == 1
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 41))


def test_port_in_use_is_found_before_a_worker_starts(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = f"--nproc-per-node 2 --train-iters 2 --save {tmp_path / 'run'} --master-port {port}"
        assert run_script(script, *words.split()) == 2
    says.text(capsys.readouterr().err, PORT=port)


@pytest.mark.longer
@pytest.mark.distributed
def test_torchrun_starts_the_same_script(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*command, "--train-iters", "4", "--save", str(folder)],
        env={**os.environ, "AGAIN": "1"},  # torchrun's store remembers the rendezvous of each run
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.count("2 more steps") == 2, done.stderr
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4]
    assert done.returncode != 0
    assert "already holds a run" in done.stderr


def test_another_number_of_workers_than_the_launchers_is_refused(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with says(ConfigError):
        join_and_train(ClassJob(lr=1e-3, micro_batch_size=2, nproc_per_node=3))


def test_second_run_does_not_overwrite_the_first(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    folder = tmp_path / "run"
    flags = ["--train-iters", "2", "--save", str(folder)]
    ClassJob(flags, lr=1e-3, micro_batch_size=2).fit()
    before = (folder / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert run_script(script, *flags) == 2
    says.text(capsys.readouterr().err)
    assert (folder / "metrics.jsonl").read_bytes() == before


def _failure(exit_status: int, told: dict[str, Any] | None = None) -> Failure:
    return Failure(rank=0, status=exit_status, noticed=100.0, report=told or {})


def test_workers_ended_for_another_ones_error_do_not_hide_it() -> None:
    """The launcher ends the others with SIGTERM. A worker that saves before it exits was not stopped by the user."""
    failures = [_failure(75), _failure(1, {"message": "error: out of memory", "told_at": 50.0})]
    with pytest.raises(ReportedError, match="out of memory"):
        launch.raise_first_error(failures, 0.0, is_requested=False)
    with pytest.raises(Interrupted):
        launch.raise_first_error(failures, 0.0, is_requested=True)
    with pytest.raises(Interrupted):  # a scheduler that signals every process itself
        launch.raise_first_error([_failure(75), _failure(75)], 0.0, is_requested=False)


def test_the_error_of_a_killed_worker_names_resume_if_there_is_a_checkpoint(says: Says) -> None:
    for resumes in (True, False):
        with says(WorkerFailed):
            launch.raise_first_error([_failure(-9)], time.time(), is_requested=False, resumes=partial(bool, resumes))


UNMET = """
import os, pathlib, signal, sys, time
deaf = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deaf.touch()
    time.sleep(20)
while not deaf.exists():
    time.sleep(0.01)
sys.exit(3)
"""


def test_a_worker_that_waits_for_one_that_never_came_is_killed_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection in C++ does not react to SIGTERM. With the grace of a save, the worker would end on its own."""
    monkeypatch.setattr(processes, "HANG_GRACE", 0.1)
    command = [sys.executable, "-S", "-c", UNMET, str(tmp_path / "deaf")]
    workers = processes.WorkerProcesses(command, [{"RANK": str(rank)} for rank in range(2)], tmp_path)
    workers.wait(processes.StopSignal())
    assert [failure.status for failure in workers.failures()] == [3, -signal.SIGKILL]


def test_a_character_that_comes_in_two_pieces_is_printed_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = WorkerOutput(tmp_path)
    for piece in (b"caf\xc3", b"\xa9 \xff\n"):
        printed.stdout.write(piece)
        printed.stdout.flush()
        printed.show()
    printed.close()
    assert capsys.readouterr().out == "café \ufffd\n"


def test_an_error_counts_from_its_start_and_not_from_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers of a worker fail as soon as it closes its connections, and may report that before the worker does."""
    monkeypatch.setenv(processes.ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.setattr(os, "_exit", lambda status: None)
    monkeypatch.setattr(processes, "failed_at", math.inf)
    clock = iter(range(1000, 2000))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    with pytest.raises(ValueError, match="first") as caught, processes.joined():
        raise ValueError("first")
    launch.report_error(caught.value)
    assert json.loads((tmp_path / "error.json").read_text())["told_at"] == 1000.0
    with processes.joined():
        time.time()
    launch.report_error(caught.value)
    assert json.loads((tmp_path / "error.json").read_text())["told_at"] > 1001.0


BUSY = """
import sys
import torch
import torch.distributed as dist
from rapidformer_templates.system.workers import open_group_alone

open_group_alone(torch.device("cpu"))
sys.setswitchinterval(60)  # as on a busy machine, where the threads get no turn
for _ in range(100):
    dist.all_reduce(torch.ones(1000), async_op=True)
print("the run is over", flush=True)
"""


@pytest.mark.longer
@pytest.mark.distributed
def test_threads_let_go_before_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the run is over\n", "")


LAUNCHER = """
import sys
from rapidformer_templates.errors import Interrupted, RapidformerError
from rapidformer_templates.system.launch import run_workers
try:
    run_workers([sys.executable, *sys.argv[1:]], 2)
except (Interrupted, RapidformerError) as error:
    print(error.render(), file=sys.stderr)
    sys.exit(error.exit_status)
"""
WORKER = """
import os, sys, threading, time
from pathlib import Path
from rapidformer_templates.errors import Interrupted
from rapidformer_templates.system.launch import report_errors
from rapidformer_templates.system.processes import end_with_launcher, has_met
from rapidformer_templates.system.processes import StopRequest, handle_stop_signals

how, folder, rank = sys.argv[1], Path(sys.argv[2]), os.environ["RANK"]

def body():
    with handle_stop_signals(StopRequest(alone=False)) as stop, stop.loop(saves=True):
        end_with_launcher(grace=1 if how == "hangs" else 600)  # one that saves ends at once, on a slow machine later
        if how != "connects":
            has_met.set()
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        if how in ("hangs", "connects"):
            threading.Lock().acquire() and threading.Event().wait()
        while not stop.is_requested:
            time.sleep(0.01)
        print("saving", file=sys.stderr, flush=True)
        (folder / f"saved-{rank}").touch()
        raise Interrupted("stopped after step 7, as requested", hint="continue with --resume")

if how == "imports":
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(600)
report_errors(body)
"""


class Run:
    """A launcher with two workers that are in their loop, hang in it, connect to each other, or import for long."""

    def __init__(self, how: str, folder: Path, launcher: str = LAUNCHER, **more: Any) -> None:
        for name, text in (("launcher.py", launcher), ("worker.py", WORKER)):
            (folder / name).write_text(text)
        self.folder = folder
        words = [sys.executable, str(folder / "launcher.py"), str(folder / "worker.py"), how, str(folder)]
        self.process = subprocess.Popen(words, **{"stderr": subprocess.PIPE, "text": True, **more})
        wait_until(lambda: all(file.exists() and file.read_text() for file in self.pid_files), "no worker starts")
        self.pids = [int(file.read_text()) for file in self.pid_files]

    @property
    def pid_files(self) -> list[Path]:
        return [self.folder / f"pid-{rank}" for rank in (0, 1)]

    @property
    def saved(self) -> list[bool]:
        return [(self.folder / f"saved-{rank}").exists() for rank in (0, 1)]

    def workers_are_gone(self) -> bool:
        return not any(is_running(pid) for pid in self.pids)

    def end(self) -> str:
        """Wait for the end and return the output."""
        said: str = self.process.communicate(timeout=90)[1] or ""
        assert self.workers_are_gone()
        assert "Traceback" not in said
        return said


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(how: str, **more: Any) -> Run:
        runs.append(Run(how, tmp_path, **more))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        for pid in filter(is_running, run.pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("how", by_default(["hangs"], ["steps", "hangs", "connects"]))
def test_workers_end_when_their_launcher_is_killed(start: Callable[..., Run], how: str) -> None:
    run = start(how)
    run.process.kill()
    wait_until(run.workers_are_gone, "the workers train on")
    assert run.saved == [how == "steps"] * 2


@pytest.mark.slow
def test_workers_of_a_torchrun_that_is_killed_end(start: Callable[..., Run]) -> None:
    elastic = """
import os, subprocess, sys, time
ranks = [{**os.environ, "RANK": rank, "TORCHELASTIC_RUN_ID": "none"} for rank in "01"]
workers = [subprocess.Popen([sys.executable, *sys.argv[1:]], env=rank, start_new_session=True) for rank in ranks]
time.sleep(600)
"""
    run = start("steps", launcher=elastic)
    run.process.kill()
    wait_until(run.workers_are_gone, "the workers train on")
    assert run.saved == [True, True]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_workers_that_hang(start: Callable[..., Run]) -> None:
    run = start("hangs")
    run.process.send_signal(signal.SIGINT)
    time.sleep(1.1)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert "\nthe workers were stopped at once, as requested twice" in f"\n{run.end()}"
    assert run.process.returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_each_signal_saves(start: Callable[..., Run], number: int) -> None:
    run = start("steps")
    run.process.send_signal(number)
    run.process.send_signal(number)  # to the process and to its group: one request
    assert "\nstopped after step 7, as requested\n  help   continue with --resume" in f"\n{run.end()}"
    assert run.process.returncode == 75
    assert run.saved == [True, True]


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_is_nothing(start: Callable[..., Run]) -> None:
    run = start("steps", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    run.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert run.process.poll() is None
    assert run.saved == [False, False]
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert run.process.returncode == 75


@pytest.mark.slow
def test_a_closed_terminal_saves(start: Callable[..., Run]) -> None:
    ours, theirs = pty.openpty()
    run = start("steps", stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)  # from here on, writing to it is an error
    run.process.send_signal(signal.SIGHUP)
    run.end()
    assert run.process.returncode == 75
    assert run.saved == [True, True]


@pytest.mark.slow
def test_ctrl_c_while_workers_import_is_no_stack_trace(start: Callable[..., Run]) -> None:
    run = start("imports")
    run.process.send_signal(signal.SIGINT)
    said = run.end()
    assert "\nstopped before the first step; nothing was lost" in f"\n{said}"
    assert "error" not in said
    assert "memory" not in said
    assert run.process.returncode == 130


def test_ctrl_c_during_imports_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(cli, "train", interrupted)
    assert cli.main(["--task", "causal_lm"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr(rapidformer_templates, "import_module", interrupted)
    monkeypatch.setattr(launch, "is_script", lambda: True)
    with pytest.raises(SystemExit, match="130"):
        rapidformer_templates.Finetuner  # noqa: B018
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr(launch, "is_script", lambda: False)  # a notebook continues
    with pytest.raises(KeyboardInterrupt):
        rapidformer_templates.Finetuner  # noqa: B018


def test_a_request_says_what_is_true_in_its_phase() -> None:
    def said(request: StopRequest) -> tuple[str, int]:
        with pytest.raises(Interrupted) as caught:
            request(signal.SIGTERM, None)
        return caught.value.message, caught.value.exit_status

    before = "stopped before the first step; nothing was lost"
    assert said(StopRequest()) == (before, 130)
    assert said(StopRequest(lambda: True)) == (before, 75)
    for saves, status in ((True, 75), (False, 130)):
        request = StopRequest()
        with request.loop(saves=saves):
            pass
        assert said(request) == ("stopped after the last step, before evaluation and export were done", status)


@pytest.mark.parametrize("saves", [True, False])
def test_a_request_in_the_export_goes_on_from_the_last_step(
    saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*FLAGS, "--epochs", "1", *(["--save", str(tmp_path / "run")] if saves else ["--no-save"])]
    monkeypatch.setattr(
        "rapidformer_templates.run.fit.summarise", lambda *parts: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(1)
    )
    with pytest.raises(Interrupted, match="after the last step") as caught:
        Line(flags).fit()
    assert caught.value.exit_status == (75 if saves else 130)
    monkeypatch.undo()
    if saves:
        assert Line([*flags, "--resume"]).fit()["steps"] == 5
