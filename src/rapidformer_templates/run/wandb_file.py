"""Reading of what wandb has written of a run on this machine.

wandb's files are logs of LevelDB with a head of their own; each entry is a ``Record`` of its protocol. In the
package only its own program reads them, which tells no other.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEAD = 7
"""Bytes before the first block, and those before each piece of an entry."""

BLOCK = 32768
WHOLE, FIRST, LAST = 1, 2, 4


def entries(path: Path) -> Iterator[bytes]:
    """The entries that were written to their end; those of a run that was killed stop somewhere."""
    data = path.read_bytes()
    position, entry = HEAD, b""
    while position + HEAD <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEAD:
            position += left  # a block's rest that has no room for a head
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
    """What was told of each step, in the order in which it was told; ``_step`` is the step."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for entry in entries(path):
        record = Record()
        record.ParseFromString(entry)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
