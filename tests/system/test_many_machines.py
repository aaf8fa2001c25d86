"""Two nodes, simulated on one machine by two torchruns that meet on its loopback, and the examples for clusters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rapidformer_templates.run.folder import read_metrics
from tests.support.parity import train
from tests.support.worker_pool import free_port

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --log-interval 1 --no-export-model "
    "--device cpu --lr 1e-3"
)


def node(port: int, save: Path) -> subprocess.Popen[str]:
    """Start torchrun on one of two nodes, with one worker."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "rehearsal"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *meeting, "--nproc-per-node", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    script = ROOT / "tests/support/scripts/one_of_many.py"
    words = [*command, str(script), *FLAGS.split(), "--save", str(save), "--resume"]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.longer
@pytest.mark.distributed
def test_two_nodes_train_as_one_process(tmp_path: Path) -> None:
    """Killing a worker is only tested by hand (docs/many-machines.md), because torchrun waits 30 s for the others."""
    port = free_port()
    nodes = [node(port, tmp_path / "run") for _ in range(2)]
    try:
        told = [each.communicate(timeout=280)[0] for each in nodes]
    finally:
        for each in nodes:
            each.terminate()  # torchrun ends its workers
            each.wait(60)
    assert [each.returncode for each in nodes] == [0, 0], "\n".join(told)
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    alone = train("causal", False, FLAGS)
    assert losses == pytest.approx([loss for loss, _ in alone["curve"]], rel=1e-5)


@pytest.mark.parametrize("name", ["pytorchjob", "volcano"])
def test_the_kubernetes_examples_run_the_command(name: str) -> None:
    job: Any = yaml.safe_load((ROOT / "examples" / "kubernetes" / f"{name}.yaml").read_text())
    assert job["kind"] in ("PyTorchJob", "Job")
    pods = _pods(job)
    assert pods
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        words = " ".join(container["command"])
        assert "torchrun" in words
        assert "-m rapidformer_templates" in words
        assert "--resume" in words
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def _pods(value: Any) -> list[Any]:
    """Return every pod template in a document."""
    if isinstance(value, dict):
        own = [value["template"]] if "template" in value else []
        return own + [pod for inner in value.values() for pod in _pods(inner)]
    return [pod for inner in value for pod in _pods(inner)] if isinstance(value, list) else []


def test_the_slurm_example_is_a_shell_script() -> None:
    script = ROOT / "examples" / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "-m rapidformer_templates" in text
    assert "--resume" in text
