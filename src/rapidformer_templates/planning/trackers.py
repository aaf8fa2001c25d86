"""Trackers that show the curves of a run: their names, and what each needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

PACKAGES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""The trackers, each with the module that must be there."""

INSTALL: Final = dict.fromkeys(("tensorboard", "wandb", "mlflow"), "pip install 'rapidformer_templates[trackers]'") | {
    "trackio": "pip install trackio"
}


class Trackers(str):
    """A text such as ``tensorboard,wandb``; ``all`` stands for every tracker that is installed, ``none`` for none.

    Attributes:
        names: those that it names, ``all`` and ``none`` left out.

    Raises:
        ValueError: the text names something else, or one twice.
    """

    expected = f"names of {', '.join(PACKAGES)} with commas between them, all or none"
    names: tuple[str, ...]

    def __new__(cls, value: object) -> Trackers:
        words = value if isinstance(value, list | tuple) else str(value).split(",")
        names = tuple(str(word).strip().lower() for word in words)
        alone = names in (("all",), ("none",))
        if not alone and (not set(names) <= PACKAGES.keys() or len(set(names)) < len(names)):
            raise ValueError(cls.expected)
        self = super().__new__(cls, ",".join(names))
        self.names = () if alone else names
        return self


def chosen_trackers(asked: str | None, installed: Container[str]) -> tuple[str, ...]:
    """The trackers of a run.

    Args:
        asked: what ``--report-to`` says.
        installed: the modules that are there.
    """
    if asked == "all":
        return tuple(name for name, package in PACKAGES.items() if package in installed)
    return Trackers(asked).names if asked else ()  # which other processes hand on as plain text
