"""A worker that dies once under ``torchrun --max-restarts``: the restart resumes without ``--resume``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rapidformer_templates.run.folder import RunFolder

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
