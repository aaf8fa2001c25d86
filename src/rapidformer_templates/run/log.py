"""The log of a run: its metrics in ``metrics.jsonl`` and in the trackers, and its progress on the terminal.

Trackers receive the flags and the plan, each line of ``metrics.jsonl`` once, and the summary. The run folder remembers
the last step that each tracker has received. A resumed run sends the lines after it that are kept, and no step that it
repeats. :class:`Means` and :class:`LayerGradNorms` compute values of these lines.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import torch

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.shards import named_tensors
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.flag_values import chosen_trackers
from rapidformer_templates.run.folder import MetricsFile, MetricsLine, RunFolder, Summary, is_test_line, read_metrics
from rapidformer_templates.run.run import Run
from rapidformer_templates.run.trackers import KINDS, Tracker
from rapidformer_templates.system.accelerator import HostCopy
from rapidformer_templates.system.files import JSON_ERRORS, to_json
from rapidformer_templates.system.terminal import ProgressBar, print_lines, say

RUN_IDS = "runs.json"
"""File with the identity of the run in each tracker, the last step that was sent, and the step of the summary."""

SENT, ENDED = "sent", "ended"
DECISIONS = ("template", "engine", "device", "precision", "optimizer", "optimizer_implementation", "switches")
"""Fields of the plan that are parameters of a run."""

Parameter = str | int | float | bool

TrackerResult = dict[str, str | None]
"""The result of a tracker for the summary: ``where`` its curves are, and why it ``failed``, or None."""


class Trackers:
    """The trackers of a run, on its main worker.

    A tracker that fails is disabled with one warning. The run continues.

    Args:
        names: names of the trackers.
    """

    def __init__(self, run: Run, folder: RunFolder, names: tuple[str, ...]) -> None:
        self.workers, self.folder = run.workers, folder
        self.failed: dict[str, str] = {}
        ids = folder.trackers / RUN_IDS
        self._known: dict[str, dict[str, str | int]] = {}
        """The content of the file, which an earlier process of this run may have stored."""
        if ids.exists():
            try:
                self._known = {name: dict(one) for name, one in json.loads(ids.read_text(encoding="utf-8")).items()}
            except JSON_ERRORS as error:
                say(self.workers, f"{ids} cannot be read ({error}): the trackers begin new runs", loud=True)
        self._open: dict[str, Tracker] = {}
        self._row: dict[str, float] = {}
        self._step = 0
        folder.trackers.mkdir(exist_ok=True)
        # Every flag with its value, defaults included, and the decisions of the plan.
        flags = {spelling(name).removeprefix("--"): value for name, value in run.config.items()}
        decisions = {name: getattr(run.plan, name) for name in DECISIONS}
        sizes = {f"sizes/{name}": size for name, size in asdict(run.plan.sizes).items()}
        parameters = {name: _plain(value) for name, value in (flags | decisions | sizes).items()}
        for name in names:
            self._try(name, partial(self._open_tracker, name, run, parameters))
        for line in read_metrics(folder.metrics):
            self.log(line)

    def _open_tracker(self, name: str, run: Run, parameters: Mapping[str, Parameter]) -> None:
        title = run.config.training.run_name or self.folder.path.resolve().name
        saved = self._known.get(name, {})
        identity = {key: str(value) for key, value in saved.items() if key not in (SENT, ENDED)}
        tracker = KINDS[name](self.folder.trackers, title, run.config.training.project_name, identity)
        if tracker.sends_later or not saved:
            tracker.tracker.store_init_configuration(dict(parameters))
        self._remember(name, {**tracker.identity, SENT: tracker.arrived(int(saved.get(SENT, 0)))})
        self._open[name] = tracker

    def _remember(self, name: str, facts: Mapping[str, str | int]) -> None:
        """Store facts about the run in a tracker. They are not synced to disk, because that would delay each line."""
        self._known[name] = {**self._known.get(name, {}), **facts}
        path = self.folder.trackers / RUN_IDS
        half = path.with_suffix(".tmp")
        half.write_text(to_json(self._known), encoding="utf-8")
        half.replace(path)

    def log(self, line: MetricsLine) -> None:
        """Log a line of metrics. Lines of one step are combined, because some trackers accept each step only once."""
        if is_test_line(line):
            return  # part of the summary, because its step (the best one) may be earlier
        if line["step"] != self._step:
            self.flush()
        self._step = line["step"]
        self._row |= in_groups(line)

    def flush(self) -> None:
        """Log the collected values of the current step. No more values may follow for it."""
        row, self._row = self._row, {}
        if row:
            self._all(partial(self._send, row))

    def _send(self, row: Mapping[str, float], name: str, tracker: Tracker) -> None:
        if self._step > int(self._known[name][SENT]):
            tracker.log(row, self._step)
            self._remember(name, {SENT: self._step})

    def end(self, summary: Summary) -> dict[str, TrackerResult]:
        """Log the summary, and close. Returns the result of each tracker by its name."""
        self.flush()
        step = summary["steps"]

        def summarise(name: str, tracker: Tracker) -> None:
            if self._known[name].get(ENDED) != step:
                tracker.summarise(results_of(summary, totals_as_text=not tracker.has_summary), step)
                self._remember(name, {ENDED: step})

        self._all(summarise)
        where = {name: tracker.where for name, tracker in self._open.items()}
        self.close()
        names = sorted({*where, *self.failed})
        return {name: {"where": where.get(name), "failed": self.failed.get(name)} for name in names}

    def close(self) -> None:
        self.flush()
        self._all(lambda name, tracker: tracker.tracker.finish())
        self._open.clear()

    def _all(self, call: Callable[[str, Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            self._try(name, partial(call, name, tracker))

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """Disable a tracker if the call fails. Trackers may raise any exception, and none should end a run."""
        try:
            call()
        except Exception as error:
            self._open.pop(name, None)
            reason = next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__
            self.failed[name] = f"{reason} (at step {self._step})"
            what = f"the run continues without it, and what it misses is in {self.folder.metrics}"
            say(self.workers, f"{name} failed: {reason}; {what}", loud=True)


def _plain(value: object) -> Parameter:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return value if isinstance(value, int | float | bool) else str(value)


def in_groups(line: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a line of metrics, named by the groups that trackers show.

    >>> in_groups({"step": 8, "epoch": 1.0, "loss": 0.5, "grad_norm": 1.2})
    {'train/epoch': 1.0, 'train/loss': 0.5, 'train/grad_norm': 1.2}
    >>> in_groups({"step": 8, "epoch": 1.0, "eval_loss": 0.4, "accuracy": 0.9, "hard/loss": 0.7})
    {'train/epoch': 1.0, 'eval/loss': 0.4, 'eval/accuracy': 0.9, 'eval/hard/loss': 0.7}
    """
    group = "train" if "grad_norm" in line else "eval"
    return {
        f"{'train' if name == 'epoch' else group}/{name.removeprefix('eval_')}": value
        for name, value in numbers(line)
        if name != "step"
    }


