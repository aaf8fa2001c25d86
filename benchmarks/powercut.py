"""``benchmarks powercut``: is there a checkpoint to continue from in each state that a power cut may leave on the disk?

A short run of a small GPT is recorded: its writes, flushes and renames. :mod:`benchmarks.crash_states` lists what a
power cut after each of them may leave. In each state, the library looks for its newest checkpoint and loads it, as a
resume does. The run had reported some checkpoints as saved by then. The newest of them, or a later one, must be whole.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

import numpy as np
import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.contest import Advance, Answer, Columns, Flag, asks, progress, table
from benchmarks.crash_states import CrashState, crash_states, reported
from benchmarks.models import gpt2, trainer_arguments
from benchmarks.recorded_writes import Disk, Event, Recorder, Report, read_events, write_tree
from benchmarks.trainees import TIMINGS, text_samples
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.run.checkpoint.check import newest_complete
from rapidformer_templates.run.checkpoint.format import Reader, step_of
from rapidformer_templates.run.folder import RunFolder, read_metrics
from rapidformer_templates.system.workers import Workers
from rapidformer_templates.trainer import Trainer

FLAGS = (
    Flag("peers", True, "also record transformers' Trainer and torch's distributed checkpoint"),
    Flag("continued", True, "continue a run of ours from each kind of state"),
)

STEPS, SAVE_EVERY, KEEP, BATCH, LR = 6, 2, 2, 4, 1e-3
SAVED, EXPORTED = "saved", "exported"
ALONE = Workers(0, 0, 1, torch.device("cpu"))
RUN = "runs/mine"
"""The folder of the run. The program creates both folders."""

Tree = dict[str, bytes | None]


class Taken(NamedTuple):
    """The checkpoint that a resume would continue from.

    Attributes:
        path: its folder, relative to the run folder.
        step: its step.
    """

    path: str
    step: int


class Library(Protocol):
    """A library whose runs are recorded.

    Attributes:
        name: its name in the table.
    """

    name: str

    def train(self, folder: Path, recorder: Recorder) -> None:
        """Train in ``folder``, and report each checkpoint to the recorder."""

    def take(self, folder: Path) -> Taken | None:
        """Load the checkpoint that a resume would. None if there is none. Any exception ends the resumed run."""


def small_model() -> Any:
    return gpt2(1, 8, 2, 256, 64, dropout=0.1)


class Ours:
    """Runs of this library.

    Args:
        flags: additional flags.
        before: how the recorded run found its folder: "" (empty), "killed" (an earlier process was killed in its fifth
            step) or "complete" (everything was already done).
    """

    def __init__(self, name: str = "rapidformer_templates", flags: str = "", before: str = "") -> None:
        self.name, self.flags, self.before = name, flags, before

    def train(self, folder: Path, recorder: Recorder) -> None:
        last = STEPS if self.before == "complete" else 4 if self.before == "killed" else 0
        if last:
            with contextlib.suppress(KeyboardInterrupt):
                self._fit(folder, die_in=5 if self.before == "killed" else None)
        with recorder.recording():
            if last:
                recorder.report(SAVED, last)
            self._fit(folder, recorder)
            recorder.report(EXPORTED, STEPS)

    def _fit(self, folder: Path, recorder: Recorder | None = None, die_in: int | None = None) -> None:
        class Job(Trainer):
            def build_data(self) -> Data:
                return Data(train=text_samples()[:64])

            def build_model(self) -> nn.Module:
                return small_model()

            def on_step_end(self, step: int, result: object) -> None:
                if step == die_in:
                    raise KeyboardInterrupt
                if recorder:
                    recorder.look()

            def on_checkpoint(self, step: int, folder: Path) -> None:
                if recorder:
                    recorder.report(SAVED, step)

        flags = (
            f"--train-iters {STEPS} --micro-batch-size {BATCH} --lr {LR} --log-interval 1 --keep-checkpoints {KEEP}"
            f" --save-interval {SAVE_EVERY} --device cpu --resume {self.flags} --save {folder}"
        )
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            mock.patch("rapidformer_templates.run.console.draw_curves"),  # slower than everything else
        ):
            Job(flags.split()).fit()

    def take(self, folder: Path) -> Taken | None:
        newest, passed_over = newest_complete(RunFolder(folder).checkpoints, ALONE)
        if newest is None:
            if passed_over:
                raise RapidformerError("; ".join(passed_over))
            return None
        reader = Reader(newest)
        for kind in ("weights", "optimizer"):
            for name, shape in reader.names(kind).items():
                reader.read(kind, name, (0,) * len(shape), shape)
        return Taken(f"checkpoints/{newest.name}", step_of(newest))

    def resume(self, folder: Path) -> None:
        """Continue the run of a state to its end."""
        self._fit(folder)

    def outcome(self, folder: Path) -> dict[str, object]:
        """Return everything that an uninterrupted run leaves, without timings."""
        root = RunFolder(folder)
        files = [*root.checkpoints.glob(f"step-{STEPS}/*.safetensors"), *root.export.iterdir(), *root.model.iterdir()]
        lines = [{k: v for k, v in line.items() if k not in TIMINGS} for line in read_metrics(root.metrics)]
        summary = root.read_summary()
        return {
            "metrics": lines,
            "summary": (summary["steps"], summary["metrics"]),
            **{str(file.relative_to(folder)): file.read_bytes() for file in files},
        }


class TransformersTrainer:
    """transformers' Trainer, resumed from its last checkpoint as in its examples."""

    name = "transformers' Trainer"

    def train(self, folder: Path, recorder: Recorder) -> None:
        class Watch(transformers.TrainerCallback):
            def on_save(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
                recorder.report(SAVED, state.global_step)

        with recorder.recording():
            self._trainer(folder, [Watch()]).train()

    def _trainer(self, folder: Path, callbacks: Sequence[Any] = ()) -> Any:
        arguments = trainer_arguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=LR,
            save_steps=SAVE_EVERY,
            save_total_limit=KEEP,
            logging_strategy="no",
        )
        return transformers.Trainer(
            small_model(), arguments, train_dataset=text_samples()[:64], callbacks=list(callbacks)
        )

    @cached_property
    def _loader(self) -> Any:
        """A trainer that loads one checkpoint after another, with the functions that its ``train()`` calls."""
        with tempfile.TemporaryDirectory() as folder:
            trainer = self._trainer(Path(folder))
        trainer.create_optimizer_and_scheduler(STEPS)
        return trainer

    def take(self, folder: Path) -> Taken | None:
        last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        if last is None:
            return None
        trainer = self._loader
        trainer._load_from_checkpoint(last)
        TrainerState.load_from_json(str(Path(last, "trainer_state.json")))
        trainer._load_optimizer_and_scheduler(last)
        trainer._load_rng_state(last)
        return Taken(Path(last).name, int(Path(last).name.removeprefix("checkpoint-")))


