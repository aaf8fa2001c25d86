"""Loader processes do not touch the objects of the process from which they were forked."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch.utils.data import Dataset

from rapidformer_templates.data.loader import load
from rapidformer_templates.data.order import BatchRequest
from rapidformer_templates.data.types import Data


class Group:
    """Writes a file when it is collected. A process group's destructor would wait for its threads in the same way."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "collected"
        self.itself = self

    def __del__(self) -> None:
        self.file.touch()


class Collecting(Dataset[torch.Tensor]):
    """Collects garbage at each sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.tensor(index)


def test_a_loader_process_leaves_the_garbage_of_its_parent(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        Group(tmp_path)
        requests = [BatchRequest([index], (0,), [index]) for index in range(4)]
        batches = list(load(Collecting(), Data(train=Collecting()), requests, workers=2, pin_memory=False))
        assert [batch.samples for batch in batches] == [[0], [1], [2], [3]]
        assert not (tmp_path / "collected").exists()
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "collected").exists()
