"""Where workers meet: ports, interfaces, and the variables of a launcher."""

import errno
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed import TCPStore

from rapidformer_templates import Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ConfigError, WorkerFailed
from rapidformer_templates.planning.environment import Launched, launched
from rapidformer_templates.run.early_checks import exit_on_mistakes_of_program
from rapidformer_templates.system import launch, rendezvous
from rapidformer_templates.system.launch import reserved_port, run_workers
from rapidformer_templates.system.workers import join
from tests.support.lines import FLAGS, Line
from tests.support.messages import Says

LOCAL = {"127.0.0.1", "::1"}


def test_another_program_does_not_get_a_reserved_port() -> None:
    with reserved_port() as port, socket.socket() as other, pytest.raises(OSError, match=rf"Errno {errno.EADDRINUSE}"):
        other.bind(("127.0.0.1", port))


def listened_on() -> set[str]:
    """Return the addresses on which this process listens, as the kernel reports them."""
    links = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.add(os.readlink(descriptor))
        except OSError:  # the descriptor of the folder itself
            continue
    addresses = set()
    for table, family, size in (("tcp", socket.AF_INET, 4), ("tcp6", socket.AF_INET6, 16)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                words = bytes.fromhex(fields[1].partition(":")[0])  # 32-bit words in the order of the machine
                ordered = b"".join(words[i : i + 4][::-1] for i in range(0, size, 4))
                addresses.add(socket.inet_ntop(family, ordered))
    return addresses


@pytest.fixture
def alone_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port at which this process is the only worker of a run."""
    with reserved_port() as port:
        variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**variables, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(rendezvous, "NOTE_AFTER", 0.1)
        monkeypatch.setattr(rendezvous, "PATIENCE", 0.3)
        yield port
    rendezvous._connected.cache_clear()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_listens_on_the_named_interface_only(
    address: str, alone_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    before = listened_on()
    assert before <= LOCAL
    store = rendezvous.open_store(timedelta(seconds=10))
    assert listened_on() == before | {"127.0.0.1"}
    assert rendezvous.open_store(timedelta(seconds=10)) is store  # for the next process group


WORKER = """
from rapidformer_templates.system.launch import report_errors
from rapidformer_templates.system.workers import join
from tests.system.test_ports import LOCAL, listened_on

def work():
    with join("cpu") as workers:
        workers.barrier()
        assert listened_on() and listened_on() <= LOCAL, listened_on()
        workers.barrier()

report_errors(work)
"""


@pytest.mark.longer
@pytest.mark.distributed
def test_no_local_worker_can_be_reached_from_another_machine() -> None:
    """Neither the store nor gloo listens on an interface of the network."""
    run_workers([sys.executable, "-c", WORKER], 2, more={"PYTHONPATH": os.pathsep.join(sys.path)})


def test_nobody_listens_where_the_workers_meet(
    alone_at: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], says: Says
) -> None:
    monkeypatch.setenv("RANK", "1")
    with says(WorkerFailed, PORT=alone_at):
        rendezvous.open_store(timedelta(seconds=10))
    said = capfd.readouterr().err
    assert said.count("nobody listens there") == 1  # before the error, and no stacks of torch
    assert len(said.splitlines()) == 2


def test_a_worker_that_does_not_come_is_named(alone_at: int, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    connect = rendezvous._connected

    def connected_with_one(*arguments: Any) -> TCPStore:
        store = connect(*arguments)
        store.set("rapidformer/came/1", "")
        return store

    with monkeypatch.context() as patch, says(WorkerFailed, PORT=alone_at):
        patch.setattr(rendezvous, "_connected", connected_with_one)
        rendezvous.open_store(timedelta(seconds=10))


def test_a_port_in_use_is_named(alone_at: int, says: Says) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", alone_at))
        other.listen()
        with says(WorkerFailed, PORT=alone_at):
            rendezvous.open_store(timedelta(seconds=10))


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"MASTER_ADDR": "203.0.113.1"}, True),  # an address for documentation, which no machine has
        ({"MASTER_ADDR": "203.0.113.1", "GLOO_SOCKET_IFNAME": "eth0"}, False),
        ({"MASTER_ADDR": "203.0.113.1", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"MASTER_ADDR": "127.0.0.1"}, False),  # two launchers on one machine
    ],
)
def test_a_host_name_of_the_loopback_is_refused_with_several_nodes(
    variables: dict[str, str], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    if not refused:
        rendezvous.check_interface()
        return
    with pytest.raises(WorkerFailed, match=r"the host name localhost resolves to .* cannot reach") as error:
        rendezvous.check_interface()
    assert "GLOO_SOCKET_IFNAME" in str(error.value.hint)


ALONE = [*FLAGS, "--train-iters", "2", "--no-save", "--device", "cpu"]
IGNORED: list[dict[str, str]] = [
    {"WORLD_SIZE": "2"}, {"WORLD_SIZE": "two"}, {"RANK": "3", "WORLD_SIZE": ""}, {"RANK": "", "WORLD_SIZE": "2"},
    {"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8"},
    {"LOCAL_RANK": "x", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "none"},
]  # fmt: skip
IMPOSSIBLE: list[dict[str, str]] = [
    {"RANK": "3", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "-1", "WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "two"}, {"RANK": "first", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "0"},
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"},
    {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "8"},
]  # fmt: skip


def in_words(variables: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variables", IGNORED, ids=in_words)
def test_an_incomplete_set_is_ignored_with_a_note(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_all(monkeypatch, variables)
    job = Line(ALONE)
    assert job.fit()["steps"] == 2
    assert job.is_main
    assert (job.plan.sizes.world, job.plan.sizes.local_world) == (1, 1)
    names = ", ".join(name for name in variables if not name.startswith("MASTER"))
    note = f"note       {names}: ignored, because only RANK and WORLD_SIZE together make a worker"
    assert note in capsys.readouterr().err
    assert {name: os.environ[name] for name in variables} == variables


@pytest.mark.parametrize("variables", IMPOSSIBLE, ids=in_words)
def test_a_complete_but_impossible_set_is_refused(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_all(monkeypatch, variables)
    told = f"error: no launcher sets {in_words(variables)}\n  where  the environment\n  help   ranks count from 0"
    with pytest.raises(ConfigError, match="no launcher sets"):
        Line(ALONE).fit()
    script = ModuleType("__main__")
    script.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for program in (
        lambda: sys.exit(main(["--task", "causal_lm", "--lr", "1"])), lambda: sys.exit(main(["plan"])),
        lambda: Line.main(epochs=1), exit_on_mistakes_of_program,
    ):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            program()
        assert told in capsys.readouterr().err


def test_a_complete_set_makes_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {"RANK": "5", "WORLD_SIZE": " 8"})
    assert launched() == Launched(rank=5, world=8, local_rank=0, local_world=8)
    set_all(monkeypatch, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert launched() == Launched(rank=5, world=8, local_rank=1, local_world=4)
    assert launch.is_worker()
    assert not launch.is_first_worker()


@pytest.mark.parametrize("address", [":1", "127.0.0.1:", "127.0.0.1:none", "127.0.0.1:0", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(address: str, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    variables = dict(zip(("MASTER_ADDR", "MASTER_PORT"), address.split(":"), strict=True))
    set_all(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", **variables})
    with says(ConfigError), join("cpu"):
        raise AssertionError("it joined")


@pytest.mark.parametrize(
    ("name", "launcher"),
    [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpiexec")],
)
def test_processes_of_a_launcher_that_connects_none_are_told_so(
    name: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, is_told in (("4", True), ("1", False), ("many", False)):
        monkeypatch.setenv(name, count)
        notes = " ".join(Trainer([*ALONE, "--task", "causal_lm"]).plan.notes)
        assert (f"{launcher} has started {count} processes, and each trains alone" in notes) == is_told
    set_all(monkeypatch, {name: "4", "RANK": "0", "WORLD_SIZE": "4"})
    assert launcher not in " ".join(Trainer([*ALONE, "--task", "causal_lm"]).plan.notes)
