"""Whether a metric should be low or high, by its name. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

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


TEST = "test"
"""The name of the test part among the evaluated sets."""


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
