"""Where workers meet: the reserved port, the interface that is listened on, and workers that cannot be reached."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from rapidformer_templates.errors import ConfigError, WorkerFailed
from rapidformer_templates.system import rendezvous
from rapidformer_templates.system.launch import reserved_port, run_workers

LOCAL = {"127.0.0.1", "::1"}


def test_a_store_listens_on_a_reserved_port() -> None:
    with reserved_port() as port:
        store = TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=10))
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_another_program_does_not_get_a_reserved_port() -> None:
    with (
        reserved_port() as port,
        socket.socket() as other,
        pytest.raises(OSError, match=rf"Errno {errno.EADDRINUSE}"),
    ):
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
    alone_at: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(WorkerFailed, match=rf"worker 1 cannot reach worker 0 at 127.0.0.1:{alone_at}: nobody listens"):
        rendezvous.open_store(timedelta(seconds=10))
    said = capfd.readouterr().err
    assert said.count("nobody listens there") == 1  # before the error, and no stacks of torch
    assert len(said.splitlines()) == 2


def test_a_worker_that_does_not_come_is_named(alone_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")

    def come(store: TCPStore, world: int, where: str) -> None:
        store.set("rapidformer/came/1", "")
        wait(store, world, where)

    wait = rendezvous._wait_for_workers
    monkeypatch.setattr(rendezvous, "_wait_for_workers", come)
    with pytest.raises(WorkerFailed, match=rf"1 of 3 workers have not connected to 127.0.0.1:{alone_at}: 2\n"):
        rendezvous.open_store(timedelta(seconds=10))


def test_a_port_in_use_is_named(alone_at: int) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", alone_at))
        other.listen()
        with pytest.raises(WorkerFailed, match=f"cannot listen at 127.0.0.1:{alone_at}: Address already in use"):
            rendezvous.open_store(timedelta(seconds=10))


def test_a_missing_address_is_named(alone_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match="RANK is set, but MASTER_ADDR or MASTER_PORT is not"):
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
