"""A worker that dies once under ``torchrun --max-restarts``: the restart resumes without ``--resume``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.run.fit import join_and_train
from rapidformer_templates.run.folder import RunFolder, read_metrics
from tests.support.dropout_runs import DropoutJob
from tests.support.parity import trained
from tests.support.worker_pool import free_port

ROOT = Path(__file__).parents[2]
FLAGS = "--micro-batch-size 2 --train-iters 6 --log-interval 1 --save-interval 2 --device cpu --lr 1e-3"
SCRIPT = """
import os, sys
from tests.support.jobs import CausalJob

class Job(CausalJob):
    def on_step_end(self, step, result):
        if step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "DIES" in os.environ:
            os._exit(3)

Job.main()
"""


def torchrun(script: Path, save: Path, **variables: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    words = [*command, "--max-restarts", "1", str(script), *FLAGS.split(), "--save", str(save)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.longer
def test_a_restart_of_torchrun_resumes_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    said = torchrun(script, tmp_path / "restarted", DIES="1")
    assert "resuming from" in said
    torchrun(script, tmp_path / "whole")
    restarted, whole = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("restarted", "whole"))
    assert restarted.keys() == whole.keys()
    assert all(torch.equal(restarted[name], whole[name]) for name in whole)


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
BATCH = "--micro-batch-size 2 --global-batch-size 12 --lr 1e-3 --log-interval 1 --device cpu --train-iters 8"


def _agents(victims: list[dict[str, str]], folder: Path, *words: str) -> list[tuple[int, str]]:
    """Run the script under some torchruns, and return the status and the output of each.

    Args:
        victims: environment variables of each torchrun, which name the worker to kill.
    """
    script = folder / "train.py"
    script.write_text(ELASTIC, encoding="utf-8")
    flags = [*BATCH.split(), "--no-export-model", "--save-interval", "2", "--save", str(folder / "run")]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *words,
        str(script),
        *flags,
        "--min-workers",
        str(3 - len(victims)),
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    agents = []
    for variables in victims:  # the first one holds the rendezvous and must survive
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
        agents.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        if len(victims) > 1:
            time.sleep(8)
    try:
        outputs = [agent.communicate(timeout=400)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(60)
    return [(agent.returncode, output) for agent, output in zip(agents, outputs, strict=True)]


def _check_losses(folder: Path) -> None:
    """Compare the losses with those of one process that nothing has interrupted."""
    alone = trained(DropoutJob([*BATCH.split(), "--min-workers", "1"]))["lines"]
    wanted = [line["loss"] for line in alone if "loss" in line]
    found = [line["loss"] for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.longer
@pytest.mark.distributed
def test_two_workers_continue_after_one_is_killed(tmp_path: Path) -> None:
    ((status, told),) = _agents(
        [{"KILLED": "1"}], tmp_path, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"
    )
    assert status == 0, told
    assert "resuming from" in told
    _check_losses(tmp_path)


@pytest.mark.longer
@pytest.mark.distributed
def test_the_remaining_node_continues_alone(tmp_path: Path) -> None:
    """A torchrun is killed with its worker. The other one starts one worker, which has the same dropout and batch."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "elastic"]
    nodes = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2", *meeting]
    ended = _agents([{}, {"KILLED_NODE": "1"}], tmp_path, *nodes)
    told = "\n".join(output for _, output in ended)
    assert sorted(status for status, _ in ended) == [-9, 0], told
    assert "plan       1 × cpu" in told
    assert "saved by 2 workers: reseeded for 1; dropout does not depend on them" in told
    _check_losses(tmp_path)


def folder_of(launch: str, path: Path) -> RunFolder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", launch)
        RunFolder(path).prepare({"engine_options": {}}, overwrite=False)
    return RunFolder(path)


@pytest.mark.parametrize(
    ("launch", "restarts", "is_old", "expected"),
    [("a", "1", False, True), ("b", "1", False, False), ("a", "0", False, False), ("a", "1", True, False)],
)
def test_a_restart_is_recognized(
    launch: str, restarts: str, is_old: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither another launch counts, nor an earlier one with the same id, from before the parent of this process."""
    folder = folder_of("a", tmp_path / "run")
    if is_old:
        os.utime(folder.plan, (1, 1))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    assert folder.is_of_restarted_launch() is expected


def test_torchrun_needs_its_own_limit_of_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = DropoutJob(f"{BATCH} --min-workers 1 --max-restarts 2".split())
    with pytest.raises(ConfigError, match="torchrun --max-restarts N"):
        join_and_train(job)
