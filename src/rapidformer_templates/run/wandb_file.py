"""Reads the local files that wandb has written for a run.

Wandb's files are LevelDB logs with a different header. Each entry is a ``Record`` of its protocol. In the wandb package
only its own program can read them, and it offers no interface.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEAD = 7
"""Bytes before the first block, and before each piece of an entry."""

BLOCK = 32768
WHOLE, FIRST, LAST = 1, 2, 4


def entries(path: Path) -> Iterator[bytes]:
    """Yield the complete entries. The file of a killed run may end anywhere."""
    data = path.read_bytes()
    position, entry = HEAD, b""
    while position + HEAD <= len(data):
        room = BLOCK - position % BLOCK
        if room < HEAD:
            position += room  # the rest of a block has no room for a header
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        piece = data[position + HEAD : position + HEAD + length]
        if len(piece) < length or kind == 0:
            return
        position += HEAD + length
        entry = piece if kind in (WHOLE, FIRST) else entry + piece
        if kind in (WHOLE, LAST):
            yield entry


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the logged values of each step, in the order in which they were logged. ``_step`` is the step."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for entry in entries(path):
        record = Record()
        record.ParseFromString(entry)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