class DistributedCheckpoint:
    """A plain loop with torch's distributed checkpoint. A checkpoint counts if it has its ``.metadata``."""

    name = "torch.distributed.checkpoint"

    def train(self, folder: Path, recorder: Recorder) -> None:
        state, step = self._state(), 0
        samples = torch.stack([sample["input_ids"] for sample in text_samples()[:64]]).split(BATCH)
        with recorder.recording():
            for batch in samples[:STEPS]:
                state["model"](input_ids=batch, labels=batch).loss.backward()
                state["optimizer"].step()
                state["optimizer"].zero_grad()
                step += 1
                if step % SAVE_EVERY == 0:
                    values = {name: part.state_dict() for name, part in state.items()}
                    save_distributed({**values, "step": step}, checkpoint_id=folder / f"step-{step}", no_dist=True)
                    recorder.report(SAVED, step)
                    for old in self._complete(folder)[:-KEEP]:
                        shutil.rmtree(old)

    def take(self, folder: Path) -> Taken | None:
        complete = self._complete(folder)
        if not complete:
            return None
        state = self._state()
        for parameter in state["model"].parameters():
            parameter.grad = torch.zeros_like(parameter)
        state["optimizer"].step()  # creates the state that is loaded
        values: dict[str, Any] = {name: part.state_dict() for name, part in state.items()}
        load_distributed({**values, "step": 0}, checkpoint_id=complete[-1], no_dist=True)
        return Taken(complete[-1].name, step_of(complete[-1]))

    def _state(self) -> dict[str, Any]:
        model = small_model()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=LR)}

    def _complete(self, folder: Path) -> list[Path]:
        return sorted((path.parent for path in folder.glob("step-*/.metadata")), key=step_of)


