"""How runs end: by a signal, a second signal, a closed terminal, a killed launcher. The workers are lightweight."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import rapidformer_templates
from rapidformer_templates.commands import main as cli
from rapidformer_templates.errors import Interrupted
from rapidformer_templates.system import launch
from rapidformer_templates.system.processes import StopRequest
from tests.support.lines import FLAGS, Line
from tests.support.programs import is_running, wait_until

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
@pytest.mark.parametrize("how", ["steps", "hangs", "connects"])
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
