"""A resumed run reads the rows of a complete one, from every source, and notices rows that have changed."""

import itertools
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rapidformer_templates import Data, Pretrainer, Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.data.collate import WindowCollate
from rapidformer_templates.data.fingerprints import checksum
from rapidformer_templates.data.indexed.blend import Blend
from rapidformer_templates.data.loader import load, train_requests
from rapidformer_templates.data.order import SampleOrder
from rapidformer_templates.data.pretraining.samples import GPTSamples
from rapidformer_templates.errors import CheckpointError
from rapidformer_templates.run.folder import read_metrics
from tests.support.indexed_sets import numbered
from tests.support.jobs import CausalJob
from tests.support.messages import Says
from tests.support.selection import by_default, few
from tests.support.texts import WORDS, write_jsonl
from tests.support.worker_pool import new_process, run_in_workers

STEPS = (
    "--model-type gpt2 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --dropout 0 --device cpu --lr 1e-3"
    " --train-iters 6 --save-interval 2 --keep-checkpoints 9 --micro-batch-size 2 --global-batch-size 4"
    " --log-interval 1 --no-export-model"
)
TUNING = "--task causal_lm --seq-length 32 --validation-fraction 0"
PRETRAINING = "--task pretraining --seq-length 16"
SOURCES = {
    "files": f"{TUNING} --data-dir {{0}}/shards",
    "grouped": f"{TUNING} --data-dir {{0}}/shards --group-by-length",
    "packed": f"{TUNING} --data-dir {{0}}/shards --pack-sequences",
    "mixture": f"{TUNING} --data-dir {{0}}/sets --data-name",
    "stream": f"{TUNING} --data-dir {{0}}/shards --streaming --shuffle-buffer 7",
    "packed stream": f"{TUNING} --data-dir {{0}}/shards --streaming --pack-sequences --shuffle-buffer 11",
    "corpus": f"{PRETRAINING} --data-path {{0}}/shards/train-00000-of-00003.jsonl",
    "streamed corpus": f"{PRETRAINING} --data-path {{0}}/shards/*.jsonl --streaming --shuffle-buffer 7",
    "indexed": f"{PRETRAINING} --data-path {{0}}/first_text_document",
    "blend": f"{PRETRAINING} --data-path 0.3 {{0}}/first_text_document 0.7 {{0}}/second_text_document",
}
LAST_WORD = {"mixture": ["0.7 a 0.3 b"]}
STREAMS = ("stream", "packed stream", "streamed corpus")
LOADING = [(loaders, world) for loaders in ("0", "1", "2") for world in (1, 2)] + [("2 spawned", 1)]
"""The loader processes of each worker, and the number of workers. A spawned loader imports everything again."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path) -> Path:
    """Create shards, sets and indexed corpora. A run reads more than each of them has, so each restarts."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "shards").mkdir()
    (folder / "sets").mkdir()
    for shard in range(3):
        rows = [{"text": " ".join(draw.choice(WORDS, draw.integers(2, 30)))} for _ in range(6)]
        write_jsonl(folder / "shards" / f"train-{shard:05d}-of-00003.jsonl", rows)
    for name, word in (("a", "river"), ("b", "tree")):
        write_jsonl(folder / "sets" / f"{name}.jsonl", [{"text": f"{word} {WORDS[i]} {i}"} for i in range(9)])
    for shard, name in enumerate(("first", "second")):
        source = folder / "shards" / f"train-{shard:05d}-of-00003.jsonl"
        words = ["data", "preprocess", "--input", str(source), "--output-prefix", str(folder / name)]
        assert main([*words, "--tokenizer-path", str(gpt_folder), "--append-eod"]) == 0
    return folder


def flags_of(source: str, data: Path, tokenizer: Path) -> list[str]:
    words = [*SOURCES[source].format(data).split(), *LAST_WORD.get(source, [])]
    return [*STEPS.split(), *words, "--tokenizer-path", str(tokenizer)]


def run(workers: Any, flags: list[str], folder: str, *more: str) -> None:
    template = Pretrainer if "pretraining" in flags else Trainer
    template([*flags, "--save", folder, *more]).fit()


