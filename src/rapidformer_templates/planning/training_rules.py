"""Rules about how a run trains and what it writes. They belong to no switch."""

from __future__ import annotations

from collections.abc import Iterator

from rapidformer_templates.errors import alike
from rapidformer_templates.planning.checks import ENCODER_DECODER, Given, clash, needs
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.deepspeed_file.settings import file_schedule
from rapidformer_templates.planning.flag_values import TRACKERS, TRACKERS_INSTALL, TrackerNames, chosen_trackers
from rapidformer_templates.planning.optimizers import BETAS
from rapidformer_templates.planning.request import optimizer_facts
from rapidformer_templates.planning.schedules import SHAPING, STYLES, warmup_steps
from rapidformer_templates.planning.switch import (
    REPLACE,
    Change,
    Finding,
    Request,
    RuleList,
    add,
    drop,
    replace,
)
from rapidformer_templates.planning.tasks import direction_of, metrics_of, tasks_with

TRAINING_RULES = RuleList()


@TRAINING_RULES.add("RF098", "[rapidformer_templates]", "--metric-for-best utility")
def _best_is_known(request: Request) -> Iterator[Finding]:
    """The metric of the best checkpoint has a direction.

    Why: the wrong direction keeps and exports the worst checkpoint.
    """
    training = request.config.training
    name = training.metric_for_best
    if name is None:
        return
    if training.keep_best is False:
        none = drop({"metric_for_best": None, "metric_for_best_mode": None})
        message = "--metric-for-best has no effect if no best checkpoint is kept"
        flags = request.asked("metric_for_best", "keep_best")
        yield Finding(message, flags, changes=(replace({"keep_best": True}), none))
    # Without the user's own hooks, a task has fixed metrics, and check_metric reports any other name.
    can_be_own = training.task is None or request.environment.white_box
    if can_be_own and training.metric_for_best_mode is None and direction_of(name) is None:
        near = alike(name, metrics_of(request.config))
        changes = (
            *(add({"metric_for_best": other}, "a metric of the task") for other in near),
            add({"metric_for_best_mode": "max"}, "higher is better"),
            add({"metric_for_best_mode": "min"}, "lower is better"),
        )
        message = f"cannot tell whether a higher or a lower '{name}' is better"
        yield Finding(message, request.asked("metric_for_best"), changes=changes)


@TRAINING_RULES.add("RF285", "[rapidformer_templates]", "--allow-changed-data")
def _data_have_changed(request: Request) -> Iterator[Finding]:
    """--allow-changed-data needs a checkpoint to continue from.

    Why: without its samples there is nothing that has changed.
    """
    training = request.config.training
    if training.allow_changed_data and not training.resume and not (training.load and not training.weights_only):
        changes = (add({"resume": True}), drop({"allow_changed_data": False}))
        message = "--allow-changed-data has no effect: no checkpoint is continued"
        yield Finding(message, request.asked("allow_changed_data", "weights_only"), changes=changes)


