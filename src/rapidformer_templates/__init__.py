"""Templates for Transformer training in which every acceleration is one switch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rapidformer_templates.data.types import Data as Data
    from rapidformer_templates.engines.recipe import OptimizerSpec as OptimizerSpec
    from rapidformer_templates.errors import RapidformerError as RapidformerError
    from rapidformer_templates.finetuner import Finetuner as Finetuner
    from rapidformer_templates.planning.flags import flag as flag
    from rapidformer_templates.pretrainer import Pretrainer as Pretrainer
    from rapidformer_templates.run.hooks import Callback as Callback
    from rapidformer_templates.switches.mixture_of_experts.transform import load_mixture as load_mixture
    from rapidformer_templates.trainer import Trainer as Trainer
    from rapidformer_templates.trainer import compose as compose

_HOME = {
    "Callback": "rapidformer_templates.run.hooks",
    "Data": "rapidformer_templates.data.types",
    "Finetuner": "rapidformer_templates.finetuner",
    "OptimizerSpec": "rapidformer_templates.engines.recipe",
    "Pretrainer": "rapidformer_templates.pretrainer",
    "RapidformerError": "rapidformer_templates.errors",
    "Trainer": "rapidformer_templates.trainer",
    "compose": "rapidformer_templates.trainer",
    "flag": "rapidformer_templates.planning.flags",
    "load_mixture": "rapidformer_templates.switches.mixture_of_experts.transform",
}

__all__ = [
    "Callback",
    "Data",
    "Finetuner",
    "OptimizerSpec",
    "Pretrainer",
    "RapidformerError",
    "Trainer",
    "compose",
    "flag",
    "load_mixture",
]
__version__ = "0.1.0"


if not TYPE_CHECKING:  # so that type checkers find misspelt names

    def __getattr__(name: str) -> Any:
        # Import lazily, because `rapidformer plan` must work without torch.
        if name in _HOME:
            try:
                if name in ("Finetuner", "Pretrainer", "Trainer"):
                    from rapidformer_templates.run.early_checks import exit_on_mistakes_of_program

                    exit_on_mistakes_of_program()
                return getattr(import_module(_HOME[name]), name)
            except KeyboardInterrupt:
                from rapidformer_templates.system import launch

                launch.interrupted_while_importing()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
