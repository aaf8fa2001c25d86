"""The reference model of a preference: the model without adapters, a frozen copy, or precomputed outputs.

Precomputed log-probabilities are stored in the run folder. A resumed run reads them from there, because its model has
changed by then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from rapidformer_templates.data.collate import Ragged, TokenizedSamples
from rapidformer_templates.data.finetuning.tables import part_name
from rapidformer_templates.data.loader import eval_requests, on_device
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.data.tasks.preference import Preference
from rapidformer_templates.engines.forwards import evaluating
from rapidformer_templates.errors import CheckpointError, DataError
from rapidformer_templates.models.adapters import fingerprint, identity_of, without_adapters
from rapidformer_templates.planning.flag_values import TEST
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.run import Run
from rapidformer_templates.system.files import JSON_ERRORS, sync, writing


def compared_task(task: Task | None) -> Preference | None:
    """Return the task of a run if its losses compare the model with a reference."""
    return task if isinstance(task, Preference) and task.needs_reference else None


@contextmanager
def allow_trial(task: Task | None) -> Iterator[None]:
    """Allow transforms inside the context to try the loss of a preference before there is a reference."""
    compared = compared_task(task)
    if compared is None:
        yield
        return
    compared.is_tried = True
    try:
        yield
    finally:
        compared.is_tried = False


def provide_reference(run: Run, build: Callable[[], nn.Module]) -> None:
    """Give the task its reference model.

    Args:
        build: builds a frozen copy of the untrained model.
    """
    task = compared_task(run.task)
    if task is None:
        return
    if run.config.training.precompute_reference:
        task.reference = nullcontext  # the model itself, before its first step
    elif run.engine.assembly.base is not None:
        task.reference = without_adapters
    else:
        copy = build()
        task.reference = lambda model: nullcontext(copy)


class Precomputed:
    """Adds log-probabilities of the reference to the samples of the run.

    Args:
        task: compares the model with the reference.
        identity: identity of the reference model, as it was built.
    """

    def __init__(self, run: Run, task: Preference, identity: str) -> None:
        self.run, self.task = run, task
        data = run.data
        evaluated = {part_name(name): samples for name, samples in data.validation_sets().items()}
        named: Mapping[str, Any] = {"train": data.train, **evaluated, TEST: data.test}
        self.parts: dict[str, TokenizedSamples] = {name: part for name, part in named.items() if part}
        self.identity = {
            "model": identity,
            "load": run.config.training.load,
            "data": {name: _digest(samples) for name, samples in self.parts.items()},
        }

    def attach(self, folder: RunFolder | None, *, saved: RunFolder | None) -> None:
        """Add the log-probabilities to the samples. They are computed now, or read if a run continues.

        Args:
            folder: folder of this run, in which they are stored.
            saved: folder of the run that continues, a different one with ``--load``. None computes them.

        Raises:
            CheckpointError: they are missing, or were computed for another model or other data.
        """
        if saved is not None:
            is_own = folder is not None and saved.path == folder.path
            values = self._read(saved.reference, ("model", "load", "data") if is_own else ("model", "data"))
        else:
            values = {name: self._computed(samples) for name, samples in self.parts.items()}
        if folder and (saved is None or saved.path != folder.path) and self.run.workers.is_main:
            metadata = {"of": json.dumps(self.identity, sort_keys=True)}
            temporary = folder.reference.with_name(folder.reference.name + ".tmp")
            with writing(folder.reference):
                save_file({name: torch.tensor(rows) for name, rows in values.items()}, temporary, metadata=metadata)
                sync(temporary)
                temporary.rename(folder.reference)
        self.task.reference = _refuse_other_data
        for name, samples in self.parts.items():
            fields = ("reference_chosen_logps", "reference_rejected_logps")
            if "kl_input_ids" in samples.fields:  # KTO, which judges single answers
                fields = ("reference_logps", "reference_kl_logps")
            columns = zip(*values[name], strict=True)
            samples.fields |= {field: list(column) for field, column in zip(fields, columns, strict=True)}

    def _read(self, path: Path, compared: Sequence[str]) -> Mapping[str, list[list[float]]]:
        try:
            with safe_open(path, framework="pt") as file:
                of = dict(json.loads(file.metadata()["of"]))
                values = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118 - no mapping
        except (*JSON_ERRORS, SafetensorError) as error:
            message = f"the log-probabilities of the reference cannot be read: {error}"
            hint = "start again with --overwrite: the model that they come from has been trained since"
            raise CheckpointError(message, where=str(path), hint=hint) from error
        other = [name for name in compared if of.get(name) != self.identity[name]]
        if other:
            message = f"the log-probabilities of the reference belong to another {' and '.join(other)}"
            hint = "continue with the model and the data that the run began with, or start again with --overwrite"
            raise CheckpointError(message, where=str(path), hint=hint)
        return values

    def _computed(self, samples: TokenizedSamples) -> list[list[float]]:
        """Return the log-probabilities of the two rows of each sample."""
        run, sizes, workers = self.run, self.run.plan.sizes, self.run.workers
        requests = eval_requests(
            samples.lengths, len(samples), 0, rank=workers.data_rank, data_size=sizes.data,
            micro_batch=sizes.micro_batch,
        )  # fmt: skip
        logps: list[tuple[int, list[float]]] = []
        with evaluating(run.engine.model):
            for microbatch in on_device(run.load(samples, requests), workers.device, ahead=1):
                outputs = self.task.reference_of(run.engine.eval_batch, microbatch)
                if workers.is_replica_leader and not microbatch.idle:
                    logps += zip(microbatch.samples, outputs, strict=True)
        run.engine.end_forwards()
        everywhere = dict(entry for share in workers.gather(logps) for entry in share)
        return [everywhere[i] for i in range(len(samples))]


def precomputed_reference(run: Run) -> Precomputed | None:
    """Return the precomputed reference of a run, or None if the flags do not ask for one."""
    task = compared_task(run.task)
    if task is None or not run.config.training.precompute_reference:
        return None
    base = run.engine.assembly.base
    if base is not None:
        return Precomputed(run, task, base.identity)
    digest = identity_of({name: fingerprint(tensor) for name, tensor in run.engine.whole_weights()})
    return Precomputed(run, task, run.workers.broadcast(digest))


def _refuse_other_data(model: nn.Module) -> AbstractContextManager[nn.Module]:
    """Replace the reference after it was precomputed. The model has been trained and changed by then."""
    message = "the reference was computed once, for the data of the run, and this is other data"
    hint = "evaluate the run's own data, or train without --precompute-reference"
    raise DataError(message, where="--precompute-reference", hint=hint)


def _digest(samples: TokenizedSamples) -> str:
    """Return a digest of all tokens and labels."""
    digest = hashlib.sha256()
    for name, field in sorted(samples.fields.items()):
        digest.update(name.encode())
        for array in (field.values, field.lengths) if isinstance(field, Ragged) else (np.asarray(field),):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