@dataclass
class PowerCuts:
    """Results of a library.

    Attributes:
        name: name of the library and the run.
        events: number of recorded events.
        states: number of states that were tried.
        outcomes: number of states by what a resume finds.
        continued: number of states that a run was continued from. Each represents the states of its kind.
        faults: descriptions of the first states in which something is wrong.
    """

    name: str
    events: int = 0
    states: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    continued: int = 0
    faults: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "events": self.events,
            "states": self.states,
            **{name: self.outcomes[name] for name in OUTCOMES},
            "continued": self.continued,
            "faults": self.faults,
        }


WHOLE, NOTHING_YET, OLDER, ENDS, LOST, DAMAGED = "whole", "nothing_yet", "older", "ends", "lost", "damaged"
OUTCOMES = {
    WHOLE: "newest saved checkpoint",
    NOTHING_YET: "nothing was saved yet",
    OLDER: "an older one",
    ENDS: "resume fails",
    LOST: "finds none",
    DAMAGED: "loads a damaged one",
}
"""The outcomes of a resume in a state, with their headings in the table. Everything from ``older`` on is a fault."""
FAULTS = (OLDER, ENDS, LOST, DAMAGED)


def record(library: Library, folder: Path) -> list[Event]:
    """Record a run of a library in a new folder."""
    root = folder / "disk"
    root.mkdir(parents=True)
    recorder = Recorder(root, folder / "recording")
    seed()
    library.train(root / RUN, recorder)
    events = read_events(folder / "recording")
    disk = Disk()
    for event in events:
        disk.apply(event)
    on_disk = {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}
    assert disk.tree() == on_disk, "the recording is not complete"
    return events


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def judge(
    library: Library, events: Sequence[Event], folder: Path, *, every: int = 1, advance: Advance = lambda text: None
) -> tuple[PowerCuts, dict[str, CrashState]]:
    """Look for a checkpoint in each state.

    Args:
        folder: an empty folder for the states.
        every: tries only each n-th state.

    Returns:
        The results, and one state of each kind to continue from.
    """
    cuts, truth, kinds = PowerCuts(library.name, len(events)), _trees_at_reports(events), dict[str, CrashState]()
    folders = {part: [_below(tree, part) for tree in truth] for part in ("export", "model")}
    known: dict[object, tuple[Taken | None, str]] = {}
    with _quiet():
        for number, state in enumerate(crash_states(events)):
            if number % every:
                continue
            tree = _below(state.tree, RUN)
            found = _taken(library, tree, folder / "state", known)
            outcome, detail = _outcome(*found, tree, truth, reported(events[: state.events], SAVED))
            for part, whole in folders.items():
                if part in tree and _below(tree, part) not in whole:
                    outcome, detail = DAMAGED, f"{part}/ is not whole"
            cuts.states += 1
            cuts.outcomes[outcome] += 1
            if outcome in FAULTS and len(cuts.faults) < 20:
                cuts.faults.append(f"after event {state.events} ({_describe(events[state.events - 1])}): {detail}")
            kinds.setdefault(_kind(found[0], tree, truth), state)
            advance(library.name)
    return cuts, kinds


def continue_each(library: Ours, kinds: dict[str, CrashState], whole: Path, folder: Path, cuts: PowerCuts) -> None:
    """Continue a run from each state to its end, and compare it with the uninterrupted run in ``whole``."""
    expected = library.outcome(whole)
    for kind, state in kinds.items():
        write_tree(_below(state.tree, RUN), folder / "state")
        try:
            library.resume(folder / "state")
            outcome = library.outcome(folder / "state")
            different = [name for name in expected | outcome if expected.get(name) != outcome.get(name)]
            problem = f"differs in {', '.join(different)}" if different else None
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            cuts.faults.append(f"continued after event {state.events} ({kind}): {problem}")
        cuts.continued += 1
        shutil.rmtree(folder / "state")


