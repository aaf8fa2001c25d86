"""Runs without any code of the user's: the template is chosen from the task and the switches."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rapidformer_templates.errors import ConfigError

if TYPE_CHECKING:
    from rapidformer_templates.trainer import Trainer


def run(argv: Sequence[str]) -> int:
    """Train with the flags of ``argv``, or run the script that ``--user-script`` names with the others.

    Raises:
        RapidformerError: whatever the run refuses.
    """
    script, rest = _take_script(argv)
    if script is not None:
        return _run_script(script, rest)

    template_of(argv)(argv).fit()
    return 0


def template_of(argv: Sequence[str]) -> type[Trainer]:
    """The template that a black-box run with these flags has."""
    from rapidformer_templates import configure
    from rapidformer_templates.finetuner import Finetuner
    from rapidformer_templates.pretrainer import Pretrainer
    from rapidformer_templates.trainer import Trainer

    name, _ = configure.choose(argv)
    kinds: dict[str, type[Trainer]] = {"Trainer": Trainer, "Pretrainer": Pretrainer, "Finetuner": Finetuner}
    return kinds[name]


def _take_script(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of ``--user-script``, and the command line without it."""
    rest, script = [], None
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--user-script":
            script = value if equals else next(words, None)
            if not script:
                raise ConfigError("--user-script needs the path of a script")
        else:
            rest.append(word)
    return script, rest


def _run_script(script: str, argv: list[str]) -> int:
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"the script {script} does not exist", where="--user-script")
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")
    return 0
