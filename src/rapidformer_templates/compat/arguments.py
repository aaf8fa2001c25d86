"""``get_args()`` for PAI-Rapidformer's scripts: the flags of the library and those that the script has added."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.registry import REGISTRY

ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


class Arguments:
    """Flag values as attributes. The values of the library's flags cannot be changed.

    ``vars`` returns all of them. A copy or a pickle is a plain namespace with the values at that time.
    """

    __slots__ = ("_config", "_own")

    def __init__(self, config: Callable[[], RunConfig], script_values: argparse.Namespace) -> None:
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_own", script_values)

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        config = self._config()
        return {name: config.get(name) for name in sorted(_library_flags())} | vars(self._own)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[argparse.Namespace], tuple[()], dict[str, object]]:
        return argparse.Namespace, (), vars(self)

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def __repr__(self) -> str:
        return repr(argparse.Namespace(**vars(self)))

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._own, name):
            return getattr(self._own, name)
        if name in _library_flags():
            return self._config().get(name)
        raise AttributeError(
            f"there is no flag {spelling(name)}: add it with RapidformerEngine(extra_args_provider=…), "
            "or look for its name here with rapidformer --help-all"
        )

    def __setattr__(self, name: str, value: object) -> None:
        if name in _library_flags() and value != self._config().get(name):
            raise ConfigError(
                f"args.{name} = {value!r} would change nothing: flags are read before the script sets it",
                hint=f"give {spelling(name)} on the command line",
            )
        setattr(self._own, name, value)


def _library_flags() -> set[str]:
    options = (*SECTIONS.values(), *REGISTRY.options().values())
    return {field.name for kind in options for field in dataclasses.fields(kind)}


def split_script_flags(words: Sequence[str], provider: ExtraArgs | None) -> tuple[argparse.Namespace, list[str]]:
    """Return (the flags that a script has added, the remaining words for the library).

    Raises:
        ConfigError: a flag has the name of one of the library's flags.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if provider is not None:
        provider(parser)
    reserved = sorted({action.dest for action in parser._actions} & _library_flags())
    if reserved:
        raise ConfigError(
            f"{spelling(reserved[0])} is a flag of the library", where="extra_args_provider", hint="leave it out there"
        )
    return parser.parse_known_args(list(words))


class Timers:
    """The named timers of ``get_timers()``: ``timers("name").start()``, ``.stop()``, ``timers.log(["name"])``."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        return self._timers.setdefault(name, Timer())

    def log(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Print the times of these timers in milliseconds, divided by ``normalizer``."""
        texts = (f"{name}: {self(name).elapsed(reset) * 1000 / normalizer:.2f}" for name in names)
        print("time (ms) | " + " | ".join(texts), flush=True)


class Timer:
    """One timer. It adds up the time between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, None

    _since: float | None

    def start(self, barrier: bool = False) -> None:
        self._since = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
        self._since = None

    def elapsed(self, reset: bool = True) -> float:
        """Return the seconds so far."""
        seconds = self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)
        if reset:
            self._seconds = 0.0
        return seconds
