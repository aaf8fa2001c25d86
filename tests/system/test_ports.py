"""The port that is reserved for the rendezvous of local workers."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from rapidformer_templates.system.launch import reserved_port


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
