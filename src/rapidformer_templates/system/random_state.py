"""The states of all random number generators, as tensors and text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rapidformer_templates.system import accelerator


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators (on every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the state as (tensors, text) for :func:`restore`."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    device = accelerator.current()
    if device is not None:
        tensors[device.type] = accelerator.random_state(device)
    text = {
        "python": json.dumps([version, gauss]),
        "numpy": json.dumps([str(kind), int(position), int(has_gauss), float(cached)]),
    }
    return tensors, text


def restore(tensors: dict[str, torch.Tensor], text: dict[str, str]) -> None:
    """Restore a state from :func:`capture`, for the devices of this machine."""
    version, gauss = json.loads(text["python"])
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = json.loads(text["numpy"])
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    device = accelerator.current()
    if device is not None and device.type in tensors:
        accelerator.set_random_state(device, tensors[device.type])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators inside the context and restore their previous states after it."""
    before = capture()
    seed_all(seed)
    try:
        yield
    finally:
        restore(*before)
