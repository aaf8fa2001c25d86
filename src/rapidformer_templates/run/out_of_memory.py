"""Suggests the next memory-saving step for a run that is out of memory.

The steps, each slower than the one before, follow the DeepSpeed guide [D]: batch 1, activation checkpointing,
mixed precision, ZeRO-2, its optimizer offloaded, ZeRO-3, its parameters and optimizer offloaded, and last a disk. If
ZeRO cannot run, FSDP shards the same states. Larger groups of workers that share a copy of the states come first.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from rapidformer_templates.errors import OutOfMemory, Refused, counted, is_out_of_memory
from rapidformer_templates.planning.changes import spell
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flag_values import Epochs
from rapidformer_templates.planning.plan import Plan

PARTITIONING = ("oss", "oss_sdp", "fsdp", "zero_1", "zero_2", "zero_3")

FIRST: tuple[Mapping[str, object], ...] = (
    {"micro_batch_size": 1},
    {"checkpoint_activations": True},
    {"recompute_granularity": "full"},
    {"mixed_precision": "bf16"},
    {"fsdp_reduce_every_micro_batch": True},
    {"fsdp_reshard_after_forward": True},
    {"quantize_base": "int8"},  # the rules refuse it without LoRA
)
"""Changes that save memory without additional workers."""

SEGMENTS = "expandable_segments"
"""Option of torch's allocator for GPUs. With it, freed memory leaves fewer holes."""


def _shard(by: str, **more: object) -> Mapping[str, object]:
    """Return the flags that select this sharding and disable all others."""
    chosen = {f"{name}_memory_optimization": name == by for name in PARTITIONING}
    return {**chosen, "fsdp_shard_size": None, "cpu_offload": False, "nvme_path": None, **more}


SHARDING = (
    _shard("zero_2"),
    _shard("zero_2", cpu_offload=True),
    _shard("zero_3"),
    _shard("zero_3", cpu_offload=True),
    _shard("zero_3", nvme_path="DIR"),
    _shard("fsdp"),  # where ZeRO cannot run: in a template other than Trainer, or without DeepSpeed
)


def _saving_rank(values: Callable[[str], object]) -> int:
    """Return the rank of a sharding by the memory it saves. Higher saves more."""
    if values("zero_3_memory_optimization"):
        return 7 if values("nvme_path") else 6 if values("cpu_offload") else 5
    if values("fsdp_memory_optimization"):
        return 4
    if values("zero_2_memory_optimization") or values("oss_sdp_memory_optimization"):
        return 3 if values("cpu_offload") else 2
    return int(bool(values("zero_1_memory_optimization") or values("oss_memory_optimization")))


def next_step(config: RunConfig, plan: Plan, resolve: Callable[[RunConfig], Plan]) -> str | None:
    """Return the flags of the next step that is valid, or None after the last one.

    Args:
        config: the configuration of the run that is out of memory. ``plan`` is its plan.
        resolve: returns a plan, or raises :class:`Refused`.
    """
    steps = [step for step in FIRST if not _is_taken(step, config, plan)]
    copies = plan.sizes.copies
    if copies > 1:  # a single worker cannot shard
        group = config.get("fsdp_shard_size") or copies
        steps += [{"fsdp_shard_size": n} for n in range(group + 1, copies + 1) if copies % n == 0]
        steps += [step for step in SHARDING if _saving_rank(step.get) > _saving_rank(config.get)]
    for step in steps:
        changed = {name: value for name, value in step.items() if config.get(name) != value}
        if "micro_batch_size" in step:
            changed["micro_batch_size"] = 1  # the flag may be open, and its value follow from the global batch
            changed["global_batch_size"] = plan.sizes.global_batch
            if config.training.epochs:  # a run by --epochs does not accumulate
                changed |= {"train_iters": Epochs(f"{config.training.epochs}epochs"), "epochs": None}
        try:
            resolve(config.replace("the ladder", **changed))
        except Refused:
            continue
        turned_off = [name for name, value in changed.items() if not value]
        return spell(changed) + (f" in place of {' '.join(map(spelling, turned_off))}" if turned_off else "")
    return None


def _is_taken(step: Mapping[str, object], config: RunConfig, plan: Plan) -> bool:
    """Whether a run has already taken one of the first steps."""
    ((name, value),) = step.items()
    if name == "micro_batch_size":
        return plan.sizes.micro_batch == value
    if name == "mixed_precision":
        return plan.precision != "fp32"
    if name == "quantize_base":
        return config.get(name) is not None
    if name == "recompute_granularity":
        return bool(config.get(name) != "selective")  # no recomputation, or already of whole blocks
    return bool(config.get(name) == value)


def explained(
    config: RunConfig, plan: Plan, rank: int, resolve: Callable[[RunConfig], Plan]
) -> AbstractContextManager[None]:
    """Return a context for a run. It converts a failed allocation to an error that suggests what to change.

    Raises:
        OutOfMemory: replaces the allocator's error.
    """

    def hint() -> str:
        step = next_step(config, plan, resolve)
        advice = f"the next step that saves memory: {step}" if step else "more workers, or a smaller model"
        options = "".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
        holes = plan.device == "cuda" and SEGMENTS not in options
        return f"{advice}; PYTORCH_ALLOC_CONF={SEGMENTS}:True leaves fewer holes" if holes else advice

    return _converted(f"{' → '.join(plan.switches)} on {counted(plan.sizes.world, 'worker')}", hint, f"worker {rank}")


def explained_without_plan(where: str, hint: str) -> AbstractContextManager[None]:
    """Return a context like :func:`explained` for work with a saved model, such as predictions.

    Args:
        where: the folder of the model.
        hint: what to change.
    """
    return _converted(where, lambda: hint)


@contextmanager
def _converted(where: str, hint: Callable[[], str], worker: str = "") -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        who = f"{worker} on {socket.gethostname()} is out of memory" if worker else "out of memory"
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise OutOfMemory(f"{who}: {reason}", where=where, hint=hint()) from error


def explained_while_building(plan: Plan, rank: int, *, is_divided: bool) -> AbstractContextManager[None]:
    """Return a context like :func:`explained` for building a model. Savings during a step do not help there.

    Args:
        is_divided: whether a worker keeps only its share of the model.
    """
    hint = "more workers, or a smaller model"
    if not is_divided:
        hint = "each worker builds the whole model: fewer workers per machine, a smaller model, or "
        hint += "--fsdp-memory-optimization, which divides it while it is built"
    where = f"while the model is built, {' → '.join(plan.switches)} on {counted(plan.sizes.world, 'worker')}"
    return _converted(where, lambda: hint, f"worker {rank}")