@TRAINING_RULES.add("RF111", "[rapidformer_templates]", "--early-stopping-patience 3 --no-keep-best --epochs 20")
def _stops_early(request: Request) -> Iterator[Finding]:
    """A run that may stop early is evaluated during training and keeps its best checkpoint.

    Why: it stops when evaluations no longer improve on the best one, whose weights are exported.
    """
    training, stops = request.config.training, Given("early_stopping_patience")
    kept = Given("keep_best", (False,), instead=(replace({"keep_best": True}),))
    yield from clash(request, stops, kept, message="{0} has no effect if no best checkpoint is kept")
    if isinstance(training.train_iters, int):
        way = add({"eval_interval": max(1, training.train_iters // 10)}, "steps between evaluations")
        message = "{} has no effect: a run by --train-iters is evaluated only at its end"
        yield from needs(request, stops, Given("eval_interval"), way, message=message)


@TRAINING_RULES.add("RF114", "[torch]", "--ema-decay 1")
def _averages(request: Request) -> Iterator[Finding]:
    """The decay of a moving average of the weights is below 1.

    Why: with 1 the average would never change after the first step.
    """
    if request.config.training.ema_decay == 1:
        message = "--ema-decay 1 never changes the average"
        yield Finding(message, request.asked("ema_decay"), changes=(replace({"ema_decay": 0.999}),))


@TRAINING_RULES.add("RF112", "[torch, transformers]", "--task question_answering --label-smoothing 0.1")
def _smooths(request: Request) -> Iterator[Finding]:
    """Label smoothing needs a loss that is one cross-entropy over classes or words.

    Why: positions in a text are not classes, and the library does not know what your own loss consists of.
    """
    training = request.config.training
    tasks = tasks_with(lambda task: task.is_smoothed)
    is_smoothed = training.task in tasks
    if training.label_smoothing and (not is_smoothed or request.config.data.sentence_pairs):
        what = "sentence pairs" if is_smoothed else training.task or "a loss without a task"
        changes = (drop({"label_smoothing": 0.0}), *(() if training.task else (add({"task": "causal_lm"}),)))
        message = f"--label-smoothing is for the cross-entropies of --task {', '.join(tasks)}, not for {what}"
        yield Finding(message, request.asked("label_smoothing", "task"), changes=changes)


@TRAINING_RULES.add("RF113", "[transformers]", "--task seq2seq_lm --neftune-alpha 5")
def _one_sequence(request: Request) -> list[Finding]:
    """Noise on the embeddings is for models that read one sequence.

    Why: encoder and decoder share their embeddings, but it is not known for both which tokens are padding.
    """
    if not request.config.training.neftune_alpha:
        return []
    message = "{0} is for models that read one sequence, not for {1}"
    return clash(request, Given("neftune_alpha"), ENCODER_DECODER, message=message)


def _shaping_nothing(request: Request) -> Iterator[Finding]:
    """Refuse flags that do not act on the chosen schedule."""
    training = request.config.training
    name = training.lr_decay_style
    why = "a constant rate does not decay" if name == "constant" else f"{name} does not use it"
    for flag, off in SHAPING.items():
        # The warmup may be a fraction of the decay steps even if nothing decays.
        shares = flag == "lr_decay_iters" and training.lr_warmup_fraction is not None
        if flag not in STYLES[name].takes and not shares and request.config.get(flag) != off:
            other = next(style for style, facts in STYLES.items() if flag in facts.takes)
            changes = (drop({flag: off}), replace({"lr_decay_style": other}))
            message = f"{spelling(flag)} has no effect: {why}"
            yield Finding(message, request.asked(flag, "lr_decay_style"), changes=changes)


@TRAINING_RULES.add("RF099", "[rapidformer_templates]", "--lr 1e-4 --min-lr 1e-3")
def _schedule_fits(request: Request) -> Iterator[Finding]:
    """The learning rate schedule warms up to the peak within the run and decays from there.

    Why: a schedule with a part after the end of the run, or with a decay that rises, is a mistake.
    """
    if file_schedule(request) is not None:
        return  # RF036 and RF102 check the file's schedule; DeepSpeed's warmups may be longer than a run
    training = request.config.training
    if training.lr is not None and training.min_lr > training.lr:
        message = f"--min-lr {training.min_lr:g} is above --lr {training.lr:g}: the rate would rise to it"
        changes = (replace({"min_lr": training.lr / 10}), drop({"min_lr": 0.0}))
        yield Finding(message, request.asked("min_lr", "lr"), changes=changes)
    elif training.lr_decay_style == "polynomial" and training.lr and training.lr == training.min_lr:
        message = f"--min-lr {training.min_lr:g} equals --lr: polynomial has nothing to decay to"
        changes = (drop({"min_lr": 0.0}), replace({"lr_decay_style": "constant", "min_lr": 0.0}))
        yield Finding(message, request.asked("min_lr", "lr", "lr_decay_style"), changes=changes)
    yield from _shaping_nothing(request)
    warmup, by = warmup_steps(training, request.sizes.global_batch, None)
    for name in ("lr_decay_iters", "train_iters"):
        end = request.config.get(name)
        if isinstance(end, int) and warmup is not None and warmup > end:
            message = f"a warmup of {warmup} steps is longer than the {end} steps of {spelling(name)}"
            changes = (replace({by: None, "lr_warmup_iters": max(1, end // 10)}), drop({by: None}))
            yield Finding(message, request.asked(by, name), changes=changes)
    yield from _decay_fits(request)


def _decay_fits(request: Request) -> Iterator[Finding]:
    """Check that the decay of warmup_stable_decay begins after the warmup."""
    training = request.config.training
    ends = [request.config.get(name) for name in ("lr_decay_iters", "train_iters")]
    end = next((steps for steps in ends if isinstance(steps, int)), None)
    last, (steps, by) = training.lr_wsd_decay_iters, warmup_steps(training, request.sizes.global_batch, None)
    warmup = steps or 0
    if end is not None and last is not None and warmup <= end < warmup + last:
        message = f"a warmup of {warmup} steps and a decay of {last} are longer than the {end} steps of the schedule"
        changes = (replace({"lr_wsd_decay_iters": max(1, end - warmup)}), drop({"lr_wsd_decay_iters": None}))
        yield Finding(message, request.asked("lr_wsd_decay_iters", by), changes=changes)


IN_A_FOLDER = {
    "overwrite": False,
    "async_save": False,
    "save_interval": None,
    "keep_best": None,
    "report_to": None,
}
"""Flags that act only on a run folder, with their values when off."""


@TRAINING_RULES.add("RF100", "[rapidformer_templates]", "--lr 5e-5 --epochs 3", training=True)
def _leaves_something(request: Request) -> Iterator[Finding]:
    """A training run saves to a folder, unless --no-save is given.

    Why: without a run folder the model is lost when the run ends.
    """
    training = request.config.training
    yield from clash(request, Given("save"), Given("no_save"), message="--save and --no-save exclude each other")
    if training.no_save and training.save is None:
        for name, off in IN_A_FOLDER.items():
            if request.config.get(name) not in (off, False):
                message = f"{spelling(name)} acts on a run folder, but there is none"
                changes = (drop({name: off}), replace({"save": "DIR", "no_save": False}))
                yield Finding(message, request.asked(name, "no_save"), changes=changes)
    if request.training and training.save is None and not training.no_save:
        folder = add({"save": "DIR"}, "the folder for checkpoints, metrics and the trained model")
        nothing = Change(spelling("no_save"), REPLACE, {"no_save": True}, note="trains and discards the model")
        yield Finding("there is no folder for the trained model", changes=(folder, nothing))


@TRAINING_RULES.add("RF160", "[accelerate]", "--report-to wandb")
def _trackers_are_there(request: Request) -> Iterator[Finding]:
    """The trackers of a run are installed.

    Why: a missing curve is noticed only when the run is over.
    """
    requested, installed = request.config.training.report_to, request.environment.packages
    off = drop({"report_to": None, "run_name": None, "project_name": None})
    chosen = chosen_trackers(requested, installed)
    if requested == "all" and not chosen:
        message = f"no tracker is installed: {TRACKERS_INSTALL['tensorboard']}"
        yield Finding(message, request.asked("report_to"), changes=(off,))
    available = ",".join(name for name in chosen if TRACKERS[name] in installed)
    change = replace({"report_to": TrackerNames(available)}) if available else off
    for name in chosen:
        if TRACKERS[name] not in installed:
            message = f"{name} is not installed: {TRACKERS_INSTALL[name]}"
            yield Finding(message, request.asked("report_to"), changes=(change,))


ADAM_FLAGS = ("adam_beta1", "adam_beta2", "adam_epsilon")


@TRAINING_RULES.add("RF110", "[torch]", "--optimizer adafactor --adam-beta2 0.99")
def _adam_fits(request: Request) -> Iterator[Finding]:
    """Adam's decays are below 1, and they and its epsilon need an optimizer that has them.

    Why: adafactor keeps means of rows and columns instead of moments; with a decay of 1 a moment never changes.
    """
    optimizer = optimizer_facts(request)
    defaults = zip(ADAM_FLAGS, (optimizer.betas, optimizer.betas, optimizer.epsilon), strict=True)
    names = [name for name, default in defaults if default is None and request.config.get(name) is not None]
    if names:
        message = f"{optimizer.name} has no {' and no '.join(map(spelling, names))}"
        changes = (replace({"optimizer": "adamw"}), drop(dict.fromkeys(names)))
        yield Finding(message, request.asked("optimizer", *names), changes=changes)
    for name, default in zip(ADAM_FLAGS, BETAS, strict=False):  # an epsilon may have any size
        value = request.config.get(name)
        if value is not None and not value < 1:
            message = f"{spelling(name)} must be below 1, not {value:g}"
            yield Finding(message, request.asked(name), changes=(replace({name: default}), drop({name: None})))
