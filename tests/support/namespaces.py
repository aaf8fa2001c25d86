"""Nodes in network namespaces of this machine, connected by a wire in this process that can be cut, slow or lossy.

The namespaces need the rights of an administrator. They, and the wire, end with the context.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

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
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @contextmanager
    def connected(self) -> Iterator[Network]:
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
            ready, _, _ = select.select(list(self._queues.values()), [], [], 0.002 if waiting else 0.05)
            for queue in ready:
                packet, count = os.read(queue, 1 << 16), count + 1
                if not self.cut and draw.random() >= self.loss:
                    heapq.heappush(waiting, (time.monotonic() + self.delay, count, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                packet = heapq.heappop(waiting)[2]
                target = self._queues.get(".".join(map(str, packet[16:20])))  # the destination of IPv4
                if target is not None and packet[0] >> 4 == 4:
                    os.write(target, packet)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)
