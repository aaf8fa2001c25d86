"""What a training changes in a process that goes on after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rapidformer_templates.system.host_memory import allocate_as_usual
from rapidformer_templates.system.random_state import capture, restore

ENVIRONMENT = ("TOKENIZERS_PARALLELISM",)
"""Variables that are set for a training."""


@contextmanager
def kept_process_state() -> Iterator[None]:
    """After the body random numbers, the precision of matrix products, the environment and the allocator are as before.

    Of the allocator: as they are in a fresh process.
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
        allocate_as_usual()
