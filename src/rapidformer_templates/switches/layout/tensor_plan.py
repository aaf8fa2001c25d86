"""Which dimension of each parameter is divided under tensor parallelism. These functions also work on the meta device.

A plan assigns styles to modules. It comes from the model itself (``tensor_plan``, or the ``_tp_plan`` that transformers
builds from a model's configuration). For architectures without one, it comes from this package. Column parallelism
divides the output features of a layer, row parallelism its input features. So a pair of them needs one sum over the
workers (Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.adapters import adapter_parts, name_without_adapters, trained_whole
from rapidformer_templates.models.blocks import AbsentModule
from rapidformer_templates.models.divided_tensor import LossHead
from rapidformer_templates.switches.layout import tensor_styles


@dataclass(frozen=True)
class Division:
    """How a parameter is divided: along ``dim``, which contains ``parts`` equal parts that are divided separately."""

    dim: int
    parts: int = 1

    @property
    def placement(self) -> Placement:
        return _StridedShard(self.dim, split_factor=self.parts) if self.parts > 1 else Shard(self.dim)


@dataclass(frozen=True)
class TensorPlan:
    """The changes that tensor parallelism makes to a model.

    Attributes:
        styles: styles by module name. Modules without one keep whole parameters.
        divisions: divisions by parameter name, with every name of a tied parameter. Whole parameters have no entry.
        partial: names of whole parameters for which each worker computes a part of the gradient.
        local_sizes: attributes of regions that must be divided, too.
        is_user_plan: whether this is the user's ``tensor_plan``. It guarantees nothing about the parameters around
            divided layers.
        adapted: in layers with adapters, the layer that a styled part belongs to, by the name of the part.
    """

    styles: Mapping[str, str]
    divisions: Mapping[str, Division]
    partial: frozenset[str]
    local_sizes: tuple[str, ...] = ()
    is_user_plan: bool = False
    adapted: Mapping[str, str] = field(default_factory=dict)

    @property
    def undivided(self) -> list[str]:
        """The names of the modules in blocks whose layers have whole inputs and outputs."""
        kinds = (tensor_styles.GATHERED_COLUMN, tensor_styles.EXPERTS)
        layers = (self.adapted.get(name, name) for name, style in self.styles.items() if style in kinds)
        return sorted({layer.rpartition(".")[0] for layer in layers})


def tensor_plan_of(model: nn.Module) -> TensorPlan:
    """Return the plan of a model.

    Raises:
        ModelError: the model has no plan, or the plan is not supported. It may name an unknown style or layer, or
            layers may share a parameter and divide it differently.
    """
    styles, adapted = _with_adapter_styles(model, _styles_of(model))
    is_user_plan = bool(getattr(model, "tensor_plan", None))
    if is_user_plan and adapted:
        message = "adapters of divided layers need a plan of the architecture, but the model brings its own tensor_plan"
        raise ModelError(message, where=_WHERE, hint="leave out --lora-rank or --tensor-model-parallel-size")
    divisions: dict[int, Division] = {}
    partial: set[int] = set()
    for name, style in styles.items():
        for parameter, division in _divided_parameters(model, name, style):
            if division is not None and divisions.setdefault(id(parameter), division) != division:
                raise ModelError(f"{name} shares a parameter that is divided differently", where=_WHERE)
            if style == tensor_styles.PARTIAL:
                partial.add(id(parameter))
    named = list(model.named_parameters(remove_duplicate=False))
    return TensorPlan(
        styles,
        {name: divisions[id(p)] for name, p in named if id(p) in divisions},
        frozenset(name for name, p in named if id(p) in partial),
        tensor_styles.LOCAL_SIZES.get(_type_of(model), ()),
        is_user_plan,
        adapted,
    )


def _type_of(model: nn.Module) -> str:
    settings: object = getattr(model, "config", None)
    return getattr(settings, "model_type", None) or ""


def check_sizes(model: nn.Module, plan: TensorPlan, size: int) -> None:
    """Raise a :class:`ModelError` if ``size`` workers cannot divide the heads or the parts of fused matrices.

    The vocabulary and the feed-forward width need not be multiples: the last worker's share is smaller.
    """
    settings: object = getattr(model, "config", None)
    for key, words in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key-value heads")):
        heads = getattr(settings, key, None)
        if isinstance(heads, int) and heads % size:
            message = f"{heads} {words} cannot be divided over {size} workers"
            hint = f"choose a tensor size that divides {heads}"
            raise ModelError(message, where="--tensor-model-parallel-size", hint=hint)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, division in plan.divisions.items():
        length = parameters[name].shape[division.dim]
        if length < size or (division.parts > 1 and length % (division.parts * size)):
            message = f"{name} of shape {tuple(parameters[name].shape)} cannot be divided over {size} workers"
            raise ModelError(message, where="--tensor-model-parallel-size", hint="choose a smaller tensor size")


_WHERE = "tensor plan"

STACK_ADAPTER_STYLES = {
    "packed_colwise": (tensor_styles.PARTIAL, "packed_colwise"),
    **dict.fromkeys(("colwise", tensor_styles.EXPERTS_COLUMN), (tensor_styles.PARTIAL, "colwise")),
    **dict.fromkeys((*tensor_styles.ROW, tensor_styles.EXPERTS_ROW), ("rowwise", tensor_styles.PARTIAL)),
}
"""The styles of the two matrices of an adapter on a stack of experts, by the style of the stack."""


def _styles_of(model: nn.Module) -> dict[str, str]:
    """Return the styles of modules, and of parameters that a plan names directly."""
    own_plans: list[Mapping[str, str] | None] = [getattr(model, key, None) for key in ("tensor_plan", "_tp_plan")]
    patterns = next((plan for plan in (*own_plans, tensor_styles.PLANS.get(_type_of(model))) if plan), None)
    if patterns is None:
        raise _no_tensor_plan(model)
    unknown = sorted({style for style in patterns.values() if style not in tensor_styles.KNOWN})
    if unknown:
        message = f"the tensor plan of {type(model).__name__} has styles that are not known here: {', '.join(unknown)}"
        raise ModelError(message, where=_WHERE, hint=f"known are {', '.join(sorted(tensor_styles.KNOWN))}")
    # In a pattern, ``*`` is a number, and the name may have a prefix.
    escaped = {re.escape(pattern).replace(r"\*", r"\d+"): style for pattern, style in patterns.items()}
    expressions = [(re.compile(r"(.*\.)?" + pattern), style) for pattern, style in escaped.items()]
    # Modules of other pipeline stages are not divided here, nor layers that a mixture has replaced.
    names = {name for name, module in model.named_modules() if not isinstance(module, (AbsentModule, nn.Identity))}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    styles: dict[str, str] = {}
    copies = trained_whole(model)
    for name in sorted((names | parameters) - set(copies.values())):  # peft calls only the copy
        named = name_without_adapters(name) if name in parameters else name
        for copy, original in copies.items():
            named = original + named.removeprefix(copy) if f"{named}.".startswith(f"{copy}.") else named
        style = next((style for expression, style in expressions if expression.fullmatch(named)), None)
        if style is not None:
            styles[name] = style
    if not any(
        style in tensor_styles.COLUMN | tensor_styles.ROW | {tensor_styles.GATHERED_COLUMN, tensor_styles.SPLIT_ROW}
        for style in styles.values()
    ):
        raise _no_tensor_plan(model)
    styles |= {
        f"{name}.{key}" if key else name: style
        for name, module in model.named_modules()  # those that a switch has put in place of planned ones
        for key, style in getattr(module, "tensor_styles", {}).items()
        if not key or module._parameters[key] is not None
    }
    return styles | _vocabulary(model)


def _with_adapter_styles(model: nn.Module, styles: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Replace the styles of adapted layers with the styles of their parts. Also return the layer of each part.

    For a column-parallel layer, the first matrix is whole, and each worker has a part of its gradient. The second is
    divided as the layer is. For a row-parallel layer, the first matrix is divided as the layer is. Its summed output
    goes through a whole second matrix. For the rows of experts, there is no sum before that of the experts themselves.
    So each worker has a part of the second matrix's gradient.
    """
    styles_with_adapters, layers = dict(styles), {}
    stacks = {name_without_adapters(name): style for name, style in styles.items()}
    for name, module in model.named_modules():
        parts = adapter_parts(module)
        if parts is None:
            continue
        if parts.stack:
            style = stacks.get(f"{name_without_adapters(name)}.{parts.stack}", tensor_styles.REPLICATED)
            down, up = STACK_ADAPTER_STYLES.get(style, (tensor_styles.REPLICATED, tensor_styles.REPLICATED))
            styles_with_adapters |= {f"{name}.{parts.down}.weight": down, f"{name}.{parts.up}.weight": up}
            continue
        style = styles_with_adapters.pop(name, tensor_styles.REPLICATED)
        down, up = {
            **dict.fromkeys(tensor_styles.COLUMN, (tensor_styles.PARTIAL, style)),
            **dict.fromkeys(tensor_styles.ROW, (style, tensor_styles.REPLICATED)),
        }.get(style, (tensor_styles.REPLICATED, tensor_styles.REPLICATED))
        for part, its_style in ((parts.base, style), (parts.down, down), (parts.up, up)):
            styles_with_adapters[f"{name}.{part}"] = its_style
            layers[f"{name}.{part}"] = name
    return styles_with_adapters, layers


