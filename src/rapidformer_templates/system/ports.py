"""Ports of this machine for the rendezvous of local workers. Imports no torch."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
