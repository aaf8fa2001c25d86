"""How the tensor plan of a model divides its parameters."""

from torch import nn

from rapidformer_templates.switches.layout.tensor_plan import tensor_plan_of


def shard_dims(model: nn.Module) -> dict[str, int | None]:
    """Return the dimension along which each parameter of ``named_parameters`` is divided, or None if it is whole."""
    divisions = tensor_plan_of(model).divisions
    return {name: divisions[name].dim if name in divisions else None for name, _ in model.named_parameters()}