def _no_tensor_plan(model: nn.Module) -> ModelError:
    return ModelError(
        f"{type(model).__name__} has no tensor plan: nothing says which of its matrices are divided, and how",
        where="--tensor-model-parallel-size",
        hint="use an architecture that has one (llama, qwen2, mistral, gpt_neox, gpt2, bert, roberta, t5 …), or give "
        'the model an attribute such as tensor_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}',
    )


def _vocabulary(model: nn.Module) -> dict[str, str]:
    """Return the styles of the token embeddings and of the output heads."""
    styles: dict[str, str] = {}
    names = {module: name for name, module in model.named_modules()}
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        embedding, head = _module_or_none(part.get_input_embeddings), _module_or_none(part.get_output_embeddings)
        if type(embedding) is nn.Embedding and embedding in names:
            styles[names[embedding]] = tensor_styles.EMBEDDING
        if (type(head) is nn.Linear or isinstance(head, LossHead)) and head in names:
            styles[names[head]] = tensor_styles.VOCABULARY_HEAD
    return styles


def _module_or_none(question: Callable[[], nn.Module | None]) -> nn.Module | None:
    try:
        return question()
    except (AttributeError, NotImplementedError):  # the model or this stage has no such module
        return None


def _divided_parameters(model: nn.Module, name: str, style: str) -> Iterator[tuple[nn.Parameter, Division | None]]:
    """Yield the parameters of a styled name, each with its division, or None if it is whole."""
    owner, _, key = name.rpartition(".")
    parameter = (model.get_submodule(owner) if owner else model)._parameters.get(key)
    if style == tensor_styles.REPLICATED or (style == tensor_styles.EXPERTS and parameter is None):
        return  # the plan lists the parameters of experts separately
    is_whole = style == tensor_styles.PARTIAL
    if parameter is not None:
        yield parameter, None if is_whole else _division_of_parameter(name, parameter, style)
        return
    module = model.get_submodule(name)
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield parameter, None if is_whole else _division_in_layer(name, module, key, style)


