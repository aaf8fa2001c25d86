"""Rules about how a run trains and what it writes. They belong to no switch."""

from __future__ import annotations

from rapidformer_templates.errors import alike
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.deepspeed_file.settings import file_schedule
from rapidformer_templates.planning.flag_values import TRACKERS, TRACKERS_INSTALL, TrackerNames, chosen_trackers
from rapidformer_templates.planning.metrics import direction_of, metrics_of
from rapidformer_templates.planning.optimizers import BETAS
from rapidformer_templates.planning.request import optimizer_facts
from rapidformer_templates.planning.schedules import SHAPING, STYLES, warmup_steps
from rapidformer_templates.planning.switch import (
    REPLACE,
    Change,
    Example,
    Finding,
    Request,
    RuleList,
    add,
    drop,
    replace,
)
from rapidformer_templates.planning.tasks import tasks_with

TRAINING_RULES = RuleList()


@TRAINING_RULES.add(
    "RF098",
    "The metric of the best checkpoint has a direction.",
    "the wrong direction keeps and exports the worst checkpoint",
    "[rapidformer_templates]",
    Example("--metric-for-best utility"),
    refusal="A metric for the best checkpoint of which it is not known whether higher or lower is better.",
)
def _best_is_known(request: Request) -> list[Finding]:
    training = request.config.training
    name = training.metric_for_best
    if name is None:
        return []
    findings = []
    if training.keep_best is False:
        changes = (replace({"keep_best": True}), drop({"metric_for_best": None, "metric_for_best_mode": None}))
        message = "--metric-for-best has no effect if no best checkpoint is kept"
        findings.append(Finding(message, request.asked("metric_for_best", "keep_best"), changes=changes))
    # Without the user's own hooks, a task has fixed metrics, and check_metric reports any other name.
    can_be_own = training.task is None or request.environment.white_box
    if can_be_own and training.metric_for_best_mode is None and direction_of(name) is None:
        near = alike(name, metrics_of(request.config))
        findings.append(
            Finding(
                f"cannot tell whether a higher or a lower '{name}' is better",
                request.asked("metric_for_best"),
                changes=(
                    *(add({"metric_for_best": other}, "a metric of the task") for other in near),
                    add({"metric_for_best_mode": "max"}, "higher is better"),
                    add({"metric_for_best_mode": "min"}, "lower is better"),
                ),
            )
        )
    return findings


@TRAINING_RULES.add(
    "RF285",
    "--allow-changed-data needs a checkpoint to continue from.",
    "without its samples there is nothing that has changed",
    "[rapidformer_templates]",
    Example("--allow-changed-data"),
    refusal="--allow-changed-data in a run that starts from the beginning, or from weights only.",
)
def _data_have_changed(request: Request) -> list[Finding]:
    training = request.config.training
    if not training.allow_changed_data or training.resume or (training.load and not training.weights_only):
        return []
    changes = (add({"resume": True}), drop({"allow_changed_data": False}))
    message = "--allow-changed-data has no effect: no checkpoint is continued"
    return [Finding(message, request.asked("allow_changed_data", "weights_only"), changes=changes)]


