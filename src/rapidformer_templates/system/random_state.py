"""The state of a process: all random number generators, as tensors and text, and the other settings of a training."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rapidformer_templates.system import accelerator
from rapidformer_templates.system.host_memory import use_default_allocator

ENVIRONMENT = ("TOKENIZERS_PARALLELISM",)
"""Environment variables that a training sets."""


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


@contextmanager
def kept_process_state() -> Iterator[None]:
    """Restore random states, matmul precision, environment and allocator after the context.

    The allocator gets the settings of a fresh process.
    """
    random_state, precision = capture(), torch.get_float32_matmul_precision()
    environment = {name: os.environ.get(name) for name in ENVIRONMENT}
    try:
        yield
    finally:
        restore(*random_state)
        torch.set_float32_matmul_precision(precision)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        use_default_allocator()
