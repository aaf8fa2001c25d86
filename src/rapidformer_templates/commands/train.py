"""Runs without user code. The template is chosen from the task and the switches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rapidformer_templates.run import configure
from rapidformer_templates.run.early_checks import refuse_mistakes
from rapidformer_templates.run.scripts import run_script, split_script
from rapidformer_templates.system.launch import is_worker

if TYPE_CHECKING:
    from rapidformer_templates.trainer import Trainer


def run(argv: Sequence[str]) -> int:
    """Train with the flags in ``argv``. If ``--user-script`` names a script, run it with the other flags instead.

    Raises:
        RapidformerError: the run is refused or fails.
    """
    script, rest = split_script(argv)
    if script is not None:
        run_script(script, rest)
        return 0

    name = configure.choose(argv)[0] if is_worker() else refuse_mistakes(argv)
    _template(name)(argv).fit()
    return 0


def template_of(argv: Sequence[str]) -> type[Trainer]:
    """Return the template of a black-box run with these flags."""
    return _template(configure.choose(argv)[0])


def _template(name: str) -> type[Trainer]:
    from rapidformer_templates.finetuner import Finetuner
    from rapidformer_templates.pretrainer import Pretrainer
    from rapidformer_templates.trainer import Trainer

    kinds: dict[str, type[Trainer]] = {"Trainer": Trainer, "Pretrainer": Pretrainer, "Finetuner": Finetuner}
    return kinds[name]
