"""Keeps the output of transformers, peft and DeepSpeed out of this library's output."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide progress bars, load reports and log messages while transformers reads or writes a model.

    Every worker would print them. When a model is saved, accelerate imports DeepSpeed, which logs a message, too.
    """
    disabled, bars = logging.root.manager.disable, transformers_logging.is_progress_bar_enabled()
    logging.disable(max(disabled, logging.WARNING))
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(disabled)
        if bars:
            transformers_logging.enable_progress_bar()