def _division_of_parameter(name: str, parameter: nn.Parameter, style: str) -> Division:
    """Return the division of a single parameter. Experts store (experts, output features, input features).

    Their adapters are (output, input) features, with several features for each expert.
    """
    is_matrix = parameter.ndim in (2, 3)
    if style in ("colwise", "packed_colwise") and is_matrix:
        return Division(parameter.ndim - 2, tensor_styles.PARTS.get(style, 1))
    if style == tensor_styles.EXPERTS_COLUMN or (style in tensor_styles.ROW and is_matrix):
        return Division(parameter.ndim - 1)
    if style == tensor_styles.EXPERTS_ROW:
        return Division(1)
    if style == "colwise" and parameter.ndim == 1:
        return Division(0)
    raise ModelError(f"{name} of shape {tuple(parameter.shape)} cannot be {style}", where=_WHERE)


def _division_in_layer(name: str, layer: nn.Module, key: str, style: str) -> Division | None:
    if isinstance(layer, nn.Embedding) and style in (tensor_styles.EMBEDDING, "embedding_colwise"):
        return Division(0 if style == tensor_styles.EMBEDDING else 1)
    if isinstance(layer, (nn.Linear, Conv1D)):
        # Linear stores (output, input) features, Conv1D (input, output).
        output, input_ = (0, 1) if isinstance(layer, nn.Linear) else (1, 0)
        if style in (*tensor_styles.ROW, tensor_styles.SPLIT_ROW):
            return Division(input_) if key == "weight" else None
        if style in (*tensor_styles.COLUMN, tensor_styles.GATHERED_COLUMN, tensor_styles.VOCABULARY_HEAD):
            return Division(output if key == "weight" else 0, tensor_styles.PARTS.get(style, 1))
    raise ModelError(f"{name}, a {type(layer).__name__}, cannot be {style}", where=_WHERE, hint="use another plan")
