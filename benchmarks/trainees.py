"""The runs that ``benchmarks faults`` kills: a small GPT with dropout that reads the bytes of Python's own sources.

:func:`live` is the life of one process of such a run. The process is forked from one that has imported this module, so
this module imports everything that is slow to import.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401  (a finished run draws its curves)
import torch
import transformers
from safetensors import safe_open
from torch import nn
from tqdm import tqdm
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.models import callbacks, gpt2, trainer_arguments
from rapidformer_templates.data.types import Data
from rapidformer_templates.run.checkpoint import check as checkpoint_check
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.folder import RunFolder, read_metrics
from rapidformer_templates.trainer import Trainer

STEPS, SAVE_EVERY, EVALUATE_EVERY, BATCH, LENGTH, LR = 60, 3, 20, 8, 64, 1e-3

TIMINGS = {"samples_per_second", "tokens_per_second", "step_ms", "peak_memory_mb"}
"""Fields of a metrics line that differ between any two runs."""


class Place(IntEnum):
    """State of a process. The number is in shared memory, where the watching process reads it."""

    START = 0
    STEP = 1
    SAVE = 2
    END = 3


Outcome = dict[str, list[Any]]
"""Parts that are the same in two equal runs: lines of metrics, and contents of files."""


def live(trainee: str, folder: str, place: Any) -> None:
    """Start the run in ``folder``, or resume it, and end the process when the run is complete.

    Args:
        trainee: A key of :data:`TRAINEES`.
        folder: Folder of the run. The output of the process is appended to ``FOLDER.log``.
        place: Shared value that is set to what the process is doing.
    """
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tqdm.set_lock(threading.RLock())  # tqdm's own lock is a semaphore between processes, which a kill would leak
    torch.set_num_threads(1)
    TRAINEES[trainee].live(Path(folder), place)


def text_samples() -> list[dict[str, torch.Tensor]]:
    """Return pieces of the source of Python's argparse as bytes, for a causal language model."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    return [{"input_ids": piece, "labels": piece} for piece in text.split(LENGTH) if len(piece) == LENGTH]


def small_gpt() -> Any:
    """Build a small GPT. Dropout is 0.1 everywhere, so the losses show if a random state was not restored."""
    return gpt2(2, 32, 2, 256, LENGTH, dropout=0.1)


def _stand(place: Any, where: Place) -> None:
    place.value = where


def _saving(function: Callable[..., Any], place: Any) -> Callable[..., Any]:
    """Wrap a function that saves, so that ``place`` shows the save while it runs."""

    def marked(*arguments: Any, **keywords: Any) -> Any:
        before, place.value = place.value, Place.SAVE
        result = function(*arguments, **keywords)
        place.value = before
        return result

    return marked


class Ours:
    """A run of this library. Each process runs the same command with ``--resume``."""

    name = "rapidformer_templates"

    def live(self, folder: Path, place: Any) -> None:
        checkpoint.save = _saving(checkpoint.save, place)
        checkpoint_check.delete_older = _saving(checkpoint_check.delete_older, place)

        class Job(Trainer):
            def build_data(self) -> Data:
                samples = text_samples()
                return Data(train=samples[16:], valid=samples[:16])

            def build_model(self) -> nn.Module:
                return small_gpt()

            def on_train_start(self) -> None:
                place.value = Place.STEP

            def on_checkpoint(self, step: int, folder: Path) -> None:
                if step == STEPS:
                    place.value = Place.END

        flags = (
            f"--train-iters {STEPS} --micro-batch-size {BATCH} --lr {LR} --log-interval 1"
            f" --save-interval {SAVE_EVERY} --eval-interval {EVALUATE_EVERY} --device cpu --resume --save"
        )
        Job([*flags.split(), str(folder)]).fit()

    def outcome(self, folder: Path) -> Outcome:
        root = RunFolder(folder)
        lines = read_metrics(root.metrics)
        final = checkpoint.folder_of(root.checkpoints, STEPS)
        return {
            "metrics.jsonl": [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines],
            **{path.name: _contents(path) for path in sorted(final.glob("*.safetensors"))},
            "exported weights": _contents(root.export / "model.safetensors"),
        }


class TransformersTrainer:
    """The same run with transformers' Trainer, resumed from its last checkpoint as in its examples."""

    name = "transformers' Trainer"

    def live(self, folder: Path, place: Any) -> None:
        watch = callbacks(
            on_train_begin=lambda: _stand(place, Place.STEP), on_train_end=lambda: _stand(place, Place.END)
        )

        arguments = trainer_arguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=LR,
            logging_steps=1,
            save_steps=SAVE_EVERY,
            save_total_limit=2,
            eval_strategy="steps",
            eval_steps=EVALUATE_EVERY,
        )
        transformers.set_seed(arguments.seed)
        samples = text_samples()
        job = transformers.Trainer(
            small_gpt(), arguments, train_dataset=samples[16:], eval_dataset=samples[:16], callbacks=watch
        )
        saver: Any = job
        saver._save_checkpoint = _saving(saver._save_checkpoint, place)
        last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        job.train(resume_from_checkpoint=last)
        job.save_model(str(folder / "export"))

    def outcome(self, folder: Path) -> Outcome:
        final = folder / f"checkpoint-{STEPS}"
        history = json.loads((final / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        timings = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
        return {
            "log_history": [{k: v for k, v in line.items() if k not in timings} for line in history],
            "checkpoint weights": _contents(final / "model.safetensors"),
            "exported weights": _contents(folder / "export" / "model.safetensors"),
        }


def _contents(path: Path) -> list[tuple[str, Any]]:
    """Return the contents of a safetensors file, bit for bit. The metadata are sorted: their order varies."""
    with safe_open(path, "pt") as file:
        tensors = [(name, file.get_tensor(name).numpy().tobytes()) for name in sorted(file.keys())]
        return [*sorted((file.metadata() or {}).items()), *tensors]


TRAINEES: dict[str, Ours | TransformersTrainer] = {"ours": Ours(), "transformers": TransformersTrainer()}
