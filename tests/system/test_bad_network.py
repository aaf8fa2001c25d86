"""Two or three nodes in network namespaces, and a network between them that is cut, slow or lossy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rapidformer_templates.run.folder import read_metrics
from tests.support.jobs import CausalJob
from tests.support.namespaces import Network, why_impossible

ROOT = Path(__file__).parents[2]
PROBLEM = why_impossible()
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
]

TIMEOUT = 15
STEPS = 30
FLAGS = (
    f"--micro-batch-size 2 --train-iters {STEPS} --log-interval 1 --save-interval 5 --no-export-model --device cpu "
    f"--lr 1e-3 --worker-timeout {TIMEOUT} --resume"
)
SCRIPT = """
import time
from tests.support.jobs import CausalJob

class Job(CausalJob):
    def on_step_end(self, step, result):
        time.sleep(0.3)

Job.main()
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(2).connected() as network:
        yield network


def start(network: Network, folder: Path, save: str = "run", flags: str = FLAGS) -> list[subprocess.Popen[str]]:
    """Start one worker on each node, as a scheduler would."""
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    common = {
        "WORLD_SIZE": str(len(network.names)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": network.address(0), "MASTER_PORT": "29500", "PYTHONPATH": path,
    }  # fmt: skip
    words = [sys.executable, str(script), *flags.split(), "--save"]
    return [
        network.popen(node, [*words, str(folder / save.format(node=node))], {"RANK": str(node), **common})
        for node in range(len(network.names))
    ]


def finish(workers: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """Return the output of the workers. They are killed after some time."""
    end = time.monotonic() + seconds
    try:
        return [worker.communicate(timeout=max(end - time.monotonic(), 1))[0] for worker in workers]
    finally:
        kill(workers)


def kill(workers: list[subprocess.Popen[str]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)


def wait_for_step(folder: Path, step: int, workers: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + 240
    while not any(line["step"] >= step for line in read_metrics(folder / "run" / "metrics.jsonl")):
        assert time.monotonic() < end, "no step"
        assert all(worker.poll() is None for worker in workers), finish(workers, 5)
        time.sleep(0.05)


@pytest.mark.longer
def test_a_cut_of_five_seconds_is_survived(network: Network, tmp_path: Path) -> None:
    """TCP sends again. The network is slow and loses packets before and after."""
    network.delay, network.loss = 0.01, 0.02
    workers = start(network, tmp_path)
    wait_for_step(tmp_path, 3, workers)
    network.cut = True
    time.sleep(5)
    network.cut = False
    said = finish(workers, 240)
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert {line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")} == set(range(1, STEPS + 1))


@pytest.mark.longer
def test_a_cut_for_ever_ends_the_run_and_names_the_worker(network: Network, tmp_path: Path) -> None:
    workers = start(network, tmp_path)
    wait_for_step(tmp_path, 7, workers)
    network.cut, began = True, time.monotonic()
    said = finish(workers, 3 * TIMEOUT + 60)
    seconds = time.monotonic() - began
    assert all(worker.returncode not in (0, None) for worker in workers), said
    assert seconds < TIMEOUT + 10
    assert "worker 1 on node-1" in said[0]
    assert "step " in said[0]
    assert "--resume continues from step-5" in said[0]
    assert "worker 0 at 10.77.0.1 does not respond" in said[1]
    network.cut = False
    workers = start(network, tmp_path)
    said = finish(workers, 240)
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert "resuming from" in said[0]


@pytest.mark.longer
def test_folders_that_are_not_shared_are_refused(network: Network, tmp_path: Path) -> None:
    workers = start(network, tmp_path, "run-{node}")
    said = finish(workers, 200)
    assert all(worker.returncode not in (0, None) for worker in workers), said
    assert "is not one folder for all workers" in said[0] + said[1]
    assert "1 on node-1" in said[0] + said[1]


@pytest.mark.exhaustive
def test_three_nodes_train_as_one_process_over_a_slow_and_lossy_network(tmp_path: Path) -> None:
    """A packet takes 200 ms, and one of twenty gets lost."""
    flags = (
        "--micro-batch-size 2 --global-batch-size 12 --train-iters 6 --log-interval 1 --save-interval 3"
        " --no-export-model --device cpu --lr 1e-3 --worker-timeout 120"
    )
    with Network(3).connected() as network:
        network.delay, network.loss = 0.2, 0.05
        workers = start(network, tmp_path, flags=flags)
        said = finish(workers, 500)
    assert [worker.returncode for worker in workers] == [0, 0, 0], said
    alone = tmp_path / "alone"
    CausalJob([*flags.split(), "--save", str(alone)]).fit()
    found, expected = (
        [(line["loss"], line["grad_norm"]) for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
        for folder in (tmp_path / "run", alone)
    )
    assert len(found) == 6
    assert found == [pytest.approx(values, rel=1e-4) for values in expected]
