"""Helpers for measuring an export: weights without an engine, and the growth of this process."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from rapidformer_templates.engines.shards import Shard, ShardKind, whole_shard
from rapidformer_templates.system.process_state import return_freed_memory


class Weights:
    """The weights of a model, with the interface of an engine that a checkpoint needs."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def shards(self, kind: ShardKind) -> Iterator[Shard]:
        named = self.model.named_parameters() if kind == "weights" else ()
        return (whole_shard(name, parameter.detach()) for name, parameter in named)

    def state(self) -> dict[str, object]:
        return {}


@contextmanager
def growth_of_process() -> Iterator[Callable[[], int]]:
    """Yield a function that returns by how many bytes this process grew at most, without mapped files."""

    def resident() -> int:
        found = re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
        assert found is not None
        return int(found[1]) * 1024

    return_freed_memory()
    before = peak = resident()
    is_over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.001):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: peak - before
    finally:
        is_over.set()
        thread.join()
