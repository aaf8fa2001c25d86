"""Build a model of which each worker keeps only a share, while the code that builds it sees every tensor whole.

While a model is built and transformed, all workers execute the same code. Each parameter begins whole. When other
parameters need the memory, its storage is divided: every worker keeps an equal share of its elements and frees the
rest. The next operation that reads or writes the parameter, or a view of it, gathers the storage again. A parameter
that ``from_pretrained`` reads begins divided. It stays in its file until it is used or an engine takes it over. Then
each worker reads its share, or its part for the engine.

The unit is the storage, so views and tied weights need no bookkeeping. FSDP's ``fully_shard`` frees memory in the same
way: it resizes a storage to zero bytes. ``gather_on_use.py`` sees the operations.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from rapidformer_templates.engines.boxes import PartExchange, Parts, exchanges_of, starts_in_file
from rapidformer_templates.models.weight_files import FileTensor, join
from rapidformer_templates.system.workers import broadcast

LEAST_DIVIDED = 4096
"""Bytes of the smallest storage that is divided."""
ALIGNMENT = 64
"""Shares begin at multiples of this many elements of any type. So a cast needs no exchange."""


@dataclass(eq=False)
class DividedStorage:
    """The storage of a parameter while a model is built.

    Attributes:
        storage: the storage that the parameter and its views use. It has no bytes while it is divided.
        size: its bytes.
        dtype: the type of its elements.
        number: how many others were added before. The same on all workers.
        share: the bytes of this worker's share. None before the first division, and while ``source`` has the values.
        source: the tensor in files with the values. None once they were written.
        is_whole: whether the storage has all of its bytes on this worker.
        is_changed: whether it was written since its last division.
    """

    storage: torch.UntypedStorage
    size: int
    dtype: torch.dtype
    number: int
    share: torch.Tensor | None = None
    source: FileTensor | None = None
    is_whole: bool = True
    is_changed: bool = True

    @property
    def key(self) -> int:
        return self.storage._cdata

    def share_size(self, world: int) -> int:
        """Return the bytes of each share. The last shares may end behind the storage."""
        unit = ALIGNMENT * self.dtype.itemsize
        return -(-self.size // (world * unit)) * unit

    def share_as(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a copy of the share in another type. None before it is read."""
        return None if self.share is None else self.share.view(self.dtype).to(dtype, copy=True).view(torch.uint8)

    def all_bytes(self) -> torch.Tensor:
        """Return the bytes of the whole storage as a tensor on the same memory."""
        return torch.empty(0, dtype=torch.uint8).set_(self.storage)


LEAST_WHOLE = 16 << 20
"""Bytes of a model that may always be whole at a time."""


