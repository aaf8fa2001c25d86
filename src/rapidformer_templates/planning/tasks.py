"""The tasks of ``--task``, one record each, and the metrics of a run, with the direction in which they improve.

The flag's values, the rules, the metrics that a plan knows, and the task of a saved model are derived from these
records. Imports no torch, because plans use it, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rapidformer_templates.planning.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """A task. No field has a default, so that a new task answers every question.

    Attributes:
        name: the value of ``--task``.
        implementation: ``module:Class``. It is imported on use, so that packages for metrics are loaded only when
            needed.
        own_flags: flags that act in this task and not in all others. Tasks without them refuse them.
        data_flags: flags that the task's own ``build_data`` reads and those of other tasks do not. A user's own
            ``build_data`` may read any flag.
        metrics: the names of the metrics that its ``compute_metrics`` returns.
        predicts_tokens: whether its loss is the log-likelihood of tokens of the vocabulary, from which a perplexity can
            be computed.
        is_smoothed: whether its loss is a cross-entropy over classes or tokens. With sentence pairs, it is a sum of two
            losses.
        compares_answers: whether a sample is a pair of answers.
        rows_per_sample: number of rows that a sample has in a batch. If only the data know it, a plan assumes this one.
        rows_are_samples: whether each row of its data is one sample.
        is_streamed: whether it makes samples row by row. Other tasks know their labels only after reading all rows.
        has_lengths: whether its samples have one length each, and integer labels that a row of padding can do without.
        continues_text: whether its model continues a text.
        model_classes: ends of the names of transformers classes of models that are for this task.
        hub_pipeline: the hub's name of the task.
        input_columns: the columns that its predictions read, by flag, with their usual names. A column without names
            is optional.
    """

    name: str
    implementation: str
    own_flags: tuple[str, ...]
    data_flags: tuple[str, ...]
    metrics: tuple[str, ...]
    predicts_tokens: bool
    is_smoothed: bool
    compares_answers: bool
    rows_per_sample: int
    rows_are_samples: bool
    is_streamed: bool
    has_lengths: bool
    continues_text: bool
    model_classes: tuple[str, ...]
    hub_pipeline: str | None
    input_columns: Mapping[str, tuple[str, ...]]


TEXT_COLUMNS = ("text", "sentence", "content", "document", "tweet", "review")
"""Columns that are searched for a text if ``--text-column`` is not given."""

PAIRS = {
    "sentence1": "sentence2",
    "premise": "hypothesis",
    "question1": "question2",
    "question": "sentence",
    "text": "text_pair",
}
"""Names of first texts, mapped to the names of their second texts."""

WORD_COLUMNS = ("tokens", "words", "text")
SOURCE_COLUMNS = ("source", "instruction", "input", "article", "question", *TEXT_COLUMNS)
MESSAGES = "messages"
"""The usual column of conversations."""

CHAT_COLUMNS = (MESSAGES, "conversations")
PROMPTS = {"prompt": ("completion",), "instruction": ("output", "response")}
"""Prompt columns, mapped to the usual names of their answer columns."""

PROMPT_COLUMNS = (*CHAT_COLUMNS, *PROMPTS, *TEXT_COLUMNS)
"""Columns that are searched for a text to continue, or a conversation to answer."""

_CONTEXTS = ("context", "ctx", "article", "passage", "sent1", "premise", "question", "question_stem")
CONTEXT_COLUMNS = (*_CONTEXTS, *TEXT_COLUMNS)
"""Columns that are searched for the text that comes before choices."""

_DATA_SET = (
    "data_dir",
    "data_name",
    "data_config",
    "data_split",
    "validation_fraction",
    "max_train_samples",
    "max_eval_samples",
    "eval_data_name",
)
_CORPUS = ("data_path", "split", "data_impl", "data_cache_dir", "text_unit")
_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

_RECORDS = (
    TaskFacts(
        name="sequence_classification",
        implementation="rapidformer_templates.data.tasks.sequence_classification:SequenceClassification",
        own_flags=("problem_type", "new_head"),
        data_flags=(*_DATA_SET, "label_column", "pair_column"),
        metrics=("accuracy", "f1", "matthews"),
        predicts_tokens=False,
        is_smoothed=True,
        compares_answers=False,
        rows_per_sample=1,
        rows_are_samples=True,
        is_streamed=False,
        has_lengths=True,
        continues_text=False,
        model_classes=("ForSequenceClassification",),
        hub_pipeline="text-classification",
        input_columns={"text_column": (*TEXT_COLUMNS, *PAIRS), "pair_column": ()},
    ),
    TaskFacts(
        name="token_classification",
        implementation="rapidformer_templates.data.tasks.token_classification:TokenClassification",
        own_flags=("new_head",),
        data_flags=(*_DATA_SET, "label_column"),
        metrics=("precision", "recall", "f1", "accuracy"),
        predicts_tokens=False,
        is_smoothed=True,
        compares_answers=False,
        rows_per_sample=1,
        rows_are_samples=True,
        is_streamed=False,
        has_lengths=True,
        continues_text=False,
        model_classes=("ForTokenClassification",),
        hub_pipeline="token-classification",
        input_columns={"text_column": WORD_COLUMNS},
    ),
    TaskFacts(
        name="question_answering",
        implementation="rapidformer_templates.data.tasks.question_answering:QuestionAnswering",
        own_flags=(),
        data_flags=(*_DATA_SET, "label_column", "pair_column"),
        metrics=("exact_match", "f1"),
        predicts_tokens=False,
        is_smoothed=False,
        compares_answers=False,
        rows_per_sample=1,
        rows_are_samples=False,
        is_streamed=False,
        has_lengths=False,
        continues_text=False,
        model_classes=("ForQuestionAnswering",),
        hub_pipeline="question-answering",
        input_columns={"pair_column": ("question",), "text_column": ("context",)},
    ),
    TaskFacts(
        name="multiple_choice",
        implementation="rapidformer_templates.data.tasks.multiple_choice:MultipleChoice",
        own_flags=("new_head",),
        data_flags=(*_DATA_SET, "label_column", "pair_column"),
        metrics=("accuracy",),
        predicts_tokens=False,
        is_smoothed=True,
        compares_answers=False,
        rows_per_sample=4,
        rows_are_samples=True,
        is_streamed=False,
        has_lengths=False,
        continues_text=False,
        model_classes=("ForMultipleChoice",),
        hub_pipeline="multiple-choice",
        input_columns={"text_column": CONTEXT_COLUMNS, "pair_column": ()},
    ),
    TaskFacts(
        name="masked_lm",
        implementation="rapidformer_templates.data.tasks.language_models:MaskedLM",
        own_flags=("mask_prob", "whole_word_mask"),
        data_flags=_DATA_SET,
        metrics=("token_accuracy",),
        predicts_tokens=True,
        is_smoothed=True,
        compares_answers=False,
        rows_per_sample=1,
        rows_are_samples=True,
        is_streamed=True,
        has_lengths=True,
        continues_text=False,
        model_classes=("ForMaskedLM",),
        hub_pipeline="fill-mask",
        input_columns={"text_column": TEXT_COLUMNS},
    ),
    TaskFacts(
        name="causal_lm",
        implementation="rapidformer_templates.data.tasks.language_models:CausalLM",
        own_flags=(),
        data_flags=(*_DATA_SET, "label_column"),
        metrics=("token_accuracy",),
        predicts_tokens=True,
        is_smoothed=True,
        compares_answers=False,
        rows_per_sample=1,
        rows_are_samples=True,
        is_streamed=True,
        has_lengths=True,
        continues_text=True,
        model_classes=("ForCausalLM", "LMHeadModel"),
        hub_pipeline="text-generation",
        input_columns={"text_column": PROMPT_COLUMNS},
    ),
    TaskFacts(
        name="seq2seq_lm",
        implementation="rapidformer_templates.data.tasks.seq2seq_lm:Seq2SeqLM",
        own_flags=(),
        data_flags=(*_DATA_SET, "label_column"),
        metrics=("rouge_l", "exact_match"),
        predicts_tokens=True,
        is_smoothed=True,
        compares_answers=False,
        rows_per_sample=1,
        rows_are_samples=True,
        is_streamed=True,
        has_lengths=False,
        continues_text=False,
        model_classes=("ForConditionalGeneration", "ForSeq2SeqLM"),
        hub_pipeline=None,
        input_columns={"text_column": SOURCE_COLUMNS},
    ),
    TaskFacts(
        name="preference",
        implementation="rapidformer_templates.data.tasks.preference:Preference",
        own_flags=(
            "preference_loss",
            "preference_beta",
            "simpo_gamma",
            "kto_desirable_weight",
            "kto_undesirable_weight",
            "precompute_reference",
        ),
        data_flags=_DATA_SET,
        metrics=_REWARDS,
        predicts_tokens=False,
        is_smoothed=False,
        compares_answers=True,
        rows_per_sample=2,
        rows_are_samples=False,
        is_streamed=False,
        has_lengths=False,
        continues_text=True,
        model_classes=(),
        hub_pipeline="text-generation",
        input_columns={"text_column": PROMPT_COLUMNS},
    ),
    TaskFacts(
        name="reward",
        implementation="rapidformer_templates.data.tasks.preference:Reward",
        own_flags=("new_head",),
        data_flags=_DATA_SET,
        metrics=_REWARDS,
        predicts_tokens=False,
        is_smoothed=False,
        compares_answers=True,
        rows_per_sample=2,
        rows_are_samples=True,
        is_streamed=False,
        has_lengths=False,
        continues_text=False,
        model_classes=(),
        hub_pipeline="text-classification",
        input_columns={},  # conversations, or pairs of answers, which have no single column
    ),
    TaskFacts(
        name="pretraining",
        implementation="rapidformer_templates.data.tasks.pretraining:Pretraining",
        own_flags=(
            "mask_prob",
            "whole_word_mask",
            "sentence_pairs",
            "short_seq_prob",
            "mean_span_length",
            "keep_documents_apart",
        ),
        data_flags=_CORPUS,
        metrics=("token_accuracy",),
        predicts_tokens=True,
        is_smoothed=True,
        compares_answers=False,
        rows_per_sample=1,
        rows_are_samples=False,
        is_streamed=True,
        has_lengths=True,
        continues_text=True,
        model_classes=(),
        hub_pipeline=None,
        input_columns={},
    ),
)

TASKS: Mapping[str, TaskFacts] = {record.name: record for record in _RECORDS}
"""The tasks by the value of ``--task``."""

METRICS_OF_PROBLEM: Mapping[str, tuple[str, ...]] = {
    "single_label_classification": TASKS["sequence_classification"].metrics,
    "multi_label_classification": ("f1", "f1_macro", "exact_match"),
    "regression": ("mse", "mae", "pearson"),
}
"""The metrics of sequence classification by the type of its labels. Without ``--problem-type``, the data decide."""


def tasks_with(condition: Callable[[TaskFacts], bool]) -> tuple[str, ...]:
    """Return the names of the tasks whose record fulfils a condition."""
    return tuple(name for name, record in TASKS.items() if condition(record))


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
