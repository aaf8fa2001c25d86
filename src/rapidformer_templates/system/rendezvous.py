"""The key-value store in which workers meet: on one network interface, and with the network's errors in words."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import time
from datetime import timedelta
from functools import lru_cache

from torch._C._distributed_c10d import TCPStore

from rapidformer_templates.errors import ConfigError, WorkerFailed
from rapidformer_templates.system.launch import INTERFACE, LOOPBACK

NOTE_AFTER = 20.0
"""Seconds without a connection after which a worker says what it waits for."""

PATIENCE = 600.0
"""Seconds that workers have to come, because nodes of a cluster do not start at the same time."""


def open_store(timeout: timedelta) -> TCPStore:
    """Return the key-value store at ``MASTER_ADDR`` and ``MASTER_PORT``, when all workers have connected to it.

    Rank 0 serves it, or torchrun's agent. A process keeps its store, so that its later process groups find it.

    Args:
        timeout: how long a later request to the store waits.

    Raises:
        ConfigError: a variable is missing.
        WorkerFailed: the address cannot be reached, its port is in use, or a worker does not come.
    """
    address, port_text = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    port = int(port_text) if port_text.isdecimal() else 0
    if not address or port not in range(1, 2**16):
        hint = "start the workers with --nproc-per-node or torchrun, or set MASTER_ADDR and MASTER_PORT"
        raise ConfigError("RANK is set, but MASTER_ADDR or MASTER_PORT is not", hint=hint)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _connected(address, port, rank, world, timeout)
    store.set(f"rapidformer/came/{rank}", "")
    wait, missing = _Wait(), list(range(1, world)) if rank == 0 else []
    while missing := [rank for rank in missing if not store.check([f"rapidformer/came/{rank}"])]:
        names = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        hint = "check that they run, their MASTER_ADDR and MASTER_PORT, and whether a firewall lets them pass"
        wait.go_on(f"{len(missing)} of {world} workers have not connected to {address}:{port}: {names}", hint)
    return store


@lru_cache(maxsize=1)
def _connected(address: str, port: int, rank: int, world: int, timeout: timedelta) -> TCPStore:
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listening = _listen(address, port)
        # With multi_tenant, a group that the user's code opens shares the store.
        return TCPStore(
            address, port, world, True, timeout, False, multi_tenant=True,
            master_listen_fd=listening.detach() if listening else None,
        )  # fmt: skip
    _wait_until_served(address, port, rank)
    return TCPStore(address, port, world, False, timeout)


def _listen(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens on the interface of an address only. Torch would listen on all of them.

    None if the address is not of this machine, or is a name that other nodes may resolve to another interface.
    """
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    try:
        ip = ipaddress.ip_address(address if address != "localhost" or not is_one_machine else "127.0.0.1")
    except ValueError:
        return None
    listening = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((str(ip), port))
        listening.listen(socket.SOMAXCONN)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRNOTAVAIL:  # an address that a router translates
            return None
        raise WorkerFailed(
            f"worker 0 cannot listen at {address}:{port}: {error.strerror}",
            hint="choose another --master-port, or leave it out for a free one",
        ) from error
    return listening


class _Wait:
    """A wait for other workers. It says after a while what it waits for, and ends some time later."""

    def __init__(self) -> None:
        self._start, self._is_noted = time.monotonic(), False

    def go_on(self, message: str, hint: str) -> None:
        """Sleep a moment, or raise a :class:`WorkerFailed` with this message after :data:`PATIENCE`."""
        seconds = time.monotonic() - self._start
        if seconds > PATIENCE:
            raise WorkerFailed(message, hint=hint)
        if seconds > NOTE_AFTER and not self._is_noted and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{message} (waiting for {PATIENCE:.0f} s)\n  help   {hint}", file=sys.stderr, flush=True)
            self._is_noted = True
        time.sleep(0.05)


def _wait_until_served(address: str, port: int, rank: int) -> None:
    """Wait until somebody listens at an address. Torch would print a stack for each attempt."""
    wait = _Wait()
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
        except socket.gaierror:
            reason, hint = "its name cannot be resolved", "check MASTER_ADDR, or give it the address of worker 0's node"
        except ConnectionRefusedError:
            reason, hint = "nobody listens there", "check that worker 0 runs, and MASTER_ADDR and MASTER_PORT"
        except OSError as error:
            reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            hint = "check MASTER_ADDR, and whether a firewall lets the nodes reach each other"
        else:
            return
        wait.go_on(f"worker {rank} cannot reach worker 0 at {address}:{port}: {reason}", hint)


def check_interface() -> None:
    """Check that gloo would not tell workers on other nodes a loopback address, which it takes from the host's name.

    Raises:
        WorkerFailed: the name of this host is one of its loopback addresses, as Debian's installer sets it.
    """
    name, master = socket.gethostname(), os.environ.get("MASTER_ADDR", "")
    on_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if not master or os.environ.get(INTERFACE) or on_one_node:  # open_store says that there is no master
        return
    own = _address_of(name)
    if own is None or not ipaddress.ip_address(own).is_loopback or _is_own(_address_of(master)):
        return
    others = [interface for _, interface in socket.if_nameindex() if interface not in LOOPBACK]
    raise WorkerFailed(
        f"the host name {name} resolves to {own}, which workers on other nodes cannot reach",
        where="/etc/hosts",
        hint=f"set {INTERFACE} on each node to its network interface ({', '.join(others)}), or correct the address",
    )


def _address_of(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return None


def _is_own(address: str | None) -> bool:
    """Return whether an address belongs to this machine. It does if a socket can be bound to it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in (address or "") else socket.AF_INET) as probe:
            probe.bind((address or "", 0))
    except OSError:
        return False
    return address is not None
