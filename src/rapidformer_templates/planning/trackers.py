"""Experiment trackers that show the curves of a run: their names and packages. Does not import torch."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

PACKAGES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""The trackers, each with the module that must be installed."""

INSTALL: Final = dict.fromkeys(("tensorboard", "wandb", "mlflow"), "pip install 'rapidformer_templates[trackers]'") | {
    "trackio": "pip install trackio"
}


class TrackerNames(str):
    """A text such as ``tensorboard,wandb``. ``all`` means every installed tracker, ``none`` means no tracker.

    Attributes:
        names: the trackers in the text, without ``all`` and ``none``.

    Raises:
        ValueError: the text contains something else, or a name twice.
    """

    expected = f"names of {', '.join(PACKAGES)} separated by commas, all or none"
    names: tuple[str, ...]

    def __new__(cls, value: object) -> TrackerNames:
        words = value if isinstance(value, list | tuple) else str(value).split(",")
        names = tuple(str(word).strip().lower() for word in words)
        alone = names in (("all",), ("none",))
        if not alone and (not set(names) <= PACKAGES.keys() or len(set(names)) < len(names)):
            raise ValueError(cls.expected)
        self = super().__new__(cls, ",".join(names))
        self.names = () if alone else names
        return self


def chosen_trackers(requested: str | None, installed: Container[str]) -> tuple[str, ...]:
    """Return the trackers of a run.

    Args:
        requested: the value of ``--report-to``.
        installed: the installed modules.
    """
    if requested == "all":
        return tuple(name for name, package in PACKAGES.items() if package in installed)
    return TrackerNames(requested).names if requested else ()  # other processes pass it as plain text
