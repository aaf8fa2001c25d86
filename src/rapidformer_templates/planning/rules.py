"""Rules that belong to no switch: sizes, packages, flags that need others, and how a run trains and what it writes.

Rules about data and tasks are in :mod:`~rapidformer_templates.planning.data_rules`. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from rapidformer_templates.errors import alike
from rapidformer_templates.planning.changes import REPLACE, Change, add, drop, replace
from rapidformer_templates.planning.checks import ENCODER_DECODER, Given, clash, needs, one_claim
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.deepspeed_file.settings import file_schedule
from rapidformer_templates.planning.environment import no_device
from rapidformer_templates.planning.flag_values import TRACKERS, TRACKERS_INSTALL, TrackerNames, chosen_trackers
from rapidformer_templates.planning.optimizers import BETAS
from rapidformer_templates.planning.request import optimizer_facts
from rapidformer_templates.planning.schedules import SHAPING, STYLES, WARMUPS, warmup_steps
from rapidformer_templates.planning.switch import Finding, Request, Resource, RuleList
from rapidformer_templates.planning.tasks import direction_of, metrics_of, tasks_with

RULES = RuleList()
CAUSAL = Given("task", ("causal_lm",))


@RULES.add("RF015", "[R]", "--epochs 3 --train-iters 1000")
def _epochs_or_iterations(request: Request) -> Iterator[Finding]:
    """Exactly one of --epochs and --train-iters is given.

    Why: both set the end of training.
    """
    training = request.config.training
    yield from clash(request, Given("epochs"), Given("train_iters"), message="{0} and {1} exclude each other")
    if request.training and training.epochs is None and training.train_iters is None:
        choices = (add({"epochs": 3}, "passes over the data"), add({"train_iters": 1000}, "optimizer steps"))
        yield Finding("neither --epochs nor --train-iters is given", changes=choices)


@RULES.add("RF023", "[environment]", "--optimizer adamw_apex_fused", device="cuda", compute_capability=(8, 0))
def _package_installed(request: Request) -> Iterator[Finding]:
    """A switch's package is installed.

    Why: nothing else is used instead, and a switch that cannot act is refused.
    """
    packages, optimizer = request.environment.packages, optimizer_facts(request)
    for switch in request.active.values():
        if switch.needs_package and switch.needs_package not in packages:
            message = f"{switch.name} needs {switch.needs_package}, which is not installed: {switch.install}"
            yield Finding(message, request.asked_for(switch.name), switches=(switch.name,))
    if (package := optimizer.package) and package.name not in packages:
        message = f"{optimizer.name} needs {package.name}, which is not installed: {package.install}"
        yield Finding(message, request.asked("optimizer"), changes=(replace({"optimizer": "adamw"}),))


@RULES.add("RF024", "[torch]", "--device cuda --lr 5e-5 --epochs 3 --save run", training=True, device="cuda")
def _gpu_present(request: Request) -> Iterator[Finding]:
    """A device that needs a GPU has one.

    Why: nothing falls back to a CPU silently.
    """
    if request.training and not request.environment.has_device:
        message = no_device(request.environment.device)
        yield Finding(message, request.asked("device"), changes=(replace({"device": "cpu"}),))


@RULES.add("RF030", "[R]", "--micro-batch-size 4 --global-batch-size 10 --world-size 2")
def _batch_divides(request: Request) -> Iterator[Finding]:
    """The global batch size is a multiple of micro batch size × data-parallel size.

    Why: an optimizer step is a whole number of micro batches on every worker.
    """
    sizes = request.sizes
    step = sizes.micro_batch * sizes.data
    if sizes.world % sizes.divides or sizes.global_batch % step == 0:
        return  # without a whole data-parallel size there is nothing to divide by
    near = [n for n in (sizes.global_batch // step * step, -(-sizes.global_batch // step) * step) if n]
    yield Finding(
        f"global batch size {sizes.global_batch} is not divisible by micro batch {sizes.micro_batch} × "
        f"data-parallel size {sizes.data}; the nearest that work: {' and '.join(map(str, near))}",
        (*request.asked("global_batch_size", "micro_batch_size"), f"data-parallel size {sizes.data}"),
        changes=tuple(replace({"global_batch_size": n}, f"{n // step} × {step} samples per step") for n in near),
    )


@RULES.add("RF031", "[R]", "--epochs 3 --save run", training=True)
def _learning_rate(request: Request) -> Iterator[Finding]:
    """Training needs a learning rate.

    Why: no rate suits every model, so there is no default.
    """
    if request.training and request.config.training.lr is None:
        note = "fine-tuning usually starts at 2e-5 to 5e-5, pretraining at 1e-4 to 6e-4"
        yield Finding("--lr is missing", changes=(add({"lr": 5e-5}, note),))


@RULES.add("RF032", "[R]", "--lr-warmup-iters 10 --lr-warmup-fraction 0.1")
def _one_warmup(request: Request) -> Iterator[Finding]:
    """Warmup is given only once: in steps, in samples or as a share.

    Why: each sets the number of warmup steps.
    """
    flags = [name for name in WARMUPS if request.config.get(name) is not None]
    if len(flags) > 1:
        message = f"{' and '.join(map(spelling, flags))} exclude each other"
        yield Finding(message, request.asked(*flags), changes=tuple(drop({name: None}) for name in flags))


@RULES.add("RF150", "[M]", "--data-parallel-size 4 --tensor-model-parallel-size 2 --world-size 4")
def _data_size_is_so(request: Request) -> Iterator[Finding]:
    """A given data-parallel size matches the number of workers.

    Why: it follows from the number of workers and the tensor and pipeline sizes; any other size would mean a different
    run than intended.
    """
    requested, sizes = request.config.launch.data_parallel_size, request.sizes
    if requested is not None and requested * sizes.divides != sizes.world:
        context = f"context {sizes.context} × " if sizes.context > 1 else ""
        message = (
            f"data-parallel size {requested} × tensor {sizes.tensor} × {context}pipeline {sizes.pipeline} "
            f"are {requested * sizes.divides} workers, but there are {sizes.world}"
        )
        changes = (drop({"data_parallel_size": None}),)
        yield Finding(message, request.asked("data_parallel_size"), changes=changes)


@RULES.add("RF033", "[transformers]", "--seq-length 1024 --max-position-embeddings 512")
def _sequence_fits(request: Request) -> Iterator[Finding]:
    """A sequence fits into the model's positions.

    Why: there is no embedding for a position beyond the last.
    """
    length, positions = request.config.model.seq_length, request.model.max_position_embeddings
    if length is not None and positions is not None and length > positions:
        message = f"sequences of {length} tokens are longer than the model's {positions} positions"
        yield Finding(message, request.asked("seq_length"), changes=(replace({"seq_length": positions}),))


@RULES.add("RF034", "[rapidformer_templates]", "--moe-top-k 2")
def _has_companion(request: Request) -> Iterator[Finding]:
    """A flag that has an effect only with another is given together with it.

    Why: alone it would be silently ignored.
    """
    config = request.config
    for declared in config.fields():
        name, (other, value) = declared.name, declared.metadata.get("only_with") or (None, None)
        if other and config.get(name) != declared.default and config.get(other) == config.default(other):
            changes = (add({other: value}), drop({name: declared.default}))
            message = f"{spelling(name)} has no effect without {spelling(other)}"
            yield Finding(message, request.asked(name), changes=changes)


@RULES.add("RF050", "[rapidformer_templates]", "--task sequence_classification --pack-sequences")
def _packs_samples(request: Request) -> list[Finding]:
    """Sequence packing is for --task causal_lm.

    Why: packed samples are kept apart by a causal block-diagonal mask; other tasks attend in both directions, have one
    label per row, or already have rows of one length.
    """
    return needs(request, Given("pack_sequences"), CAUSAL, replace({"task": "causal_lm"}))


@RULES.add("RF051", "[rapidformer_templates]", "--task causal_lm --pack-sequences --group-by-length")
def _groups_packed_rows(request: Request) -> list[Finding]:
    """Packed rows are not grouped by length.

    Why: all of them have the same length.
    """
    return clash(
        request, Given("group_by_length"), Given("pack_sequences"), message="{0} has nothing to group in packed rows"
    )


@RULES.add("RF052", "[rapidformer_templates]", "--task masked_lm --loss-on answers")
def _learns_answers(request: Request) -> list[Finding]:
    """--loss-on is for --task causal_lm.

    Why: in other tasks the labels of the data set decide what is learned.
    """
    return needs(request, Given("loss_on"), CAUSAL, replace({"task": "causal_lm"}))


@RULES.add("RF008", "[R]", "--fsdp-memory-optimization --oss-memory-optimization --world-size 2")
def _one_partitioning(request: Request) -> Iterator[Finding]:
    """At most one switch partitions the model's states.

    Why: each of them decides which worker holds which state.
    """
    return one_claim(request, Resource.OPTIMIZER_STATE, Resource.GRADIENTS, Resource.PARAMETERS)


@RULES.add("RF016", "[torch, onnxruntime]", "--onnx-runtime-training --torch-compile")
def _one_graph(request: Request) -> Iterator[Finding]:
    """At most one switch captures the model's graph.

    Why: torch.compile cannot compile a graph that ONNX Runtime runs, nor the other way round.
    """
    return one_claim(request, Resource.GRAPH)


@RULES.add("RF026", "[D]", "--cpu-offload --nvme-path /local_nvme --zero-3-memory-optimization --world-size 2")
def _one_offload(request: Request) -> Iterator[Finding]:
    """The optimizer state is offloaded to one place.

    Why: --nvme-path already moves optimizer state and parameters.
    """
    return one_claim(request, Resource.OFFLOAD)


@RULES.add("RF098", "[rapidformer_templates]", "--metric-for-best utility")
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


@RULES.add("RF285", "[rapidformer_templates]", "--allow-changed-data")
def _data_have_changed(request: Request) -> Iterator[Finding]:
    """--allow-changed-data needs a checkpoint to continue from.

    Why: without its samples there is nothing that has changed.
    """
    training = request.config.training
    if training.allow_changed_data and not training.resume and not (training.load and not training.weights_only):
        changes = (add({"resume": True}), drop({"allow_changed_data": False}))
        message = "--allow-changed-data has no effect: no checkpoint is continued"
        yield Finding(message, request.asked("allow_changed_data", "weights_only"), changes=changes)


@RULES.add("RF111", "[rapidformer_templates]", "--early-stopping-patience 3 --no-keep-best --epochs 20")
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


@RULES.add("RF114", "[torch]", "--ema-decay 1")
def _averages(request: Request) -> Iterator[Finding]:
    """The decay of a moving average of the weights is below 1.

    Why: with 1 the average would never change after the first step.
    """
    if request.config.training.ema_decay == 1:
        message = "--ema-decay 1 never changes the average"
        yield Finding(message, request.asked("ema_decay"), changes=(replace({"ema_decay": 0.999}),))


@RULES.add("RF112", "[torch, transformers]", "--task question_answering --label-smoothing 0.1")
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


@RULES.add("RF113", "[transformers]", "--task seq2seq_lm --neftune-alpha 5")
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
    for flag in SHAPING:
        off = request.config.default(flag)
        # The warmup may be a fraction of the decay steps even if nothing decays.
        shares = flag == "lr_decay_iters" and training.lr_warmup_fraction is not None
        if flag not in STYLES[name].takes and not shares and request.config.get(flag) != off:
            other = next(style for style, facts in STYLES.items() if flag in facts.takes)
            changes = (drop({flag: off}), replace({"lr_decay_style": other}))
            message = f"{spelling(flag)} has no effect: {why}"
            yield Finding(message, request.asked(flag, "lr_decay_style"), changes=changes)


@RULES.add("RF099", "[rapidformer_templates]", "--lr 1e-4 --min-lr 1e-3")
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


IN_A_FOLDER = {"overwrite": False, "async_save": False, "save_interval": None, "keep_best": None, "report_to": None}
"""Flags that act only on a run folder, with their values when off."""


@RULES.add("RF100", "[rapidformer_templates]", "--lr 5e-5 --epochs 3", training=True)
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


@RULES.add("RF160", "[accelerate]", "--report-to wandb")
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


@RULES.add("RF110", "[torch]", "--optimizer adafactor --adam-beta2 0.99")
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
