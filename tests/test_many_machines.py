"""Two nodes, rehearsed on one machine: two torchruns that meet on its loopback, and a worker that dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rapidformer_templates.run_folder import read_metrics
from rapidformer_templates.workers import free_port
from tests.parity.jobs import train

ROOT = Path(__file__).parents[1]
FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --save-interval 2 --log-interval 1 --no-export-model "
    "--device cpu --lr 1e-3"
)


def node(number: int, port: int, save: Path, mark: Path) -> subprocess.Popen[str]:
    """torchrun on one of two nodes, which starts its workers again when one dies."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "rehearsal"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), *meeting]
    command += ["--nproc-per-node", "1", "--max-restarts", "3", str(ROOT / "tests" / "scripts" / "dies_once.py")]
    environment = {**os.environ, "DIED_ONCE": str(mark), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = [*command, *FLAGS.split(), "--save", str(save), "--resume"]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_nodes_go_on_from_their_checkpoint_when_a_worker_is_killed(tmp_path: Path) -> None:
    mark, port = tmp_path / "died", free_port()
    nodes = [node(number, port, tmp_path / "run", mark) for number in range(2)]
    try:
        told = [each.communicate(timeout=200)[0] for each in nodes]
    finally:
        for each in nodes:
            each.kill()
    assert [each.returncode for each in nodes] == [0, 0], "\n".join(told)
    assert mark.exists()
    losses = {line["step"]: line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line}
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    alone = train("causal", False, FLAGS, str(tmp_path / "alone"))
    assert list(losses.values()) == pytest.approx([loss for loss, _ in alone["curve"]], rel=1e-5)


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
    """Every pod template in a document."""
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