def results_of(summary: Summary, *, totals_as_text: bool) -> dict[str, float | str]:
    """Return the metrics of the test part, the totals as numbers or as a text, and the receipts as a text."""
    of_test = {name: value for name, value in numbers(summary["metrics"]) if is_test_line({name: value})}
    totals = dict(numbers({name: value for name, value in summary.items() if name != "receipts"}))
    texts = {"receipts": as_table(summary["receipts"])} if summary["receipts"] else {}
    if totals_as_text:
        return {**of_test, "summary": as_table(totals), **texts}
    return {**of_test, **{f"summary/{name}": value for name, value in totals.items()}, **texts}


def as_table(values: Mapping[str, object]) -> str:
    """Return a Markdown table of names and values."""
    rows = [f"| {name} | {value if isinstance(value, str) else json.dumps(value)} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


def numbers(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for each number. Nested values have their path as name, separated by slashes."""
    for name, value in values.items():
        if isinstance(value, list | tuple):
            value = {str(i): one for i, one in enumerate(value)}
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in numbers(value))
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value) if isinstance(value, float) else int(value)


MAX_UNREAD = 1_000
"""Number of steps after which :class:`Means` reads their values, so that they do not fill the memory."""


class Means:
    """Means over the steps since the last line of metrics. The host does not wait for the values of a step.

    Values that are not finite do not count: fp16 skips such steps, and a step may have no answers of a kind.

    Args:
        sums: sum and number of values by name, at the position where the run continues.
    """

    def __init__(self, sums: Mapping[str, Sequence[float]]) -> None:
        self._sums = sums
        self._unread: list[Mapping[str, torch.Tensor]] = []

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add the scalars of a step by name."""
        if len(self._unread) == MAX_UNREAD:
            self.read()
        self._unread.append(values)

    def newest(self, name: str) -> torch.Tensor:
        """Return the mean of the values that the host has not read, on the device."""
        return torch.stack([values[name] for values in self._unread]).nanmean()

    def read(self) -> dict[str, list[float]]:
        """Return sum and number of values by name. They are added one by one, so that a resume changes no digit."""
        sums = {name: list(pair) for name, pair in self._sums.items()}
        for name in self._unread[-1] if self._unread else ():
            pair = sums.setdefault(name, [0.0, 0.0])
            for value in torch.stack([values[name] for values in self._unread]).tolist():
                if math.isfinite(value):
                    pair[0] += value
                    pair[1] += 1
        self._sums, self._unread = sums, []
        return sums

    def take(self) -> dict[str, float]:
        """Return the means by name, and begin again. A mean without values is NaN."""
        sums, self._sums = self.read(), {}
        return {name: total / count if count else math.nan for name, (total, count) in sums.items()}


class Progress(ProgressBar):
    """Progress of the training steps: a bar on a terminal, otherwise a line per log, evaluation and checkpoint."""

    def __init__(self, total: int, done: int, *, show: bool) -> None:
        super().__init__("training", total, done, show=show)
        self._total = total
        self._loss: HostCopy | None = None
        self._text = ""
        self._in_lines = show and not sys.stderr.isatty()

    def step_done(self, means: Means) -> None:
        """Count one step. The loss is shown up to five times per second, on a GPU with a delay, without a wait."""

        def newest_loss() -> str:
            copy = HostCopy(means.newest("loss").reshape(1))
            for latest in (self._loss, copy):
                if latest is not None and latest.has_arrived:
                    self._text = f"loss {latest.values()[0]:.4f}"
            self._loss = copy
            return self._text

        self.advance(1, newest_loss)

    def logged(self, line: MetricsLine) -> None:
        """Show a line of ``metrics.jsonl``."""
        skipped = "  skipped" if line["skipped"] else ""
        numbers = f"loss {line['loss']:.4f}  grad norm {line['grad_norm']:.4f}  lr {line['lr']:.3g}"
        self.tell(line["step"], f"{numbers}  {line['samples_per_second']:,.1f} samples/s{skipped}")

    def tell(self, step: int, text: str) -> None:
        """Show what has happened after a step, unless there is a bar."""
        if self._in_lines:
            print_lines(f"step {step:,}/{self._total:,}  {text}")


class Log:
    """Records the metrics of a run of ``total`` steps on its main worker, from its current position on.

    Attributes:
        metrics: the file of the run folder. None without a folder, and on other workers.
        trackers: the trackers, on the main worker only. None if there are none.
        progress: the display on the terminal.
        failure: why the file could not be written the last time. Its lines are kept, and written later.
        needs_save: whether the file could not be written for the first time since the last save.
    """

    def __init__(self, run: Run, total: int) -> None:
        folder, training = run.folder if run.workers.is_main else None, run.config.training
        self.workers = run.workers
        self.failure: RapidformerError | None = None
        self.needs_save = False
        self.metrics = MetricsFile(folder.metrics, run.position.step) if folder else None
        if self.metrics and self.metrics.garbled:
            garbled = self.metrics.garbled
            numbers = ", ".join(map(str, garbled[:8])) + (" …" if len(garbled) > 8 else "")
            say(run.workers, f"left out lines of metrics.jsonl that cannot be read: {numbers}", loud=True)
        names = chosen_trackers(training.report_to, installed_packages()) if training.report_to else ()
        self.trackers = Trackers(run, folder, names) if names and folder else None
        self.progress = Progress(total, run.position.step, show=run.workers.is_main)

    def record(self, line: MetricsLine) -> None:
        """Write a line of metrics to the file and the trackers."""
        if self.metrics:
            self._try(partial(self.metrics.write, line))
        if self.trackers:
            self.trackers.log(line)

    def sync(self) -> None:
        """Flush the file to disk, so that no checkpoint is ahead of its metrics."""
        if self.metrics:
            self._try(self.metrics.sync)
        self.needs_save = False

    def _try(self, write: Callable[[], None]) -> None:
        """Continue if the file cannot be written. The next call writes its lines again."""
        try:
            write()
        except RapidformerError as error:
            if self.failure is None:
                self.needs_save = True
                say(self.workers, f"{error.message}: its lines are kept in memory and written later", loud=True)
            self.failure = error
        else:
            if self.failure is not None and self.metrics:
                say(self.workers, "all lines of metrics.jsonl are written again")
            self.failure = None

    def close(self) -> None:
        """Close the file and the trackers."""
        if self.metrics:
            self.metrics.close()
        if self.trackers:
            self.trackers.close()


class LayerGradNorms:
    """Measures the gradient of each layer before it is clipped.

    A layer is a repeated block, or a module with parameters outside of the blocks, such as an embedding or the head.
    Every trained parameter belongs to one layer, so the norms of all layers together give ``grad_norm``.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        assembly, workers = engine.assembly, engine.workers
        trained = [name for name, tensor in named_tensors(assembly).items() if tensor.requires_grad]
        blocks = [canonical_name(name) for name in assembly.blocks]
        layers = {}
        for name in map(assembly.placement.whole_name, trained):  # a stage may have a tied matrix as its head
            module = name.rpartition(".")[0] or name
            layers[name] = next((block for block in blocks if name.startswith(f"{block}.")), module)
        # A worker may have the gradients of parameters that are in another worker's part of the model.
        self._layers = {name: layer for of_rank in workers.gather(layers) for name, layer in of_rank.items()}
        self._indices = {layer: index for index, layer in enumerate(dict.fromkeys(self._layers.values()))}
        self._norms = torch.zeros(len(self._indices))
        engine.before_update.append(self._measure)

    def measured(self) -> Mapping[str, torch.Tensor]:
        """Return the norms of the last step by the name of their metric. The same on every worker."""
        return {f"grad_norm/{layer}": self._norms[index] for layer, index in self._indices.items()}

    def _measure(self) -> None:
        """Measure the norms of all layers. Each value of the gradient counts on one worker, and the workers add up."""
        engine = self._engine
        squares = torch.zeros(len(self._indices), dtype=torch.float64, device=engine.workers.device)
        for shard in engine.shards("gradients"):
            if shard.counts_once:
                dtype = torch.promote_types(shard.values.dtype, torch.float32)
                norm = torch.linalg.vector_norm(shard.values, dtype=dtype)
                squares[self._indices[self._layers[shard.name]]] += norm.to(squares).square()
        self._norms = engine.workers.sum_tensor(squares).sqrt() / engine.gradient_scale