@contextmanager
def _start_method(name: str) -> Iterator[None]:
    """Start processes by this method inside the context."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(name, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def lines_of(folder: Path) -> list[tuple[int, float, float]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("source", "loading"),
    [
        *few([("packed stream", ("1", 1))], itertools.product(STREAMS, LOADING)),
        *few([], itertools.product([source for source in SOURCES if source not in STREAMS], LOADING)),
    ],
    ids=str,
)
def test_a_resumed_run_has_the_lines_of_the_whole_one(
    source: str, loading: tuple[str, int], data: Path, gpt_folder: Path, tmp_path: Path
) -> None:
    """Loader processes are forked, or spawned as on macOS, where they get everything by pickle."""
    loaders, world = loading
    count, _, method = loaders.partition(" ")
    flags = [*flags_of(source, data, gpt_folder), "--dataloader-num-workers", count]

    def train(folder: Path, *more: str) -> None:
        if world == 1:
            run(None, flags, str(folder), *more)
        else:
            run_in_workers(world, run, flags, str(folder), *more)

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole)
    with _start_method("spawn" if method else "fork"):
        train(stopped, "--train-iters", "2", "--lr-decay-iters", "6")
        train(stopped, "--resume", "--train-iters", "4", "--lr-decay-iters", "6")
        train(stopped, "--resume", "--lr-decay-iters", "6")
    assert lines_of(stopped) == lines_of(whole)
    assert len({loss for _, loss, _ in lines_of(whole)}) == 6


KILLED = {"streamed corpus": "--shuffle-buffer 9", "packed stream": "--shuffle-buffer 9", "mixture": "--data-name"}
"""Sources of runs that are killed, and a flag that changes their order."""


class Seen:
    """Records the rows of each micro batch. Can kill its process after a step."""

    def begin(self, folder: Path, rank: int, dies_after: int | None) -> None:
        self.file, self.done, self.dies_after = folder / f"seen-{rank}.jsonl", 0, dies_after

    def on_train_start(self: Any) -> None:
        steps = sorted(int(path.name[5:]) for path in (self.run_folder / "checkpoints").glob("step-?*"))
        self.done = steps[-1] if steps else 0

    def compute_loss(self: Any, model: Any, batch: Any) -> Any:
        if model.training:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": self.done + 1, "rows": batch["input_ids"].tolist()}) + "\n")
        return super().compute_loss(model, batch)  # type: ignore[misc]

    def on_step_end(self, step: int, result: Any) -> None:
        self.done = step
        if step == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


class SeenPretrainer(Seen, Pretrainer):
    pass


class SeenTrainer(Seen, Trainer):
    pass


def run_seen(workers: Any, folder: Path, flags: Sequence[str], dies_after: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    job = (SeenPretrainer if "pretraining" in flags else SeenTrainer)([*flags, "--save", str(folder / "run")])
    job.run_folder = folder / "run"  # type: ignore[attr-defined]
    job.begin(folder, workers.rank if workers else 0, dies_after)
    job.fit()


def seen(folder: Path) -> dict[int, list[Any]]:
    """Return the rows of each step of all workers. If a step was repeated after a death, return the rows of the last
    time.
    """
    steps: dict[int, list[Any]] = {}
    for file in sorted(folder.glob("seen-*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            steps.setdefault(line["step"], []).extend(line["rows"])
    return {step: sorted(rows) for step, rows in sorted(steps.items())}


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.durable
@pytest.mark.parametrize("source", KILLED)
def test_killed_and_resumed_with_other_workers(source: str, data: Path, gpt_folder: Path, tmp_path: Path) -> None:
    """Compare one process, one killed after step 5 and resumed by two, and one with two loader processes."""
    steps = ["--train-iters", "10", "--global-batch-size", "8", "--save-interval", "3"]
    flags = [*flags_of(source, data, gpt_folder), *steps]
    whole, killed, ahead = tmp_path / "whole", tmp_path / "killed", tmp_path / "ahead"
    run_seen(None, whole, flags)
    process = new_process(run_seen, None, killed, flags, 5)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    before = seen(killed)
    assert {step: before[step] for step in range(1, 6)} == {step: seen(whole)[step] for step in range(1, 6)}
    (killed / "seen-0.jsonl").unlink()
    run_in_workers(2, run_seen, killed, [*flags, "--resume"])
    run_seen(None, ahead, [*flags, "--dataloader-num-workers", "2"])
    assert {step: rows for step, rows in seen(whole).items() if step > 3} == seen(killed)
    assert seen(ahead) == seen(whole)
    assert all(len(rows) == 8 for rows in seen(whole).values())
    losses = {folder: [loss for _, loss, _ in lines_of(folder / "run")] for folder in (whole, killed, ahead)}
    assert losses[killed] == pytest.approx(losses[whole], rel=1e-5)
    assert losses[ahead] == pytest.approx(losses[whole], rel=1e-5)
    epochs = [line["epoch"] for line in read_metrics(whole / "run" / "metrics.jsonl") if "loss" in line]
    assert epochs == sorted(epochs)
    assert epochs[-1] >= 1
    change = [*KILLED[source].split(), *(["0.6 a 0.4 b"] if source == "mixture" else [])]
    with pytest.raises(CheckpointError, match=r"the order of the data would change: the (stream|corpus) was"):
        run_seen(None, killed, [*flags, "--resume", "--train-iters", "12", *change])


CORPORA = st.lists(
    st.tuples(st.lists(st.integers(1, 60), min_size=3, max_size=20), st.integers(1, 9)), min_size=1, max_size=3
)
LAST = 7


def _set(folder: Path, corpora: list[tuple[list[int], int]], length: int) -> Any:
    sets = []
    for i, (lengths, _) in enumerate(corpora):
        lengths = [*lengths, length + 1]  # so that there is a sample
        sets.append(GPTSamples(numbered(folder / str(i), lengths, 10_000 * i), (0, len(lengths)), length, 3))
    return sets[0] if len(sets) == 1 else Blend(sets, [weight for _, weight in corpora])


def _steps(samples: Any, global_batch: int, ranks: int, micro: int, start: int, *, by_epochs: bool) -> list[Any]:
    """Return, for each step, the (samples, tokens) of all ranks, in the order of the micro batches of one process."""
    order = SampleOrder(len(samples), global_batch, 3, by_epochs=by_epochs, in_order=True)
    data = Data(samples, collate=WindowCollate())
    accumulation = global_batch // (ranks * micro)
    loaders = [
        load(
            samples, data,
            train_requests(order, start, LAST, rank=rank, data_size=ranks, accumulation=accumulation),
            workers=0, pin_memory=False,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    steps = []
    for _ in range(start, LAST):
        batches = [next(loader) for _ in range(accumulation) for loader in loaders]
        here = [batch for batch in batches if not batch.idle]
        tokens = [row for batch in here for row in batch.batch["input_ids"].tolist()]
        steps.append(([sample for batch in here for sample in batch.samples], tokens))
    return steps


@pytest.mark.slow
@given(CORPORA, st.integers(1, 30), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3), st.data())
@settings(max_examples=20, deadline=None)
def test_layouts_and_resumes_change_nothing(
    corpora: list[tuple[list[int], int]], length: int, ranks: int, micro: int, accumulation: int, data: st.DataObject
) -> None:
    by_epochs = data.draw(st.booleans())
    resume_at = data.draw(st.integers(0, LAST - 1))
    global_batch = ranks * micro * accumulation
    with tempfile.TemporaryDirectory() as folder:
        samples = _set(Path(folder), corpora, length)
        alone = _steps(samples, global_batch, 1, global_batch, 0, by_epochs=by_epochs)
        assert _steps(samples, global_batch, ranks, micro, 0, by_epochs=by_epochs) == alone
        assert _steps(samples, global_batch, ranks, micro, resume_at, by_epochs=by_epochs) == alone[resume_at:]
        positions = [sample for step, _ in alone for sample in step]
        assert positions == list(range(len(positions)))  # nothing is lost or doubled, even at the ends of epochs
        for _, tokens in alone:
            assert np.shape(tokens)[1] == length


SHORT_STEPS = (
    "--model-type gpt2 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --device cpu --lr 1e-3 --seq-length 32"
    " --micro-batch-size 2 --no-export-model --train-iters"
)
TUNING_WHOLE = "--task causal_lm --validation-fraction 0"
CHANGING = {
    "files": f"{TUNING_WHOLE} --data-dir {{0}} --data-name a",
    "packed": f"{TUNING_WHOLE} --data-dir {{0}} --data-name a --pack-sequences",
    "mixture": f"{TUNING_WHOLE} --data-dir {{0}} --data-name",
    "stream": f"{TUNING_WHOLE} --data-dir {{0}} --data-name a --streaming",
    "corpus": "--task pretraining --data-path {0}/a.jsonl --split 1,0,0",
    "streamed corpus": "--task pretraining --data-path {0}/a.jsonl --streaming",
}
WEIGHTED = {"mixture": ["1 a 3 b"]}
CHANGED = "the training samples are not those of the checkpoint: "


def write(folder: Path, changed_row: int | None = None) -> None:
    """Write two sets of 20 rows. A changed row has other words of the same length."""
    for name, word in (("a", "river"), ("b", "green")):
        texts = [f"{word} {WORDS[i]} {' '.join(WORDS[i : i + 8])}" for i in range(20)]
        if changed_row is not None:
            texts[changed_row] = texts[changed_row].replace("river", "house")
        write_jsonl(folder / f"{name}.jsonl", [{"text": text} for text in texts])


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("source", by_default(["stream"], CHANGING))
def test_other_rows_of_equal_size(
    source: str, gpt_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, template = tmp_path / "data", Pretrainer if "corpus" in source else Trainer
    data.mkdir()
    flags = [*CHANGING[source].format(data).split(), *WEIGHTED.get(source, []), "--tokenizer-path", str(gpt_folder)]
    flags += ["--save", str(tmp_path / "run"), *SHORT_STEPS.split()]
    write(data)
    template([*flags, "1"]).fit()
    write(data)  # the same again, at another time
    template([*flags, "2", "--resume"]).fit()
    write(data, changed_row=0 if "stream" in source else 12)
    with pytest.raises(CheckpointError) as caught:
        template([*flags, "3", "--resume"]).fit()
    assert CHANGED in caught.value.message or (source == "corpus" and "the corpus was" in caught.value.message)
    assert "--allow-changed-data" in str(caught.value.hint)
    template([*flags, "3", "--resume", "--allow-changed-data"]).fit()
    assert f"{caught.value.message} (--allow-changed-data)" in capsys.readouterr().err
    template([*flags, "4", "--resume"]).fit()  # the last checkpoint is of these data


def test_the_date_of_a_template(
    gpt_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    """The difference is shown. Here another template stands for another day."""
    flags = [*f"{TUNING_WHOLE} --data-dir {tmp_path} --data-name chat --save {tmp_path}/run {SHORT_STEPS}".split()]
    messages = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "hello"}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": messages}] * 4)
    tokenizer = AutoTokenizer.from_pretrained(gpt_folder)

    def train(day: str, *more: str) -> None:
        date = f"{{{{ strftime_now('{day}') }}}}"
        tokenizer.chat_template = f"Today is {date}.{{% for m in messages %}} {{{{ m.content }}}}{{% endfor %}}"
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        Trainer([*flags, *more, "--loss-on", "all", "--tokenizer-path", str(tmp_path / "tokenizer")]).fit()

    train("27 Nov", "1")
    assert "note       the chat template writes the date" in capsys.readouterr().err
    with says(CheckpointError):
        train("28 Nov", "2", "--resume")


class Own(CausalJob):
    """A job whose samples depend on an attribute, from the beginning or only when they are collated."""

    word, count = 5, 40
    where = "samples"

    def build_data(self) -> Data:
        data = super().build_data()
        samples, collate = data.train[: self.count], data.collate
        changed = {"input_ids": np.full(4, self.word), "labels": np.full(4, self.word)}
        if self.where == "samples":
            samples[0] = changed
        is_collated = self.where == "collate"
        train = Random(samples) if self.where == "random" else samples
        return Data(train=train, collate=lambda rows: collate([changed] * len(rows) if is_collated else rows))


class Random(list[Any]):
    """Samples that are another one each time."""

    draws = itertools.count()

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return sample | {"labels": np.full(len(sample["input_ids"]), next(self.draws) % 60)}


@pytest.mark.parametrize("where", by_default(["count"], ["samples", "collate", "count", "random"]))
def test_data_of_a_script(where: str, tmp_path: Path) -> None:
    def train(steps: int, *more: str, **changes: Any) -> None:
        job = type("Job", (Own,), {"where": where, **changes})
        flags = f"--micro-batch-size 2 --lr 1e-3 --no-export-model --save {tmp_path}/run --train-iters {steps}".split()
        job([*flags, *more], no_save=False).fit()

    train(1)
    train(2, "--resume")
    changes = {"count": 41} if where == "count" else {"word": 6}
    if where != "random":
        with pytest.raises(CheckpointError, match="training samples was 40, is 41" if where == "count" else CHANGED):
            train(3, "--resume", **changes)
        train(3, "--resume", "--allow-changed-data", **changes)
    train(3, "--resume", **changes)


def test_checksums_are_of_contents() -> None:
    values: list[Any] = [
        np.arange(6), np.arange(5), np.arange(6.0), torch.arange(7), "a", "b", 1, 2.5, None, True, b"a", [1, 2],
        [[1], 2], {"a": 1}, {"b": 1}, np.array(["a", None], object), torch.ones(2, dtype=torch.bfloat16),
    ]  # fmt: skip
    sums = [checksum(value) for value in values]
    assert len(set(sums)) == len(values)
    assert checksum({"x": torch.arange(3), "y": ("a", 1)}) == checksum({"x": np.arange(3), "y": ["a", 1]})
    assert checksum(object()) == checksum(object())
