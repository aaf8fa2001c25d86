"""Nodes on one machine: two torchruns on its loopback, examples for clusters, and a network that fails or is slow."""

import fcntl
import heapq
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import yaml

from rapidformer_templates.run.folder import read_metrics
from tests.support.jobs import CausalJob
from tests.support.parity import train
from tests.support.worker_pool import free_port

pytestmark = pytest.mark.distributed


TUN = Path("/dev/net/tun")
SET_INTERFACE, IS_TUN, WITHOUT_HEADER = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h


def why_impossible() -> str | None:
    """Return why this machine has no namespaces, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and the rights of an administrator"
    if not TUN.exists():
        return "there is no /dev/net/tun"
    name = f"rapidformer-{os.getpid()}-try"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not allowed: {error}"
    return None


class Network:
    """Nodes with the addresses 10.77.0.1, 10.77.0.2, … and interfaces ``wire0``, ``wire1``, …

    Attributes:
        cut: whether packets get lost without an answer.
        delay: seconds that a packet takes.
        loss: share of the packets that get lost.
    """

    def __init__(self, nodes: int) -> None:
        self.names = [f"rapidformer-{os.getpid()}-{node}" for node in range(nodes)]
        self.cut, self.delay, self.loss = False, 0.0, 0.0
        self._ended = threading.Event()
        self._queues = {self.address(node): os.open(TUN, os.O_RDWR | os.O_NONBLOCK) for node in range(nodes)}

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def popen(self, node: int, words: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a program on a node, whose host name is ``node-0``, ``node-1``, …"""
        script = f'hostname node-{node}; exec "$@"'
        command = ["ip", "netns", "exec", self.names[node], "unshare", "--uts", "sh", "-c", script, "sh", *words]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": f"wire{node}", **variables}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    @contextmanager
    def connected(self) -> Iterator["Network"]:
        """Create the namespaces, and carry packets inside the context."""
        thread = threading.Thread(target=self._carry, daemon=True)
        with ExitStack() as stack:
            for node, (name, queue) in enumerate(zip(self.names, self._queues.values(), strict=True)):
                stack.callback(os.close, queue)
                fcntl.ioctl(
                    queue, SET_INTERFACE, struct.pack("16sH22x", f"wire{node}".encode(), IS_TUN | WITHOUT_HEADER)
                )
                _ip(f"netns add {name}")
                stack.callback(_ip, f"netns delete {name}")
                _ip(f"link set wire{node} netns {name}")
                _ip(f"-n {name} address add {self.address(node)}/24 dev wire{node}")
                for interface in ("lo", f"wire{node}"):
                    _ip(f"-n {name} link set {interface} up")
            thread.start()
            stack.callback(thread.join)
            stack.callback(self._ended.set)
            yield self

    def _carry(self) -> None:
        draw = random.Random(0)
        waiting: list[tuple[float, int, bytes]] = []
        count = 0
        while not self._ended.is_set():
            for queue in wait(self._queues.values(), 0.002 if waiting else 0.05):
                packet, count = os.read(queue, 1 << 16), count + 1
                if not self.cut and draw.random() >= self.loss:
                    heapq.heappush(waiting, (time.monotonic() + self.delay, count, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                packet = heapq.heappop(waiting)[2]
                target = self._queues.get(".".join(map(str, packet[16:20])))  # the destination of IPv4
                if target is not None and packet[0] >> 4 == 4:
                    with suppress(OSError):  # an interface that takes no packet now loses it, as a cable would
                        os.write(target, packet)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


ROOT = Path(__file__).parents[2]
OF_BOTH = (
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
    words = [*command, str(script), *OF_BOTH.split(), "--save", str(save), "--resume"]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.longer
def test_two_nodes_train_as_one_process(tmp_path: Path) -> None:
    """Killing a worker is only tested by hand (docs/launching.md), because torchrun waits 30 s for the others."""
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
    alone = train("causal", False, OF_BOTH)
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
def network(request: pytest.FixtureRequest) -> Iterator["Network"]:
    if problem := why_impossible():
        pytest.skip(problem)
    with Network(getattr(request, "param", 2)).connected() as network:
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
    """Return the output of the workers. Kill the workers that have not ended after some time."""
    end = time.monotonic() + seconds
    said = []
    for worker in workers:
        try:
            said.append(worker.communicate(timeout=max(end - time.monotonic(), 1))[0])
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            said.append(worker.communicate()[0])
    return said


def wait_for_step(folder: Path, step: int, workers: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + 240
    while not any(line["step"] >= step for line in read_metrics(folder / "run" / "metrics.jsonl")):
        assert time.monotonic() < end, finish(workers, 5)
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
@pytest.mark.parametrize("network", [3], indirect=True)
def test_three_nodes_train_as_one_process_over_a_slow_and_lossy_network(network: Network, tmp_path: Path) -> None:
    """A packet takes 200 ms, and one of twenty gets lost."""
    flags = (
        "--micro-batch-size 2 --global-batch-size 12 --train-iters 6 --log-interval 1 --save-interval 3"
        " --no-export-model --device cpu --lr 1e-3 --worker-timeout 120"
    )
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
