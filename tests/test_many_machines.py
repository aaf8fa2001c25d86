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


def node(number: int, nodes: int, port: int, save: Path, mark: Path) -> subprocess.Popen[str]:
    """torchrun on one of the nodes, with one worker; it starts its workers again when one dies."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "rehearsal"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), *meeting]
    command += ["--nproc-per-node", "1", "--max-restarts", "1", str(ROOT / "tests" / "scripts" / "dies_once.py")]
    environment = {**os.environ, "DIED_ONCE": str(mark), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = [*command, *FLAGS.split(), "--save", str(save), "--resume"]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def run_on(count: int, save: Path, mark: Path) -> None:
    """Run the job on so many nodes to its end."""
    port = free_port()
    nodes = [node(number, count, port, save, mark) for number in range(count)]
    try:
        told = [each.communicate(timeout=150)[0] for each in nodes]
    finally:
        for each in nodes:
            each.terminate()  # torchrun ends its workers
            each.wait(60)
    assert [each.returncode for each in nodes] == [0] * count, "\n".join(told)


def losses_of(save: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(save / "metrics.jsonl") if "loss" in line}


@pytest.mark.slow
@pytest.mark.distributed
def test_two_nodes_train_as_one_process_and_a_killed_worker_goes_on(tmp_path: Path) -> None:
    alone = train("causal", False, FLAGS, str(tmp_path / "alone"))
    expected = [loss for loss, _ in alone["curve"]]
    mark = tmp_path / "died"
    # One node, whose worker is killed after the checkpoint of step 2 and before that of step 4 is complete.
    run_on(1, tmp_path / "killed", mark)
    assert mark.exists()
    assert list(losses_of(tmp_path / "killed")) == [1, 2, 3, 4, 5, 6]
    assert list(losses_of(tmp_path / "killed").values()) == pytest.approx(expected, rel=1e-5)
    # Two nodes, and nobody dies any more. (If somebody does, torchrun waits 30 s for the worker that waits for it.)
    run_on(2, tmp_path / "two", mark)
    assert list(losses_of(tmp_path / "two").values()) == pytest.approx(expected, rel=1e-5)


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