def room_for(size: int, workers: int, least: int = LEAST_WHOLE) -> int:
    """Return how many bytes of a model of ``size`` bytes may be whole at a time: a twentieth of a worker's share."""
    return max(least, size // workers // 20)


class ModelUnderConstruction:
    """Divides the parameters of a model over the workers while the model is built.

    Every worker must execute the same operations on parameters, because gathering and dividing are collectives. All
    workers get the values of the first one.

    Attributes:
        group: the workers that divide the model. None for all of them.
        least_whole: bytes that may always be whole at a time. See :func:`room_for` for a large model.
        divisions: how many times a storage was divided over the workers.
        gathers: how many times a storage was gathered.
    """

    least_whole = LEAST_WHOLE

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.divisions = self.gathers = 0
        self.is_paused = False
        self._postponed: dict[torch.Tensor, tuple[torch.Tensor, Parts]] = {}
        self._storages: dict[int, DividedStorage] = {}
        self._whole: dict[int, DividedStorage] = {}  # in the order of their last use
        self._all_bytes = 0  # of the parameters
        self._numbers = count()

    def add(self, parameter: nn.Parameter) -> None:
        """Divide a parameter's storage when memory is needed. Small and sparse parameters stay whole."""
        if is_lazy(parameter) or type(parameter.data) is not torch.Tensor or parameter.layout != torch.strided:
            return
        storage, own_bytes = parameter.untyped_storage(), parameter.numel() * parameter.element_size()
        known = self._storages.get(storage._cdata)
        if known is not None and known.source is not None:
            self._all_bytes += known.size
        if parameter.device.type != "cpu" or own_bytes < LEAST_DIVIDED or known is not None:
            return
        if not storage.resizable() or storage.nbytes() > own_bytes:  # a part of a mapped file, or of a larger tensor
            parameter.data = parameter.data.clone()
            storage = parameter.untyped_storage()
        added = DividedStorage(storage, storage.nbytes(), parameter.dtype, next(self._numbers))
        self._all_bytes += added.size
        self._make_room(added)
        self._storages[added.key] = added
        self._mark_whole(added)

    def from_file(self, source: FileTensor) -> torch.Tensor | None:
        """Return a divided tensor. Each worker reads its share once the tensor is used, or its own part at the end.

        Returns None if nothing is divided at the moment.
        """
        if self.is_paused:
            return None
        with self.paused():
            return self._divided(source.shape, source.dtype, source=source)

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a divided tensor of another type without an exchange, or None if the tensor is not divided."""
        storage = self._filled_by(tensor)
        if storage is None or storage.is_whole:
            return None
        return self._divided(tensor.shape, dtype, source=storage.source, share=storage.share_as(dtype))

    def copy(self, target: torch.Tensor, origin: torch.Tensor) -> bool:
        """Copy a divided tensor into another one without an exchange. Return False if that is not possible."""
        to, storage = self._filled_by(target), self._filled_by(origin)
        if to is None or storage is None or to is storage or storage.is_whole or target.shape != origin.shape:
            return False
        if not to.storage.resizable():  # an array of numpy uses it as well
            return False
        self._whole.pop(to.key, None)
        to.storage.resize_(0)
        to.is_whole = to.is_changed = False
        to.share, to.source = storage.share_as(to.dtype), storage.source
        return True

    def join(self, tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Size], dim: int) -> torch.Tensor | None:
        """Return the concatenation of tensors in files as another tensor in files, or None for other tensors.

        Args:
            shapes: shapes of the tensors, which may have an additional dimension of size 1.
            dim: the dimension in which they are joined, not negative.
        """
        sources, others = [], set()
        for tensor, shape in zip(tensors, shapes, strict=True):
            storage = self._filled_by(tensor)
            if storage is None or storage.source is None:
                return None
            sources.append(replace(storage.source, shape=shape))
            others.add((tensor.dtype, *shape[:dim], *shape[dim + 1 :]))
        source = join(sources, dim) if len(others) == 1 else None
        return None if source is None else self._divided(source.shape, tensors[0].dtype, source=source)

    def find(self, tensor: torch.Tensor) -> DividedStorage | None:
        """Return the divided storage that a tensor uses, or None."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return None
        with torch._C.DisableTorchFunction():  # a look at the storage is not a use
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                return None
            return self._storages.get(tensor.untyped_storage()._cdata)

    def is_synchronized(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor already has the first worker's values on all workers."""
        storage = self.find(tensor)
        return storage is not None and not storage.is_changed

    def use(self, tensors: Collection[torch.Tensor], *, written: Collection[torch.Tensor] = ()) -> None:
        """Gather the storages of some tensors, and divide others if there is not enough memory for all."""
        used = {storage.key: storage for storage in self.storages_of(tensors)}
        self._make_room(*used.values())
        for storage in used.values():
            self._gather(storage)
        for storage in self.storages_of(written):
            storage.is_changed, storage.source = True, None

    def overwrite(self, tensor: torch.Tensor) -> bool:
        """Give a tensor that is about to be overwritten its memory. Return False if it does not fill its storage."""
        storage = self._filled_by(tensor)
        if storage is None:
            return False
        self._make_room(storage)
        if not storage.is_whole:
            storage.storage.resize_(storage.size)
        storage.is_whole = storage.is_changed = True
        storage.source = None
        self._mark_whole(storage)
        return True

    def divide_all(self) -> None:
        """Divide everything."""
        with self.paused():
            self._divide(list(self._whole.values()))

    def regroup(self, parameters: Iterable[torch.Tensor], groups: Sequence[Sequence[int]]) -> None:
        """Divide each parameter over those workers alone that still have it.

        From here on, the groups are independent of each other. A worker that is alone in its group gets its parameters
        whole. Nothing may be computed between the removal of parameters and this call.

        Args:
            parameters: what remains of the model on the workers of this worker's group.
            groups: the ranks of each group in ascending order. Together they are all workers.
        """
        with self.paused():
            self.divide_all()
            remaining = {storage.number for storage in self.storages_of(parameters)}
            remaining_by: list[set[int]] = [set()] * self.world
            dist.all_gather_object(remaining_by, remaining, group=self.group)
            by_number = {storage.number: storage for storage in self._storages.values()}
            shares: dict[int, torch.Tensor] = {}
            # The groups take turns, so that a worker gives back about as much memory as it gets.
            for turn in zip_longest(*(sorted(remaining_by[ranks[0]]) for ranks in groups)):
                for number, ranks in zip(turn, groups, strict=True):
                    if number is None:
                        continue
                    storage = by_number[number]
                    if storage.source is None:
                        share = self._send_shares(storage, ranks)
                        if self.rank in ranks:
                            shares[number] = share
                    elif list(ranks) == [self.rank]:
                        storage.storage.resize_(storage.size)
                        storage.source.read_into(storage.all_bytes().view(storage.dtype), 0)
                    remaining_by[ranks[0]].remove(number)
                    if not any(number in remaining_by[others[0]] for others in groups):
                        storage.share = None
        own = next(ranks for ranks in groups if self.rank in ranks)
        if len(own) == 1:
            self._end()
            return
        self.group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
        self.world, self.rank = len(own), own.index(self.rank)
        self._storages = {key: one for key, one in self._storages.items() if one.number in remaining}
        self._all_bytes = sum(storage.size for storage in self._storages.values())
        for storage in self._storages.values():
            storage.share = shares.get(storage.number)  # what is in a file is not read yet

    def postpone(self, stand_in: torch.Tensor, whole: torch.Tensor, parts: Parts) -> None:
        """Note a tensor without values in place of this worker's part of a whole one, which an engine divides further.

        The whole tensor stays divided over all workers until :func:`take_part` takes a part of the stand-in.
        """
        self._postponed[stand_in] = whole, parts

    def is_postponed(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is the stand-in for a part that no worker has taken yet."""
        return tensor in self._postponed

    def undivided(self, tensor: torch.Tensor, parts: Parts) -> tuple[torch.Tensor, Parts]:
        """Return the whole tensor and the parts of it, for parts of a stand-in. It is no longer needed then."""
        if tensor not in self._postponed:
            return tensor, parts
        whole, outer = self._postponed.pop(tensor)
        return whole, outer.then(parts)

    def part_of(self, tensor: torch.Tensor, parts: Parts) -> torch.Tensor | None:
        """Return a copy of this worker's part of a tensor, which is not gathered for it. Each worker gets its own part.

        Returns None for a tensor that is not divided, or that is a part of another one.
        """
        with self.paused(), torch.no_grad():
            storage = self._filled_by(tensor)
            if storage is not None and storage.is_changed:
                self._divide([storage])
                storage = self._filled_by(tensor)  # None if it cannot be divided
            if storage is None:
                return None
            if storage.is_whole:
                return parts.take(tensor, self.rank)
            shape = tuple(tensor.shape)
            part = torch.empty(parts.index(shape, self.rank).local, dtype=tensor.dtype)
            if storage.source is not None:
                starts = starts_in_file(shape, parts)
                if starts is not None:  # nothing must be exchanged
                    storage.source.read_into(part.view(-1), starts[self.rank])
                    return part
            share = self._share_of(storage)
            elements = storage.share_size(self.world) // tensor.element_size()
            self._exchange(share.view(tensor.dtype), part, exchanges_of(shape, parts, elements, self.rank))
            return part

    def _exchange(self, share: torch.Tensor, part: torch.Tensor, exchanges: Sequence[PartExchange]) -> None:
        """Send each worker the values of its part that are in this worker's share, and fill this worker's part."""
        works, received = [], []
        for one in exchanges:
            sent = [share.as_strided(*view) for view in one.sent]
            places = [part.as_strided(*view) for view in one.received]
            if one.peer == self.rank:
                for place, values in zip(places, sent, strict=True):
                    place.copy_(values)
                continue
            if sent:
                works.append(self._send(_packed(sent), one.peer))
            if places:
                buffer = places[0]
                if len(places) > 1 or not buffer.is_contiguous():
                    buffer = part.new_empty(sum(place.numel() for place in places))
                    received.append((places, buffer))
                works.append(self._receive(buffer.view(-1).view(torch.uint8), one.peer))
        _wait(works)
        for places, buffer in received:
            for place, values in zip(places, buffer.split([place.numel() for place in places]), strict=True):
                place.copy_(values.view(place.shape))

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stop dividing whole tensors whose values an engine has taken over. All workers must name the same ones."""
        for storage in self.storages_of(tensors):
            if storage.is_whole and storage.key in self._storages:
                del self._storages[storage.key], self._whole[storage.key]

    def forget_freed(self) -> None:
        """Free the memory of parameters that no longer exist.

        Workers may free a parameter at different times, so this must not change what they exchange. A whole storage
        still counts as whole until its turn to be divided comes.
        """
        for key, storage in list(self._storages.items()):
            if not storage.is_changed and torch._C._storage_Use_Count(key) == 1:  # only ours is left
                storage.storage.resize_(0)
                del self._storages[key]

    def finish(self) -> None:
        """Gather what is still divided, and stop dividing."""
        if self.is_paused:  # it has ended before
            return
        self.forget_freed()
        with self.paused():
            # A worker may have forgotten a parameter that no longer exists and that others still have.
            numbers: list[list[int]] = [[]] * self.world
            dist.all_gather_object(numbers, sorted(s.number for s in self._storages.values()), group=self.group)
            common = set.intersection(*map(set, numbers))
            for storage in sorted(self._storages.values(), key=lambda storage: storage.number):
                if storage.number in common:
                    self._gather(storage)
                    storage.share = None
        self._end()

    def _end(self) -> None:
        self._storages.clear()
        self._whole.clear()
        self.is_paused = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Neither add parameters nor observe operations inside this context."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def storages_of(self, tensors: Iterable[torch.Tensor]) -> list[DividedStorage]:
        """Return the divided storages that some tensors use."""
        return [storage for storage in map(self.find, tensors) if storage is not None]

    def _filled_by(self, tensor: torch.Tensor) -> DividedStorage | None:
        """Return the divided storage of a tensor that has all of its elements in their order, or None."""
        storage = self.find(tensor)
        if storage is None or tensor.dtype != storage.dtype or not tensor.is_contiguous():
            return None
        return storage if tensor.numel() * tensor.element_size() == storage.size else None

    def _divided(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        share: torch.Tensor | None = None,
        source: FileTensor | None = None,
    ) -> torch.Tensor:
        """Return a tensor that is divided from the start, of a share or a source that are the same on all workers."""
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        storage = tensor.untyped_storage()
        added = DividedStorage(
            storage, storage.nbytes(), dtype, next(self._numbers), share, source, is_whole=False, is_changed=False
        )
        self._storages[added.key] = added
        storage.resize_(0)
        return tensor

    def _share_of(self, storage: DividedStorage) -> torch.Tensor:
        """Return this worker's share of a divided storage. A share in a file is read each time."""
        if storage.source is None:
            assert storage.share is not None
            return storage.share
        share = torch.zeros(storage.share_size(self.world) // storage.dtype.itemsize, dtype=storage.dtype)
        start, end = self.rank * len(share), storage.size // storage.dtype.itemsize
        storage.source.read_into(share[: max(0, end - start)], start)
        return share.view(torch.uint8)

    def _mark_whole(self, storage: DividedStorage) -> None:
        self._whole.pop(storage.key, None)
        self._whole[storage.key] = storage

    def _make_room(self, *used: DividedStorage) -> None:
        """Divide what was not used for longest, until there is room for what is used next."""
        room = room_for(self._all_bytes, self.world, self.least_whole)
        room -= sum(one.size for one in used if one.key not in self._whole)
        whole_bytes = sum(storage.size for storage in self._whole.values())
        if whole_bytes <= room:
            return
        # More than necessary, because the workers wait for one another once per call.
        excess, divided = whole_bytes - room // 2, []
        for storage in self._whole.values():
            if excess > 0 and storage not in used:
                divided.append(storage)
                excess -= storage.size
        self._divide(divided)
        self.forget_freed()

    def _divide(self, storages: Sequence[DividedStorage]) -> None:
        """Keep this worker's shares of whole storages and free the rest."""
        divided = []
        for storage in storages:
            del self._whole[storage.key]
            if self._storages.get(storage.key) is not storage:  # forgotten
                continue
            if storage.storage.resizable():
                divided.append(storage)
            else:  # an array of numpy uses it as well, so it stays whole
                del self._storages[storage.key]
        self._keep_shares([storage for storage in divided if storage.is_changed])
        for storage in divided:
            storage.storage.resize_(0)
            storage.is_whole = storage.is_changed = False

    def _keep_shares(self, storages: Sequence[DividedStorage]) -> None:
        """Copy the shares from whole storages. If the values differ between workers, they come from the first one."""
        if not storages:
            return
        checksums = torch.tensor([_checksum(storage.all_bytes()) for storage in storages])
        extremes = torch.stack([checksums, -checksums])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.group)
        are_same = (extremes[0] == -extremes[1]).tolist()  # all workers have drawn the same values
        for storage, is_same in zip(storages, are_same, strict=True):
            whole, size = storage.all_bytes(), storage.share_size(self.world)
            if storage.share is None:
                storage.share = torch.empty(size, dtype=torch.uint8)
            own = whole[self.rank * size : (self.rank + 1) * size]
            if is_same or self.rank == 0:
                storage.share[: len(own)].copy_(own)
            elif len(own):
                _wait([self._receive(storage.share[: len(own)], 0)])
            if self.rank == 0 and not is_same:
                _, *others = whole.split(size)
                _wait([self._send(part, peer) for peer, part in enumerate(others, start=1)])
            self.divisions += 1

    def _gather(self, storage: DividedStorage) -> None:
        if not storage.is_whole:
            storage.storage.resize_(storage.size)
            self._collect(storage, [range(storage.size)] * self.world, storage.all_bytes())
            self.gathers += 1
            storage.is_whole = True
        self._mark_whole(storage)

    def _collect(self, storage: DividedStorage, needed: Sequence[range], target: torch.Tensor) -> None:
        """Send each worker the bytes of a storage that it needs, and put those of this worker into ``target``.

        Args:
            needed: the bytes that each worker needs.
        """
        size, own, share = storage.share_size(self.world), needed[self.rank], self._share_of(storage)
        begin, works = self.rank * size, []
        for peer, of_peer in enumerate(needed):
            sent = share[max(0, of_peer.start - begin) : max(0, of_peer.stop - begin)]
            place = target[max(0, peer * size - own.start) : max(0, min((peer + 1) * size, own.stop) - own.start)]
            if peer == self.rank:
                place.copy_(sent)
                continue
            works += [self._send(sent, peer)] if len(sent) else []
            works += [self._receive(place, peer)] if len(place) else []
        _wait(works)

    def _send(self, values: torch.Tensor, peer: int) -> dist.Work | None:
        return dist.isend(values, group=self.group, group_dst=peer)

    def _receive(self, place: torch.Tensor, peer: int) -> dist.Work | None:
        return dist.irecv(place, group=self.group, group_src=peer)

    def _send_shares(self, storage: DividedStorage, ranks: Sequence[int]) -> torch.Tensor:
        """Send the shares of a storage to a group of workers, which divide it among themselves.

        Returns:
            this worker's share in that group, or the whole storage for a group of one. Empty on other workers.
        """
        size = storage.share_size(len(ranks))
        needed = [range(0)] * self.world
        for place, rank in enumerate(ranks):
            needed[rank] = range(min(place * size, storage.size), min((place + 1) * size, storage.size))
        share = torch.empty(size if self.rank in ranks else 0, dtype=torch.uint8)
        if list(ranks) == [self.rank]:
            storage.storage.resize_(storage.size)
            share = storage.all_bytes()
        self._collect(storage, needed, share)
        return share


def take_part(
    tensor: torch.Tensor,
    parts: Parts,
    worker: int,
    *,
    construction: ModelUnderConstruction | None,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> torch.Tensor:
    """Return this worker's part of a tensor on a device. If its group has different values, the first worker's count.

    Args:
        worker: index of this worker in ``parts``: its rank in the construction, if there is one.
        group: the workers that must have the same values. None for all.
    """
    if construction is not None:
        tensor, parts = construction.undivided(tensor, parts)
        part = construction.part_of(tensor, parts)
        if part is not None:
            return part.to(device)
    is_synchronized = construction is not None and construction.is_synchronized(tensor)
    whole = tensor.detach().to(device)
    if not is_synchronized and dist.is_initialized() and dist.get_world_size(group) > 1:
        broadcast(whole, group=group)
    return parts.take(whole, worker)


def _packed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors one after another. A contiguous tensor is not copied."""
    flat = values[0].reshape(-1) if len(values) == 1 else torch.cat([one.reshape(-1) for one in values])
    return flat.view(torch.uint8)


def _checksum(values: torch.Tensor) -> int:
    return zlib.crc32((ctypes.c_char * len(values)).from_address(values.data_ptr()))


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this worker is in the group"
        work.wait()
