"""Ports of this machine, on which local workers meet. Imports no torch."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def why_not(port: int) -> str | None:
    """What is in the way of listening on a port, or None."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            return f"port {port} is kept for the administrator of this machine"
        except OSError:
            return f"port {port} is in use on this machine"
    return None