def _taken(library: Library, tree: Tree, folder: Path, known: dict[object, Any]) -> tuple[Taken | None, str]:
    """Return the checkpoint that is loaded, and the error. The answer for each content of the checkpoints is kept."""
    relevant = {p: data for p, data in tree.items() if not isinstance(library, Ours) or p.startswith("checkpoints")}
    signature = frozenset(relevant.items())
    if signature not in known:
        write_tree(relevant, folder)
        try:
            known[signature] = library.take(folder), ""
        except (Exception, CheckpointException) as error:  # torch's own derives from BaseException
            known[signature] = None, f"{type(error).__name__}: {error}".replace(f"{folder}/", "").splitlines()[0]
        shutil.rmtree(folder)
    found: tuple[Taken | None, str] = known[signature]
    return found


def _outcome(taken: Taken | None, error: str, tree: Tree, truth: Sequence[Tree], step: int) -> tuple[str, str]:
    if error:
        return ENDS, error
    if taken is None:
        return (LOST, f"step {step} was reported as saved, and there is no checkpoint") if step else (NOTHING_YET, "")
    if not any(_below(tree, taken.path) == _below(whole, taken.path) for whole in truth if taken.path in whole):
        return DAMAGED, f"{taken.path} is loaded, but it is not what was saved"
    return (WHOLE, "") if taken.step >= step else (OLDER, f"{taken.path} is loaded, but step {step} was reported")


def _trees_at_reports(events: Sequence[Event]) -> list[Tree]:
    """Return the contents of the run folder at each report of the run."""
    disk, trees = Disk(), []
    for event in events:
        disk.apply(event)
        if isinstance(event, Report):
            trees.append(_below(disk.tree(), RUN))
    return trees


def _below(tree: Tree, folder: str) -> Tree:
    prefix = f"{folder}/"
    return {path.removeprefix(prefix): data for path, data in tree.items() if path.startswith(prefix)}


def _kind(taken: Taken | None, tree: Tree, truth: Sequence[Tree]) -> str:
    """Describe what a resumed run meets: its checkpoint, and which of the other files and folders are whole."""
    parts = []
    for path, data in sorted(tree.items()):
        top = path.partition("/")[0]
        if path == "checkpoints/latest" or (top != "checkpoints" and "/" not in path):
            here = [whole for whole in truth if path in whole]
            same = any(whole[path] == data and _below(tree, path) == _below(whole, path) for whole in here)
            torn = "" if same else f" of {len(data.splitlines())} lines" if data else " empty"
            parts.append(path + torn)
    names = [path for path, data in tree.items() if data is None and path.startswith("checkpoints/")]
    return ", ".join([f"step {taken.step if taken else 'none'}", *sorted(names), *parts])


def _describe(event: Event) -> str:
    names = {key: value for key, value in vars(event).items() if key in ("name", "new_name", "what", "step", "node")}
    return f"{type(event).__name__} {' '.join(map(str, names.values()))}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show no warnings about damaged checkpoints."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        yield
        transformers.logging.set_verbosity(verbosity)


OUR_RUNS = (
    Ours("rapidformer_templates"),
    Ours("the same with --async-save", "--async-save"),
    Ours("the same, resumed after a kill", before="killed"),
    Ours("the same, resumed when complete", before="complete"),
)
PEERS: tuple[Library, ...] = (TransformersTrainer(), DistributedCheckpoint())


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    results = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rapidformer-powercut-")))
        libraries: tuple[Library, ...] = OUR_RUNS + (PEERS if options.peers else ())
        for number, library in enumerate(libraries):
            events = record(library, folder / str(number))
            with progress("states", 0) as advance:
                cuts, kinds = judge(library, events, folder, advance=advance)
            if isinstance(library, Ours) and options.continued:
                continue_each(library, kinds, folder / str(number) / "disk" / RUN, folder, cuts)
            results.append(cuts)
    rows = [cuts.to_json() for cuts in results]
    columns: Columns = {
        "run": "{name}",
        "events": "{events:,}",
        "states": "{states:,}",
        **{heading: f"{{{name}:,}}" for name, heading in OUTCOMES.items()},
        "continued": "{continued}",
    }
    ours = [cuts for cuts, library in zip(results, libraries, strict=True) if isinstance(library, Ours)]
    notes = [f"{cuts.name}: {fault}" for cuts in results for fault in cuts.faults[:5]]
    return Answer(
        {"solutions": rows},
        table("what a resume finds after a power cut", rows, columns),
        notes,
        status=1 if any(cuts.faults for cuts in ours) else 0,
    )
