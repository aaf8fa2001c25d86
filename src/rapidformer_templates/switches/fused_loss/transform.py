"""The output layer that computes its own loss, the transform that puts it there, and the receipt of its logits.

In training, the layer returns placeholder logits, which are never computed. The linear layer and its cross-entropy are
computed together, one chunk of rows at a time, with torch's own operations. Models may apply functions to each logit
before the loss. Their derivatives are here, too.
"""

from __future__ import annotations

import builtins
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.backwards import in_loss
from rapidformer_templates.engines.contract import Probe, Receipt
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models import divided_tensor
from rapidformer_templates.models.divided_tensor import VocabularyShard, losses_and_slope

SWITCH_FLAG = "--fused-linear-cross-entropy"

CHUNK_BYTES = {"cpu": 64 * 2**20, "accelerator": 512 * 2**20}
"""Bytes that the fp32 logits of a chunk may take.

The gradient of the head's weight is accumulated once per chunk. An accelerator computes products faster than
that, so its chunks are larger.
"""


def rows_at_once(rows: int, vocabulary: int, device: str) -> int:
    """Return how many of ``rows`` have logits in memory at a time. It is at most a quarter, so never all of them."""
    return max(1, min(CHUNK_BYTES["cpu" if device == "cpu" else "accelerator"] // (4 * vocabulary), -(-rows // 4)))


@dataclass(frozen=True)
class Pointwise:
    """A function of single logits.

    Attributes:
        values: returns the values for a chunk of logits of shape (rows, vocabulary).
        slope: returns the gradient by the inputs, given the gradient by the values and the values.
        dtype: the type that it converts to, if that is what it does.
        constant: what it adds for each word, if that is what it does, of shape (1, vocabulary).
    """

    values: Callable[[torch.Tensor], torch.Tensor]
    slope: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    dtype: torch.dtype | None = None
    constant: torch.Tensor | None = None


def scale(factor: float) -> Pointwise:
    """Multiply by a number."""
    return Pointwise(lambda x: x * factor, lambda gradient, y: gradient * factor)


def shift(constant: torch.Tensor) -> Pointwise:
    """Add a constant for each word, of shape (1, vocabulary)."""
    return Pointwise(lambda x: x + constant.to(x.device), lambda gradient, y: gradient, constant=constant)


TANH = Pointwise(torch.tanh, lambda gradient, y: gradient * (1 - y * y))
"""Hyperbolic tangent. Some models use it to cap their logits."""


@dataclass(frozen=True)
class LossRecipe:
    """How the loss is computed from the product.

    Attributes:
        pointwise: functions applied to each logit, in this order.
        ignored: target of rows that do not count.
        smoothing: label smoothing, as in ``torch.nn.functional.cross_entropy``.
    """

    pointwise: tuple[Pointwise, ...] = ()
    ignored: int = -100
    smoothing: float = 0.0

    def loss_and_slope(
        self, logits: torch.Tensor, target: torch.Tensor, words: VocabularyShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of the losses of a chunk, its gradient by the logits)."""
        values = [logits]
        for function in self.pointwise:
            values.append(function.values(values[-1]))
        losses, slope = losses_and_slope(values[-1], target, words, self.ignored, self.smoothing)
        for function, value in zip(reversed(self.pointwise), reversed(values[1:]), strict=True):
            slope = function.slope(slope, value)
        return losses.sum(), slope


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    recipe: LossRecipe,
    words: VocabularyShard | None = None,
) -> torch.Tensor:
    """Return the sum of the cross-entropies of ``hidden @ weight.T + bias`` over the rows that count.

    At most a quarter of the rows have their logits in memory at a time. A single pass over them computes the loss and
    its gradient, which the backward only scales. Gradients of weight and bias are summed in fp32.

    Args:
        hidden: (rows, hidden size).
        weight: (vocabulary, hidden size).
        bias: (vocabulary,) or None.
        target: (rows,), the index of a word or ``recipe.ignored``.
        words: part of the vocabulary that ``weight`` and ``bias`` have. None means all of it. Hidden states and targets
            are the same on all workers that share the vocabulary. The gradient of the hidden states is only a part
            of the sum over these workers.

    Returns:
        A scalar, in the type in which the loss would be computed from whole logits.
    """
    words = words or VocabularyShard(len(weight))
    own = slice(words.begin, words.begin + len(weight))
    steps = (step if step.constant is None else shift(step.constant[:, own]) for step in recipe.pointwise)
    recipe = replace(recipe, pointwise=tuple(steps))
    return _LinearCrossEntropy.apply(hidden, weight, bias, target, recipe, words)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        recipe: LossRecipe,
        words: VocabularyShard,
    ) -> torch.Tensor:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        compute = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        # Autocast would cache its cast of the weight here, without a gradient, and other code would find it.
        with torch.autocast(device, enabled=False):
            sums = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
            weight, bias = weight.to(compute), None if bias is None else bias.to(compute)
            losses = []
            step = rows_at_once(len(target), words.most, device)  # every worker has the same number of chunks
            chunks: Iterable[torch.Tensor | slice] = (slice(i, i + step) for i in range(0, len(target), step))
            if target.is_cpu:  # leave out rows that do not count, if that needs no synchronization
                chunks = (target != recipe.ignored).nonzero().flatten().split(step)
            for rows in chunks:
                part = hidden[rows].to(compute)
                loss, slope = recipe.loss_and_slope(F.linear(part, weight, bias), target[rows], words)
                losses.append(loss)
                sums.add(slope.to(compute), rows, part, weight)
        ctx.save_for_backward(*sums.finished())
        of_logits = [compute, *(step.dtype for step in recipe.pointwise if step.dtype is not None)][-1]
        return torch.stack(losses).sum().to(torch.float32 if autocast else of_logits)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In place: autograd refuses a second backward through tensors that were changed.
        multiply = torch.mul if in_loss() else torch.Tensor.mul_
        return (*(None if g is None else multiply(g, outer[0]) for g in ctx.saved_tensors), None, None, None)


class _Gradients:
    """Gradients by hidden states, weight and bias, if they are needed, summed over the chunks."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        self.types = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

    def add(self, slope: torch.Tensor, rows: torch.Tensor | slice, part: torch.Tensor, weight: torch.Tensor) -> None:
        """Add a chunk. ``slope`` (rows, vocabulary) is the gradient by its logits, ``part`` its input."""
        if self.hidden is not None:
            self.hidden[rows] = (slope @ weight).to(self.hidden.dtype)
        if self.weight is not None and self.weight.dtype == slope.dtype:
            self.weight.addmm_(slope.T, part)
        elif self.weight is not None:
            self.weight += slope.T @ part
        if self.bias is not None:
            self.bias += slope.sum(dim=0)

    def finished(self) -> list[torch.Tensor | None]:
        """Return the gradients in the types of their inputs."""
        sums = (self.hidden, self.weight, self.bias)
        return [None if g is None else g.to(dtype) for g, dtype in zip(sums, self.types, strict=True)]


def fuse_loss(assembly: Assembly, building: Building[object]) -> None:
    """Make the layer that scores the words compute the loss. Its parameters keep their names.

    In a pipeline, only the last stage changes.

    Raises:
        ModelError: the model has no such layer, or it is not a plain ``torch.nn.Linear``.
    """
    if not building.workers.ends_pipeline:
        return
    assembly.limit_derivatives(1, SWITCH_FLAG)  # the forward computes the gradients
    model = assembly.model
    find: object = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if type(head) is not nn.Linear:
        what = "none" if head is None else f"a {type(head).__name__}"
        message = f"the fused loss needs a torch.nn.Linear that scores the words, and {type(model).__name__} has {what}"
        hint = f"leave {SWITCH_FLAG} out; in your own model, let get_output_embeddings() return that layer"
        raise ModelError(message, where=SWITCH_FLAG, hint=hint)
    head.__class__ = FusedHead
    assert isinstance(head, FusedHead)
    on_gpu = building.workers.device.type == "cuda"
    head.kernel = "liger" if on_gpu and find_spec("liger_kernel") else "torch"
    head.used, head.rows, head.columns = set(), 0, 0


class FusedHead(divided_tensor.LossHead):
    """A language model's last layer. In training, it delays its product until the loss is computed.

    In evaluation, it is a normal linear layer. In training, it returns :class:`Logits`. It is called again when
    their cross-entropy is taken, so that an engine that shards parameters gathers the weight for the time
    of the loss, as it does for any layer.

    Attributes:
        kernel: which kernel should compute the loss, ``torch`` or ``liger``.
        used: kernels that have computed a loss.
        rows: highest number of rows in a loss so far.
        columns: number of words that this worker scored in the latest loss.
    """

    kernel: str
    used: set[str]
    rows: int
    columns: int

    @torch.compiler.disable
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | Logits:
        if self.training and torch.is_grad_enabled():
            return Logits.of(self, hidden)
        return super().__call__(hidden)

    def loss(self, hidden: torch.Tensor, target: torch.Tensor, recipe: LossRecipe) -> torch.Tensor:
        """Return the sum of the losses of all rows. See :func:`linear_cross_entropy`."""
        return cast(torch.Tensor, super().__call__(hidden, target, recipe))

    def forward(
        self,
        hidden: torch.Tensor,
        target: torch.Tensor | None = None,
        recipe: LossRecipe | None = None,
        words: VocabularyShard | None = None,
    ) -> torch.Tensor:
        if target is None or recipe is None:
            return super().forward(hidden)
        self.rows, self.columns = max(self.rows, len(target)), len(self.weight)
        casts_only = all(step.dtype is not None for step in recipe.pointwise)
        if self.kernel == "liger" and casts_only and words is None and hidden.dtype != torch.float64:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            self.used.add("liger")
            loss = LigerFusedLinearCrossEntropyLoss(
                ignore_index=recipe.ignored,
                label_smoothing=recipe.smoothing,
                reduction="sum",
                accum_dtype=torch.float32,
            )
            return cast(torch.Tensor, loss(self.weight, hidden, target, self.bias))
        self.used.add("torch")
        return linear_cross_entropy(hidden, self.weight, self.bias, target, recipe, words)


class WidestRows(TorchDispatchMode):
    """Records the largest floating-point tensor for each size of the last dimension, from any source.

    Views do not count: the transposed weight of the head is one.

    Attributes:
        rows: rows of this tensor, by its last dimension.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
                    width = leaf.shape[-1:].numel()
                    self.rows[width] = max(self.rows[width], leaf.numel() // width)
        return result


class LogitsInMemory(Receipt):
    """Reports the peak number of rows of logits in memory during a forward, the number without fusing, and the kernel.

    Logits cover all words, or the words that this worker scores.
    """

    def before_step(self, probe: Probe) -> dict[str, object]:
        head = next((module for module in probe.engine.model.modules() if isinstance(module, FusedHead)), None)
        if head is None:
            return {}
        # Not compiled: code that meets this mode under the compiler is never compiled again.
        with torch.compiler.set_stance("force_eager"), WidestRows() as widest:
            probe.forward()
        return {
            "logits_rows": max(widest.rows[width] for width in (head.out_features, head.columns)),
            "logits_rows_without": head.rows,
            "fused_loss_kernel": sorted(head.used),
        }


@dataclass(frozen=True, eq=False, repr=False)
class _Origin:
    """Everything that logits depend on, except the hidden states.

    Attributes:
        head: the layer.
        pointwise: functions that the model has applied to each logit since.
        dtype: type of the result.
        totals: sums of losses that were computed from them.
    """

    head: FusedHead
    pointwise: tuple[Pointwise, ...]
    dtype: torch.dtype
    totals: list[torch.Tensor] = field(default_factory=list)


class Logits(tuple[object, ...]):
    """Placeholder for the logits of a model in training. Their cross-entropy is computed without the logits.

    Operations of the model on its logits are applied to their sources. Selecting and reshaping rows is applied
    to the hidden states, and functions of each number are applied to each chunk later.

    It is a tuple (origin, hidden states), because ZeRO-3 and DDP look for tensors in a module's output, and ZeRO-3
    replaces them. They find the hidden states by iteration, so iteration must be that of a tuple.

    Raises:
        ModelError: for every other operation.
    """

    @classmethod
    def of(cls, head: FusedHead, hidden: torch.Tensor) -> Logits:
        """Return the logits that ``head`` would compute for ``hidden``, which has shape (..., hidden size)."""
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        return cls((_Origin(head, (), torch.get_autocast_dtype(device) if autocast else hidden.dtype), hidden))

    @property
    def _origin(self) -> _Origin:
        return cast(_Origin, tuple.__getitem__(self, 0))

    @property
    def _hidden(self) -> torch.Tensor:
        return cast(torch.Tensor, tuple.__getitem__(self, 1))

    def _of_rows(self, hidden: torch.Tensor) -> Logits:
        return Logits((self._origin, hidden))

    def _then(self, step: Pointwise, dtype: torch.dtype | None = None) -> Logits:
        origin = self._origin
        changed = replace(origin, pointwise=(*origin.pointwise, step), dtype=dtype or origin.dtype)
        return Logits((changed, self._hidden))

    # Properties.

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._origin.head.out_features))

    @property
    def dtype(self) -> torch.dtype:
        return self._origin.dtype

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def ndim(self) -> int:
        return self._hidden.ndim

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> int | torch.Size:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    # Selecting and reshaping rows.

    def view(self, *shape: Any) -> Logits:
        rows = divided_tensor.rows_of_view(
            shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape, self.shape
        )
        if rows is None:
            _refuse(f"a shape of {tuple(shape)}, which cuts their {self.shape[-1]} words")
        return self._of_rows(self._hidden.reshape(*rows, self._hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Logits:
        if not divided_tensor.flattens_rows(self.ndim, start_dim, end_dim):
            _refuse("flattening their words")
        return self._of_rows(self._hidden.flatten(start_dim, end_dim))

    def contiguous(self) -> Logits:
        return self

    def __getitem__(self, index: Any) -> Logits:
        if not divided_tensor.selects_rows(index, self.ndim):
            _refuse(f"the part {index!r}")
        return self._of_rows(self._hidden[index])

    # Functions of each number.

    def to(self, kind: torch.dtype | torch.device | str) -> Logits:
        if isinstance(kind, torch.dtype):
            return self._then(Pointwise(lambda x: x.to(kind), lambda gradient, y: gradient, dtype=kind), kind)
        if torch.device(kind).type != self.device.type:
            _refuse(f"moving them to {kind}")
        return self

    def float(self) -> Logits:
        return self.to(torch.float32)

    def tanh(self) -> Logits:
        return self._then(TANH)

    def __mul__(self, factor: Any) -> Logits:
        return self._then(scale(float(factor)))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Logits:
        return self._then(scale(1.0 / float(divisor)))

    def __add__(self, constant: object) -> Logits:
        if (
            not isinstance(constant, torch.Tensor)
            or constant.requires_grad
            or constant.shape[-1:] != self.shape[-1:]
            or math.prod(constant.shape[:-1]) != 1
        ):
            _refuse("a sum with anything but a constant for each word")
        return self._then(shift(constant.reshape(1, -1).to(self.dtype)))

    # The loss.

    def cross_entropy(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: builtins.float = 0.0,
    ) -> torch.Tensor:
        """Like ``torch.nn.functional.cross_entropy`` of (rows, words) and (rows,), with reduction mean or sum."""
        if weight is not None or size_average is not None or reduce is not None or reduction == "none":
            _refuse("a cross-entropy with weights or without a sum over the rows")
        if self.ndim != 2 or target.ndim != 1 or target.is_floating_point():
            _refuse(f"a cross-entropy of {tuple(self.shape)} and {tuple(target.shape)}, not of rows and their words")
        recipe = LossRecipe(self._origin.pointwise, ignore_index, label_smoothing)
        hidden = self._hidden
        if isinstance(hidden, divided_tensor.DividedTensor):
            total = hidden.summed(self._origin.head.loss(hidden.local, hidden.part_of(target), recipe))
        else:
            total = self._origin.head.loss(hidden, target, recipe)
        self._origin.totals.append(total)
        return total if reduction == "sum" else total / (target != ignore_index).sum()

    def zero_through_model(self) -> torch.Tensor:
        """Return a zero that depends on everything that these logits would depend on.

        It uses a computed sum, if there is one, because a second call of the head would gather a sharded weight
        on this worker only. The sum is finite even if no row counts, while the mean would be 0/0. It also uses the
        hidden states, because an engine watches them at the end of the model.
        """
        if self._origin.totals:
            return self._origin.totals[-1] * 0.0 + self._hidden.sum() * 0.0
        row = self._hidden.reshape(-1, self._hidden.shape[-1])[:1]
        return self._of_rows(row).cross_entropy(row.new_full((len(row),), -100, dtype=torch.long), reduction="sum")

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if function is F.cross_entropy and isinstance(args[0], cls):
            return args[0].cross_entropy(*args[1:], **(kwargs or {}))
        if function is torch.tanh:
            return args[0].tanh()
        return _refuse(f"torch's {getattr(function, '__name__', function)}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse(f"their {name}")


def _refuse(what: str) -> NoReturn:
    message = f"something asks the logits of a training step for {what}, and there are none"
    hint = f"take the loss from torch's cross_entropy of whole rows of logits, or leave {SWITCH_FLAG} out"
    raise ModelError(message, where=SWITCH_FLAG, hint=hint)


OPERATORS = ("sub", "rsub", "neg", "pow", "matmul", "radd", "rtruediv", "eq", "ne", "lt", "le", "gt", "ge", "contains")
"""Operators of tensors that tuples lack or define with another meaning."""

for _name in OPERATORS:
    setattr(Logits, f"__{_name}__", lambda self, *others, name=_name: _refuse(f"the operator {name}"))
