"""Compares the values that several workers have (``--check-replicas``).

Workers that have the same part of a parameter must have equal values of it. Each worker knows the parts
that it has, so the comparison needs no list of groups: replicas of data parallelism, the copies of hybrid sharding,
norms under tensor parallelism and embeddings that two stages share are all compared.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rapidformer_templates.engines.optimizer_state import plain_tensors
from rapidformer_templates.engines.shards import Shard, shard_of
from rapidformer_templates.errors import ReplicasDiffer
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.run.run import Run
from rapidformer_templates.system import accelerator

SHOWN = 3
"""Largest number of differences that a message lists."""

CHUNK = 2**22
"""Elements of a tensor that are copied at a time if its memory cannot be read in words."""


Part = tuple[str, str, torch.Tensor]
"""Values that must be equal on all workers that have them: (what they are, for messages; key; values).

The key identifies them on all workers, with their position in the whole tensor. The values are valid until the next
part is taken.
"""


class ReplicaCheck:
    """Compares weights, optimizer state, random states and counters of the workers of a run.

    Buffers, such as running statistics, are not compared: under DDP, each worker has its own until the next forward.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._unique: set[int] = set()
        """Keys of parts that only this worker has. They are not read again."""

    @torch.no_grad()
    def compare(self) -> None:
        """Compare the workers. Call it on every worker.

        Raises:
            ReplicasDiffer: values differ. The same error on all workers.
        """
        names: dict[int, str] = {}
        sums: dict[torch.device, dict[int, torch.Tensor]] = {}
        for name, text, values in self._parts():
            key = _number_of(text)
            if key not in self._unique:
                names[key] = name
                sums.setdefault(values.device, {})[key] = checksum(values)
        workers = self.run.workers
        keys_here = np.array([key for of_device in sums.values() for key in of_device], dtype=np.int64)
        values_here = [torch.stack(list(of_device.values())).cpu().numpy() for of_device in sums.values()]
        by_rank = workers.gather((keys_here, np.concatenate(values_here)))
        keys = np.concatenate([keys for keys, _ in by_rank])
        distinct, first, numbers, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        self._unique |= set(distinct[counts == 1].tolist()) & names.keys()
        all_values = np.concatenate([values for _, values in by_rank])
        differing = np.unique(keys[all_values != all_values[first][numbers]])
        if not differing.size:
            return
        names_of_all: dict[int, str] = {}
        for named in workers.gather({key: names[key] for key in differing.tolist() if key in names}):
            names_of_all |= named
        ranks = np.repeat(np.arange(workers.world), [len(keys) for keys, _ in by_rank])
        hosts = workers.gather(socket.gethostname())
        # The order of the first worker that has them: weights, then the optimizer state, as the model defines them.
        in_order = sorted(differing.tolist(), key=lambda key: int(np.argmax(keys == key)))
        groups: dict[int, list[int]] = {}  # the ranks that agree about the first difference, by their value
        for rank, value in zip(ranks[keys == in_order[0]], all_values[keys == in_order[0]], strict=True):
            groups.setdefault(int(value), []).append(int(rank))
        raise _error([names_of_all[key] for key in in_order], [*groups.values()], self.run.position.step, hosts)

    def _parts(self) -> Iterator[Part]:
        """Yield the parts of this worker that others may have as well."""
        engine, workers, position = self.run.engine, self.run.workers, self.run.position
        buffers = {canonical_name(name) for name, _ in engine.model.named_buffers()}
        buffers = {engine.assembly.placement.whole_name(name) for name in buffers}
        read: set[tuple[int, int]] = set()
        # First as the engine has them: FSDP frees gathered parameters before, and some engines update fp32 masters.
        for shard in engine.shards("weights"):
            if shard.name not in buffers:
                read.add((shard.values.data_ptr(), shard.values.numel()))
                yield from _parts_of(shard, f"the weights of {shard.name}")
        # The parameters of the forward, if they are others. A checkpoint does not contain the frozen base of adapters.
        for name, parameter in engine.model.named_parameters():
            shard = shard_of(parameter, canonical_name(name), engine.assembly, workers)
            if (shard.values.data_ptr(), shard.values.numel()) not in read:
                yield from _parts_of(shard, f"the weights of {shard.name}")
        for shard in engine.shards("optimizer"):
            name, _, key = shard.name.rpartition("/")
            yield from _parts_of(shard, f"{key} of {name} in the optimizer")
        counts = [position.step, position.samples, position.tokens]
        for name, value in (("the counters of the run", counts), ("the state of the engine", engine.state())):
            yield name, name, torch.tensor(_number_of(json.dumps(value, sort_keys=True)))
        # The workers of a tensor or context group draw the same random numbers.
        yield "torch's random state", f"random state {workers.stream}", torch.get_rng_state()
        if accelerator.is_asynchronous(workers.device):
            state = accelerator.random_state(workers.device)
            yield "the device's random state", f"random state of the device {workers.stream}", state


def replica_check_of(run: Run) -> ReplicaCheck | None:
    """Return the comparison of a run's workers. None for a single worker, or with ``--check-replicas 0``."""
    return ReplicaCheck(run) if run.workers.world > 1 and run.config.training.check_replicas != 0 else None


def _parts_of(shard: Shard, name: str) -> Iterator[Part]:
    """Yield the values of a shard, unless there are none. A quantized weight has codes and scales."""
    for suffix, values in plain_tensors(shard.values):
        if values.numel():
            yield name, f"{name}{suffix} {shard.index} {tuple(values.shape)} {values.dtype}", values


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of a tensor in words of 64 bits, modulo 2^64, on its device.

    A flipped bit always changes it. It reads the memory once and copies nothing, unless that begins inside of a word.
    """
    flat = values.detach().contiguous().view(-1)
    in_words = flat.data_ptr() % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in [flat] if in_words else flat.split(CHUNK):
        octets = (chunk if in_words else chunk.clone()).view(torch.uint8)
        whole = octets.numel() // 8 * 8
        if whole:
            total += octets[:whole].view(torch.int64).sum()
        if whole < octets.numel():
            total += octets[whole:].sum(dtype=torch.int64)
    return total


def _number_of(text: str) -> int:
    """Return a hash of 64 bits that is the same on all workers."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _error(names: Sequence[str], groups: list[list[int]], step: int, hosts: Sequence[str]) -> ReplicasDiffer:
    """Return the error for values that differ.

    Args:
        names: what differs.
        groups: ranks that agree with each other about the first of them.
    """
    groups = sorted(groups, key=lambda group: (-len(group), group))
    largest, second = groups[:2]
    if len(largest) > len(second):
        outliers = [rank for group in groups[1:] for rank in group]
        who = f"{_listed(outliers, hosts)} differ{'s' * (len(outliers) == 1)} from {_listed(largest)}"
    else:
        who = f"{' and '.join(_listed(group, hosts) for group in groups)} differ, and any of them may be wrong"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    hint = "a device, memory or the network may have failed, or code has changed one worker only"
    hint += "; --check-replicas 0 does not compare"
    return ReplicasDiffer(f"after step {step} {who}", where="; ".join(names[:SHOWN]) + more, hint=hint)


def _listed(ranks: Sequence[int], hosts: Sequence[str] | None = None) -> str:
    named = [f"{rank} on {hosts[rank]}" if hosts else str(rank) for rank in sorted(ranks)[:4]]
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(named)}{more}"
