"""Tables are built once for all processes. They are either complete or missing."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer_templates.data.indexed.cache import IndexCache
from rapidformer_templates.errors import DataError
from tests.support.worker_pool import new_process


def _ask(root: Path, barrier: Any, results: Any) -> None:
    made = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        return {"a": np.arange(100_000), "b": np.ones(3)}

    barrier.wait()
    tables = IndexCache(root)("group", make)
    results.put((len(made), int(tables["a"].sum()), tables["b"].tolist()))


@pytest.mark.slow
def test_two_processes_make_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [new_process(_ask, tmp_path / "cache", barrier, results) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(made for made, *_ in found) == 1
    assert [rest for _, *rest in found] == [[4999950000, [1.0, 1.0, 1.0]]] * 2


def test_what_a_killed_process_left_is_written_over(tmp_path: Path) -> None:
    half = tmp_path / "group.tmp"
    half.mkdir()
    (half / "a.npy").write_bytes(b"half")
    tables = IndexCache(tmp_path)("group", lambda: {"a": np.arange(4)})
    assert tables["a"].tolist() == [0, 1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["group", "group.lock"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match="No space left") as caught:
        IndexCache(tmp_path)("group", lambda: {"a": np.arange(4)})
    assert "--data-cache-dir" in str(caught.value.hint)
    assert not (tmp_path / "group").exists()


def test_a_damaged_table(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    cache("group", lambda: {"a": np.arange(4)})
    for size in (130, 0):
        os.truncate(tmp_path / "group" / "a.npy", size)
        with pytest.raises(DataError, match="the cache of the sample index is damaged") as caught:
            cache("group", lambda: {"a": np.arange(4)})
        assert caught.value.where == str(tmp_path / "group")
