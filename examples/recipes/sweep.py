"""A search over learning rates and warmups with Optuna. It runs in a minute on a CPU: generated data, a tiny model.

    python sweep.py
    python sweep.py --trials 40 --nproc-per-node 2 --fsdp-memory-optimization
    python sweep.py --study runs/other --epochs 5 --mixed-precision bf16

Bad trials end early. Start it again after an interruption: the study continues. It needs `pip install optuna`.
"""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from rapidformer_templates import Callback, Data, Finetuner, RapidformerError, flag
from rapidformer_templates.errors import NonFiniteLoss

if importlib.util.find_spec("optuna") is None:
    sys.exit("error: this search needs Optuna\n  help   pip install optuna")

import optuna
from optuna.trial import TrialState

DEFAULTS: dict[str, Any] = {"epochs": 3, "micro_batch_size": 16, "eval_interval": 16, "log_interval": 64}
PRUNED = "the study has pruned this trial"


@dataclass(frozen=True)
class SweepFlags:
    """Search"""

    study: str = flag("runs/sweep", "folder of the study and of its runs")
    trials: int = flag(12, "number of trials, including those of earlier starts", minimum=1)


class MyTask(Finetuner):
    """Fine-tune a classifier of made sequences: are most of their tokens small?"""

    Flags = SweepFlags

    def build_data(self) -> Data:
        tokens = torch.randint(100, (1280, 9), generator=torch.Generator().manual_seed(0))
        samples = [{"input_ids": row, "labels": (row < 50).sum() > 4} for row in tokens]
        return Data(train=samples[:1024], valid=samples[1024:])

    def build_model(self) -> nn.Module:  # in your task: from_pretrained(FOLDER, dtype="float32")
        config = BertConfig(
            vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return BertForSequenceClassification(config)

    def compute_loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return nn.functional.cross_entropy(logits, batch["labels"].long())


def suggest(trial: optuna.Trial) -> dict[str, float]:
    """Return the flags of a trial: this is the space of the search."""
    return {
        "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
        "lr_warmup_fraction": trial.suggest_float("lr_warmup_fraction", 0.0, 0.2, step=0.1),
    }


class Prune(Callback):
    """Reports each evaluation to the study, and ends a run that is worse than the others."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if trainer.is_main:
            self.trial.report(metrics["eval_loss"], step)
            if self.trial.should_prune():
                trainer.stop(PRUNED)


def search(argv: list[str], sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
    """Run the trials that are missing, and return the study."""
    config = MyTask(argv).config
    flags: SweepFlags = config.user
    Path(flags.study).mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.RDBStorage(f"sqlite:///{flags.study}/study.db")
    study = optuna.create_study(
        storage=storage, study_name="sweep", load_if_exists=True, direction="minimize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )  # fmt: skip
    # A study that continues needs another seed: with the first one, it would try the first values again.
    study.sampler = sampler or optuna.samplers.TPESampler(seed=len(study.trials))

    def objective(trial: optuna.Trial) -> float:
        values = {**suggest(trial), "save": f"{flags.study}/trial-{trial.number}"}
        for name in values:
            if config.origin(name) != "default":
                message = f"the search sets --{name.replace('_', '-')} for each trial"
                raise RapidformerError(message, where=config.origin(name), hint="leave it out, or change suggest()")
        task = MyTask(argv, callbacks=[Prune(trial)], **DEFAULTS, **values)
        try:
            summary = task.fit(workers=task.config.launch.nproc_per_node)
        except NonFiniteLoss as error:  # the learning rate is too high
            raise optuna.TrialPruned from error
        if PRUNED in (summary["stopped_early"] or ""):
            raise optuna.TrialPruned
        return summary["metrics"]["eval_loss"]

    done = study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
    study.optimize(objective, n_trials=max(0, flags.trials - len(done)))
    return study


if __name__ == "__main__":
    study = search(sys.argv[1:])
    if not study.get_trials(states=(TrialState.COMPLETE,)):
        sys.exit("error: no trial is complete\n  help   start again with more --trials")
    best = study.best_trial
    print(f"best trial {best.number}: eval_loss {best.value:.4f} with {best.params}")
