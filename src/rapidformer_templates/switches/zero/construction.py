"""Build a model that is larger than a worker's memory. Each module is partitioned as soon as it is built."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_T: Any = torch.Tensor
SHAPE_ONLY = frozenset({_T.size, _T.dim, _T.numel, _T.stride, _T.shape.__get__, _T.ndim.__get__})
HARMLESS = frozenset(
    {
        _T.requires_grad_,
        _T.requires_grad.__get__,
        _T.requires_grad.__set__,
        _T.is_floating_point,
        _T.is_leaf.__get__,
        _T.is_meta.__get__,
        _T.is_cuda.__get__,
        _T.dtype.__get__,
        _T.device.__get__,
        _T.layout.__get__,
        _T.grad.__get__,
        _T.__hash__,
    }
)
"""Operations that do not read the values of a parameter."""


@contextmanager
def partitioned_construction(config: Mapping[str, Any]) -> Iterator[None]:
    """Build a model under ZeRO-3 inside this context.

    Parameters are built as usual, and partitioned after the ``__init__`` of their module. Later operations on them see
    the whole parameters again: an initialization of the whole model, weight tying, or loading weights.

    Args:
        config: DeepSpeed's configuration.
    """
    from deepspeed.runtime.zero.partition_parameters import Init
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config
    from transformers.modeling_utils import set_zero3_state

    gathering = _GatherOnUse()

    class Partitioned(Init):
        is_over = False

        def _post_init_method(self, module: nn.Module) -> None:
            if not self.is_over:
                with gathering.paused():
                    super()._post_init_method(module)

        def __exit__(self, *error: object) -> None:
            decorated = {kind: vars(kind)["__init__"] for kind in _subclasses(nn.Module) if _is_decorated(kind)}
            super().__exit__(*error)
            self.is_over = True
            for kind, init in decorated.items():
                setattr(kind, "__init__", init)  # noqa: B010 - of a class, which a type checker takes for unsound

    building = dict(config)
    if "nvme_path" not in config["zero_optimization"].get("offload_param", {}):
        # Build in fp32, so that the masters are exact. The swapper of parameters on a disk supports one type only.
        building |= {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
    # With this, transformers' from_pretrained loads one tensor at a time. set_zero3_state prevents it from partitioning
    # parameters itself, and from drawing other random numbers than without ZeRO.
    known_to_transformers = HfDeepSpeedConfig(building)
    try:
        with Partitioned(config_dict_or_path=building), _paused_for_others(gathering), set_zero3_state(), gathering:
            yield
    finally:
        unset_hf_deepspeed_config()
        del known_to_transformers


def _subclasses(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _is_decorated(kind: type) -> bool:
    """Return whether a decorator wraps the ``__init__`` that DeepSpeed has put around the class's own.

    A module that is imported inside the context may have such classes. DeepSpeed restores their own ``__init__`` and
    loses the decorator's.
    """
    init = vars(kind).get("__init__")
    old_init = vars(kind).get("_old_init")
    return old_init is not None and init is not old_init and getattr(init, "__wrapped__", None) is not old_init


@contextmanager
def _paused_for_others(gathering: _GatherOnUse) -> Iterator[None]:
    """Pause our gathering while other code gathers parameters itself, as transformers does on its first worker alone.

    Partition all whole parameters first. Otherwise two owners would hold a parameter, and the first to release it would
    release it for both.
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    enter, leave = GatheredParameters.__enter__, GatheredParameters.__exit__

    def gather(self: GatheredParameters) -> object:
        gathering.partition_again()
        gathering.pauses += 1
        return enter(self)

    def release(self: GatheredParameters, *error: object) -> object:
        try:
            return leave(self, *error)
        finally:
            gathering.pauses -= 1

    GatheredParameters.__enter__, GatheredParameters.__exit__ = gather, release
    try:
        yield
    finally:
        GatheredParameters.__enter__, GatheredParameters.__exit__ = enter, leave


class DividedParameter(Protocol):
    """A parameter that DeepSpeed has partitioned."""

    data: torch.Tensor
    ds_shape: torch.Size

    def all_gather(self, parameters: Sequence[DividedParameter]) -> None:
        """Make these parameters whole."""

    def partition(self, parameters: Sequence[DividedParameter], *, has_been_updated: bool) -> None:
        """Free all but this worker's part of these parameters."""

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the values."""


class _GatherOnUse(TorchFunctionMode):
    """Gathers partitioned parameters when a torch function uses them.

    A parameter stays whole until other parameters are used and no view of it is alive. For example, the row that
    ``weight[0]`` returns may be written one line later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pauses = 0
        self._whole: dict[int, DividedParameter] = {}
        self._views: dict[int, list[weakref.ref[torch.Tensor]]] = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if error[0] is None:  # after an error, the other workers may be at another point
            self.partition_again()

    def partition_again(self) -> None:
        """Partition all whole parameters."""
        with self.paused():
            self._partition_again(keep=set(), even_with_views=True)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self.pauses or func in HARMLESS:
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        partitioned = {id(leaf): leaf for leaf in leaves if _is_partitioned(leaf)}
        if partitioned and func in SHAPE_ONLY:
            whole = {
                key: torch.empty(leaf.ds_shape, dtype=torch.float32, device="meta") for key, leaf in partitioned.items()
            }
            args, kwargs = tree_map(lambda leaf: whole.get(id(leaf), leaf), (args, kwargs))
            return func(*args, **kwargs)
        with self.paused():
            if partitioned:
                self._partition_again(keep={id(leaf) for leaf in leaves})
                for parameter in partitioned.values():
                    parameter.all_gather([parameter])
                self._whole |= partitioned
            result = func(*args, **kwargs)
            self._remember_views(result)
        return result

    def _remember_views(self, result: object) -> None:
        if not self._whole:
            return
        owners = {p.untyped_storage().data_ptr(): key for key, p in self._whole.items()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._whole and leaf.device.type != "meta":
                owner = owners.get(leaf.untyped_storage().data_ptr())
                if owner is not None:
                    self._views.setdefault(owner, []).append(weakref.ref(leaf))

    def _partition_again(self, *, keep: set[int], even_with_views: bool = False) -> None:
        in_use = keep if even_with_views else keep | self._viewed([key for key in self._views if key not in keep])
        for key, parameter in list(self._whole.items()):
            if key in in_use:
                continue
            del self._whole[key]
            self._views.pop(key, None)
            if not _is_partitioned(parameter):  # otherwise other code gathered it, too, and has already partitioned it
                dist.broadcast(parameter.data, src=0)
                parameter.partition([parameter], has_been_updated=True)

    def _viewed(self, keys: list[int]) -> set[int]:
        """Return those parameters of which any worker has a living view. Workers collect garbage at different times."""
        if not keys:
            return set()
        alive = torch.tensor([any(view() is not None for view in self._views[key]) for key in keys], dtype=torch.uint8)
        dist.all_reduce(alive, op=dist.ReduceOp.MAX)
        return {key for key, is_alive in zip(keys, alive.tolist(), strict=True) if is_alive}


def _is_partitioned(leaf: object) -> TypeGuard[DividedParameter]:
    if not isinstance(leaf, torch.nn.Parameter) or "ds_status" not in leaf.__dict__:
        return False
    return bool(leaf.__dict__["ds_status"].name == "NOT_AVAILABLE")
