"""Checks of what ``build_data`` and ``collate`` return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import TypeVar

from rapidformer_templates.data.types import Batch, Data, Endless
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.flag_values import SET_NAME, TEST

S = TypeVar("S")
T = TypeVar("T")


def kind_of(value: object) -> str:
    """Describe the type of a value for a message: ``None``, ``a list``, ``an AdamW``."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def checked_data(data: object) -> Data:
    """Check the return value of ``build_data``.

    Raises:
        DataError: it is not a :class:`Data`, or a part of it cannot be indexed or called.
    """
    if not isinstance(data, Data):
        hint = "return Data(train=samples, valid=held_out, collate=collate)"
        if hasattr(data, "dataset") and hasattr(data, "collate_fn"):
            hint = "the loop makes the loaders: return Data(train=loader.dataset, collate=loader.collate_fn)"
        raise DataError(f"build_data returned {kind_of(data)}", where="build_data()", hint=hint)
    several = data.valid if isinstance(data.valid, Mapping) else {"": data.valid}
    for name in several:
        # Refuse a name of a validation set that metrics cannot use.
        if not isinstance(name, str) or not (name == "" or SET_NAME.fullmatch(name)) or name == TEST:
            raise DataError(
                f"a validation set of build_data is called {name!r}",
                where="Data(valid=…)",
                hint="use letters, digits, '.', '_' and '-' in their names, and call none of them test",
            )
    sets = {"train": data.train, "test": data.test, **{f"valid {name}".strip(): one for name, one in several.items()}}
    for part, samples in sets.items():
        # A mapping has both, but its keys are columns or names of parts.
        indexed = isinstance(samples, Sized) and hasattr(samples, "__getitem__") and not isinstance(samples, Mapping)
        endless = part == "train" and isinstance(samples, Endless)
        if samples is not None and not indexed and not endless:
            raise DataError(
                f"the {part} samples of build_data are {kind_of(samples)}",
                where=f"Data({part.split()[0]}=…)",
                hint="give anything with len and integer indexing, one item per sample: a list, a datasets.Dataset",
            )
    for part in ("collate", "augment"):
        function = getattr(data, part)
        if function is not None and not callable(function):
            raise DataError(f"{part} of build_data is {kind_of(function)}, not a function", where=f"Data({part}=…)")
    return data


def checked_batch(batch: Batch) -> Batch:
    """Check the return value of ``collate``.

    Raises:
        DataError: it is None.
    """
    if batch is None:
        raise DataError("collate returned None", where="Data(collate=…)", hint="return the batch: a dict of tensors")
    return batch


def collated(collate: Callable[[list[S]], T], items: list[S], where: str) -> T:
    """Collate with torch's default function, for data without ``collate``.

    Raises:
        DataError: the samples differ in kind or shape.
    """
    try:
        return collate(items)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"samples cannot be combined into a batch: {reason}", where=where, hint="give Data a collate function"
        ) from error
