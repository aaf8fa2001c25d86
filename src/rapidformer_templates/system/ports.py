"""Ports of this machine for the rendezvous of local workers. Imports no torch."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free port of this machine, which no other process is given inside the context.

    A socket that is bound but does not listen reserves the port. A worker can still listen on it, because both sockets
    set ``SO_REUSEADDR``.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def port_problem(port: int) -> str | None:
    """Return why this process cannot listen on a port, or None if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            return f"port {port} is reserved for the administrator of this machine"
        except OSError:
            return f"port {port} is in use on this machine"
    return None