@TRAINING_RULES.add(
    "RF111",
    "A run that may stop early is evaluated during training and keeps its best checkpoint.",
    "it stops when evaluations no longer improve on the best one, whose weights are exported",
    "[rapidformer_templates]",
    Example("--early-stopping-patience 3 --no-keep-best --epochs 20"),
    refusal="Early stopping in a run that is not evaluated during training or does not keep its best checkpoint.",
)
def _stops_early(request: Request) -> list[Finding]:
    training = request.config.training
    if training.early_stopping_patience is None:
        return []
    findings = []
    if training.keep_best is False:
        changes = (replace({"keep_best": True}), drop({"early_stopping_patience": None}))
        message = "--early-stopping-patience has no effect if no best checkpoint is kept"
        findings.append(Finding(message, request.asked("early_stopping_patience", "keep_best"), changes=changes))
    if isinstance(training.train_iters, int) and training.eval_interval is None:
        changes = (
            add({"eval_interval": max(1, training.train_iters // 10)}, "steps between evaluations"),
            drop({"early_stopping_patience": None}),
        )
        message = "--early-stopping-patience has no effect: a run by --train-iters is evaluated only at its end"
        findings.append(Finding(message, request.asked("early_stopping_patience", "train_iters"), changes=changes))
    return findings


@TRAINING_RULES.add(
    "RF114",
    "The decay of a moving average of the weights is below 1.",
    "with 1 the average would never change after the first step",
    "[torch]",
    Example("--ema-decay 1"),
    refusal="A moving average of the weights with a decay of 1 or more.",
)
def _averages(request: Request) -> list[Finding]:
    if request.config.training.ema_decay != 1:
        return []
    message = "--ema-decay 1 never changes the average"
    return [Finding(message, request.asked("ema_decay"), changes=(replace({"ema_decay": 0.999}),))]


@TRAINING_RULES.add(
    "RF112",
    "Label smoothing needs a loss that is one cross-entropy over classes or words.",
    "positions in a text are not classes, and the library does not know what your own loss consists of",
    "[torch, transformers]",
    Example("--task question_answering --label-smoothing 0.1"),
    refusal="Label smoothing for a loss that is not one cross-entropy over classes or words.",
)
def _smooths(request: Request) -> list[Finding]:
    training = request.config.training
    tasks = tasks_with(lambda task: task.is_smoothed)
    is_smoothed = training.task in tasks
    if not training.label_smoothing or (is_smoothed and not request.config.data.sentence_pairs):
        return []
    what = "sentence pairs" if is_smoothed else training.task or "a loss without a task"
    changes = (drop({"label_smoothing": 0.0}), *(() if training.task else (add({"task": "causal_lm"}),)))
    message = f"--label-smoothing is for the cross-entropies of --task {', '.join(tasks)}, not for {what}"
    return [Finding(message, request.asked("label_smoothing", "task"), changes=changes)]


@TRAINING_RULES.add(
    "RF113",
    "Noise on the embeddings is for models that read one sequence.",
    "encoder and decoder share their embeddings, but it is not known for both which tokens are padding",
    "[transformers]",
    Example("--task seq2seq_lm --neftune-alpha 5"),
    refusal="Noise on the embeddings of an encoder-decoder model.",
)
def _one_sequence(request: Request) -> list[Finding]:
    training = request.config.training
    if not training.neftune_alpha or training.task != "seq2seq_lm":
        return []
    message = "--neftune-alpha is for models that read one sequence, not for --task seq2seq_lm"
    return [Finding(message, request.asked("neftune_alpha", "task"), changes=(drop({"neftune_alpha": None}),))]


def _shaping_nothing(request: Request) -> list[Finding]:
    """Refuse flags that do not act on the chosen schedule."""
    training = request.config.training
    name = training.lr_decay_style
    why = "a constant rate does not decay" if name == "constant" else f"{name} does not use it"
    findings = []
    for flag, off in SHAPING.items():
        # The warmup may be a fraction of the decay steps even if nothing decays.
        shares = flag == "lr_decay_iters" and training.lr_warmup_fraction is not None
        if flag in STYLES[name].takes or shares or request.config.get(flag) == off:
            continue
        other = next(style for style, facts in STYLES.items() if flag in facts.takes)
        changes = (drop({flag: off}), replace({"lr_decay_style": other}))
        message = f"{spelling(flag)} has no effect: {why}"
        findings.append(Finding(message, request.asked(flag, "lr_decay_style"), changes=changes))
    return findings


@TRAINING_RULES.add(
    "RF099",
    "The learning rate schedule warms up to the peak within the run and decays from there.",
    "a schedule with a part after the end of the run, or with a decay that rises, is a mistake",
    "[rapidformer_templates]",
    Example("--lr 1e-4 --min-lr 1e-3"),
    refusal="A learning rate schedule that does not fit into the run, or flags that its style does not use.",
)
def _schedule_fits(request: Request) -> list[Finding]:
    if file_schedule(request) is not None:
        return []  # RF036 and RF102 check the file's schedule; DeepSpeed's warmups may be longer than a run
    training = request.config.training
    findings = []
    if training.lr is not None and training.min_lr > training.lr:
        message = f"--min-lr {training.min_lr:g} is above --lr {training.lr:g}: the rate would rise to it"
        changes = (replace({"min_lr": training.lr / 10}), drop({"min_lr": 0.0}))
        findings.append(Finding(message, request.asked("min_lr", "lr"), changes=changes))
    elif training.lr_decay_style == "polynomial" and training.lr and training.lr == training.min_lr:
        message = f"--min-lr {training.min_lr:g} equals --lr: polynomial has nothing to decay to"
        changes = (drop({"min_lr": 0.0}), replace({"lr_decay_style": "constant", "min_lr": 0.0}))
        findings.append(Finding(message, request.asked("min_lr", "lr", "lr_decay_style"), changes=changes))
    findings += _shaping_nothing(request)
    warmup, by = warmup_steps(training, request.sizes.global_batch, None)
    for name in ("lr_decay_iters", "train_iters"):
        end = request.config.get(name)
        if isinstance(end, int) and warmup is not None and warmup > end:
            message = f"a warmup of {warmup} steps is longer than the {end} steps of {spelling(name)}"
            changes = (replace({by: None, "lr_warmup_iters": max(1, end // 10)}), drop({by: None}))
            findings.append(Finding(message, request.asked(by, name), changes=changes))
    return findings + _decay_fits(request)


def _decay_fits(request: Request) -> list[Finding]:
    """Check that the decay of warmup_stable_decay begins after the warmup."""
    training = request.config.training
    ends = [request.config.get(name) for name in ("lr_decay_iters", "train_iters")]
    end = next((steps for steps in ends if isinstance(steps, int)), None)
    last, (steps, by) = training.lr_wsd_decay_iters, warmup_steps(training, request.sizes.global_batch, None)
    warmup = steps or 0
    if end is None or last is None or warmup + last <= end or warmup > end:
        return []
    message = f"a warmup of {warmup} steps and a decay of {last} are longer than the {end} steps of the schedule"
    changes = (replace({"lr_wsd_decay_iters": max(1, end - warmup)}), drop({"lr_wsd_decay_iters": None}))
    return [Finding(message, request.asked("lr_wsd_decay_iters", by), changes=changes)]


IN_A_FOLDER = {
    "overwrite": False,
    "async_save": False,
    "save_interval": None,
    "keep_best": None,
    "report_to": None,
}
"""Flags that act only on a run folder, with their values when off."""


@TRAINING_RULES.add(
    "RF100",
    "A training run saves to a folder, unless --no-save is given.",
    "without a run folder the model is lost when the run ends",
    "[rapidformer_templates]",
    Example("--lr 5e-5 --epochs 3", training=True),
    refusal="A training command with neither --save nor --no-save.",
)
def _leaves_something(request: Request) -> list[Finding]:
    training = request.config.training
    if training.save is not None and training.no_save:
        changes = (drop({"no_save": False}), drop({"save": None}))
        return [Finding("--save and --no-save exclude each other", request.asked("save", "no_save"), changes=changes)]
    if training.no_save:
        return [
            Finding(
                f"{spelling(name)} acts on a run folder, but there is none",
                request.asked(name, "no_save"),
                changes=(drop({name: off}), replace({"save": "DIR", "no_save": False})),
            )
            for name, off in IN_A_FOLDER.items()
            if request.config.get(name) not in (off, False)
        ]
    if training.save is None and request.training:
        folder = add({"save": "DIR"}, "the folder for checkpoints, metrics and the trained model")
        nothing = Change(spelling("no_save"), REPLACE, {"no_save": True}, note="trains and discards the model")
        return [Finding("there is no folder for the trained model", changes=(folder, nothing))]
    return []


@TRAINING_RULES.add(
    "RF160",
    "The trackers of a run are installed.",
    "a missing curve is noticed only when the run is over",
    "[accelerate]",
    Example("--report-to wandb"),
    refusal="A tracker that is not installed.",
)
def _trackers_are_there(request: Request) -> list[Finding]:
    requested, installed = request.config.training.report_to, request.environment.packages
    off = drop({"report_to": None, "run_name": None, "project_name": None})
    if requested == "all" and not chosen_trackers(requested, installed):
        message = f"no tracker is installed: {TRACKERS_INSTALL['tensorboard']}"
        return [Finding(message, request.asked("report_to"), changes=(off,))]
    missing = [name for name in chosen_trackers(requested, installed) if TRACKERS[name] not in installed]
    available = ",".join(name for name in chosen_trackers(requested, installed) if name not in missing)
    return [
        Finding(
            f"{name} is not installed: {TRACKERS_INSTALL[name]}",
            request.asked("report_to"),
            changes=(replace({"report_to": TrackerNames(available)}) if available else off,),
        )
        for name in missing
    ]


ADAM_FLAGS = ("adam_beta1", "adam_beta2", "adam_epsilon")


@TRAINING_RULES.add(
    "RF110",
    "Adam's decays are below 1, and they and its epsilon need an optimizer that has them.",
    "adafactor keeps means of rows and columns instead of moments; with a decay of 1 a moment never changes",
    "[torch]",
    Example("--optimizer adafactor --adam-beta2 0.99"),
    refusal="Settings of Adam that are out of range, or that the optimizer does not have.",
)
def _adam_fits(request: Request) -> list[Finding]:
    findings, optimizer = [], optimizer_facts(request)
    defaults = zip(ADAM_FLAGS, (optimizer.betas, optimizer.betas, optimizer.epsilon), strict=True)
    names = [name for name, default in defaults if default is None and request.config.get(name) is not None]
    if names:
        message = f"{optimizer.name} has no {' and no '.join(map(spelling, names))}"
        changes = (replace({"optimizer": "adamw"}), drop(dict.fromkeys(names)))
        findings.append(Finding(message, request.asked("optimizer", *names), changes=changes))
    for name, default in zip(ADAM_FLAGS, BETAS, strict=False):  # an epsilon may have any size
        value = request.config.get(name)
        if value is not None and not value < 1:
            message = f"{spelling(name)} must be below 1, not {value:g}"
            changes = (replace({name: default}), drop({name: None}))
            findings.append(Finding(message, request.asked(name), changes=changes))
    return findings
