"""The metrics of a run: their names, and whether a low or a high value is better. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.tasks import METRICS_OF_PROBLEM, TASKS

Direction = Literal["min", "max"]

# fmt: off
LEAST = (
    "loss", "perplexity", "ppl", "nll", "negative_log_likelihood", "cross_entropy", "bits_per_byte", "bpb",
    "bits_per_character", "bpc", "error", "errors", "err", "error_rate", "eer", "wer", "cer", "mer", "ter", "der",
    "wil", "edit_distance", "levenshtein",
    "mae", "mse", "rmse", "msle", "rmsle", "mape", "smape", "brier", "ece", "fid", "rejected",
)

MOST = (
    "accuracy", "acc", "exact_match", "em", "f1", "fbeta", "precision", "recall", "sensitivity", "specificity", "auc",
    "auroc", "roc_auc", "pr_auc", "average_precision", "mrr", "ndcg", "hit_rate", "bleu", "sacrebleu", "rouge",
    "rouge1", "rouge2", "rouge_1", "rouge_2", "rouge_l", "rougel", "rouge_lsum", "rougelsum", "meteor", "chrf",
    "bertscore", "comet", "matthews", "matthews_correlation", "mcc", "pearson", "pearsonr", "spearman", "spearmanr",
    "kendall_tau", "correlation", "kappa", "r2", "explained_variance", "iou", "dice", "jaccard", "log_likelihood",
    "accuracies", "chosen", "margins",
)

# Words that describe what a metric is averaged over. They do not change its direction.
QUALIFIERS = {
    "eval", "val", "valid", "validation", "test", "macro", "micro", "weighted", "binary", "mean", "avg", "average",
    "overall", "total",
}
# fmt: on

TURNED = {"neg", "negative", "minus", "inverse"}
"""Words that reverse a direction, as in sklearn's ``neg_mean_squared_error``."""

_KNOWN: Mapping[str, Direction] = {**dict.fromkeys(LEAST, "min"), **dict.fromkeys(MOST, "max")}


def metric_name(of: str, metric: str) -> str:
    """Return the name of a metric of an evaluated set. The unnamed validation part has no prefix.

    >>> metric_name("", "eval_loss"), metric_name("hard", "eval_loss"), metric_name("test", "f1")
    ('eval_loss', 'hard/loss', 'test/f1')
    """
    return f"{of}/{metric.removeprefix('eval_')}" if of else metric


def direction_of(name: str) -> Direction | None:
    """Return whether the lowest or the highest value of a metric is the best, by the end of its name. None if unknown.

    >>> direction_of("eval_wer"), direction_of("f1_macro"), direction_of("accuracy_drop")
    ('min', 'max', None)
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    while words and words[-1] in QUALIFIERS:
        words.pop()
    ends = ["_".join(words[i:]) for i in range(len(words))]
    ending = next((end for end in ends if end in _KNOWN), None)
    if ending is None or (TURNED.intersection(words) and ending != ends[0]):
        return None
    return _KNOWN[ending]


def metrics_of(config: RunConfig, *, of_task: bool = True) -> tuple[str, ...]:
    """Return the names of the results of an evaluation without a ``compute_metrics`` of the user.

    Args:
        of_task: whether the task's metrics are computed, as for the task's own data.
    """
    task = TASKS.get(config.training.task or "")
    # A perplexity is meaningful if the loss is the log-likelihood of a token and nothing is added to it.
    likelihood = task is not None and task.predicts_tokens and not config.data.sentence_pairs
    names = ("eval_loss", "perplexity") if likelihood else ("eval_loss",)
    if task is None or not of_task:
        return names
    if task.name == "preference":
        return (*names, *preference_metrics(is_unpaired=config.training.preference_loss == "kto"))
    if task.name == "sequence_classification":
        problem = config.data.problem_type  # None if only the data decide it
        groups = METRICS_OF_PROBLEM.values() if problem is None else (METRICS_OF_PROBLEM[problem],)
        return (*names, *dict.fromkeys(name for metrics in groups for name in metrics))
    return (*names, *task.metrics)


def preference_metrics(*, is_unpaired: bool) -> tuple[str, ...]:
    """Return the metrics of preferences. If each answer is judged separately, there is no accuracy of a choice."""
    return TASKS["preference"].metrics[: 3 if is_unpaired else 4]
