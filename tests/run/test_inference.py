"""A program that continues after ``fit``: the model in it, evaluations, predictions, and the unchanged process."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, BartConfig, BartForCausalLM

from rapidformer_templates import Callback, Data, Trainer
from rapidformer_templates.errors import ConfigError, DataError, Interrupted, WorkerFailed
from rapidformer_templates.run import new_workers
from tests.support.lines import Line
from tests.support.messages import Says
from tests.support.parity import whole_weights
from tests.support.preference_runs import judged, make, pairs, words
from tests.support.selection import by_default, few
from tests.support.texts import TINY, write_jsonl
from tests.support.worker_pool import run_in_workers

LINE = {"lr": 0.1, "epochs": 1, "micro_batch_size": 4, "no_save": True, "log_interval": 100}


class Held(Line):
    """A Line with validation data, and a method that reads the model's outputs."""

    def build_data(self) -> Data:
        data = super().build_data()
        data.valid = data.train[:6]
        return data

    def read_outputs(self, outputs: Any, batch: Any) -> tuple[list[float], list[float]]:
        return outputs[:, 0].tolist(), batch["y"][:, 0].tolist()


def loss_by_hand(job: Trainer, samples: Any) -> float:
    x, y = (torch.tensor([float(sample[name][0]) for sample in samples]) for name in ("x", "y"))
    with torch.no_grad():
        return float(((job.model(x[:, None])[:, 0] - y) ** 2).mean())


def test_the_process_is_as_it_was_and_a_second_fit_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["server.py", "--port", "80"])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    torch.manual_seed(3)
    before, environment = torch.get_rng_state(), dict(os.environ)
    weights = []
    for flags in ({}, {}, {"fsdp_memory_optimization": True}, {"fsdp_memory_optimization": True}):
        job = Held(**LINE, **flags)
        summary = job.fit()
        assert type(job.model) is torch.nn.Linear
        assert job.evaluate()["eval_loss"] == summary["metrics"]["eval_loss"]
        weights.append(job.model.weight.item())
    assert len(set(weights)) == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert not dist.is_initialized()
    assert dict(os.environ) == environment


def test_evaluate_and_predict_are_those_of_the_model() -> None:
    job = Held(**LINE, ema_decay=0.5)
    with pytest.raises(AttributeError, match="Held has no model yet"):
        assert job.model
    untrained = job.evaluate()["eval_loss"]
    assert untrained == pytest.approx(loss_by_hand(job, job.data.valid))
    summary = job.fit()
    assert job.evaluate() == summary["metrics"]  # of the averaged weights, which are exported
    assert not job.model.training
    assert job.evaluate(job.data.train)["eval_loss"] == pytest.approx(loss_by_hand(job, job.data.train))
    one = job.predict(job.data.valid[0])
    assert one == pytest.approx(job.model(torch.from_numpy(job.data.valid[0]["x"])).item())
    assert job.predict(list(job.data.valid), batch_size=4) == pytest.approx(
        [job.model(torch.from_numpy(sample["x"])).item() for sample in job.data.valid]
    )
    assert job.predict([]) == []
    assert not job.model.training


def asks(job: Any) -> tuple[Any, ...]:
    return job.evaluate, lambda: job.predict([]), lambda: job.model


def test_a_model_that_was_trained_in_workers_is_not_untrained(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    """With ``--nproc-per-node`` in a script, the workers end after ``fit``, and the program continues without them."""
    job = Held(**{**LINE, "micro_batch_size": 2}, nproc_per_node=2)
    monkeypatch.setattr("rapidformer_templates.system.launch.is_script", lambda: True)
    for ended, error in ((lambda template, then, keep: {}, None), (mock.Mock(side_effect=ZeroDivisionError), True)):
        monkeypatch.setattr("rapidformer_templates.run.fit.fit", ended)
        with pytest.raises(ZeroDivisionError) if error else contextlib.nullcontext():
            job.fit()
        for ask in asks(job):
            with says(ConfigError):
                ask()


class Ends(Held):
    """A job that ends after step 3 of 6 in some way. It remembers its weight and the average of it."""

    way = ""
    weights = (0.0, 0.0)

    def on_step_end(self, step: int, result: Any) -> None:
        (weight,) = whole_weights(self.engine, self.engine.workers)["weight"].flatten().tolist()
        self.weights = (weight, (self.weights[1] + weight) / 2 if step > 1 else weight)
        if step == 3 and self.way == "error":
            raise ZeroDivisionError
        if step == 3 and self.way == "request":
            os.kill(os.getpid(), signal.SIGINT)

    def on_evaluate(self, step: int, metrics: Any) -> None:
        if self.way == "error in the evaluation":
            raise ZeroDivisionError

    def on_train_end(self, summary: Any) -> None:
        if self.way == "error at the end":
            raise ZeroDivisionError


SIX = {**LINE, "train_iters": 6, "epochs": None}
WAYS = {"error": 3, "request": 4, "error in the evaluation": 6, "error at the end": 6}
"""The ways to end, and the last step."""
SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "average": {"ema_decay": 0.5},
    "fsdp": {"fsdp_memory_optimization": True},
    "zero-3": {"zero_3_memory_optimization": True},
}
SHORT = [
    ("error", "none"), ("request", "average"), ("error in the evaluation", "fsdp"), ("error at the end", "average"),
    ("request", "fsdp"),
]  # fmt: skip


@pytest.mark.parametrize(("way", "switch"), few(SHORT, itertools.product(WAYS, SWITCHES)))
def test_an_ended_run_leaves_the_weights_of_its_last_step(way: str, switch: str) -> None:
    """The exception is the user's own, or a ``KeyboardInterrupt``, which no ``except Exception`` catches."""
    job = type("Ended", (Ends,), {"way": way})(**SIX, **SWITCHES[switch])
    with pytest.raises(KeyboardInterrupt if way == "request" else ZeroDivisionError) as caught:
        job.fit()
    assert isinstance(caught.value, Exception) == (way != "request")
    weight = job.weights[switch == "average"]
    assert job.model.weight.item() == pytest.approx(weight, abs=1e-7)
    assert job.evaluate()["eval_loss"] == pytest.approx(loss_by_hand(job, job.data.valid))
    assert job.model.weight.item() == pytest.approx(weight, abs=1e-7)
    assert not job.model.training


def test_a_run_that_ends_before_its_first_step_leaves_no_model(says: Says) -> None:
    job = Ends(**SIX)
    job.fit()
    with mock.patch.object(job, "build_data", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        job.fit()
    for ask in asks(job):
        with says(ConfigError):
            ask()
    assert job.fit()["metrics"] == job.evaluate()


class Counts(Callback):
    """Counts steps, also over workers."""

    steps = 0

    def on_step_end(self, trainer: Any, step: int, result: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class AsksOnce(Ends):
    """A job in two workers, one of which is asked to stop after step 3."""

    def on_step_end(self, step: int, result: Any) -> None:
        self.way = "request" if self.is_main else ""
        super().on_step_end(step, result)


def run_stopped(workers: Any, folder: str) -> dict[str, Any]:
    """Run the program of a worker, and return how it was stopped."""
    with mock.patch("rapidformer_templates.system.launch.report_errors", lambda body: body()):
        try:
            new_workers.main(Path(folder))
        except Interrupted as stop:
            return {"message": stop.message, "hint": stop.hint, "saved": stop.saved}
    raise AssertionError("it was not stopped")


@pytest.mark.distributed
def test_workers_that_are_stopped_leave_the_weights_of_their_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_workers(command: list[str], count: int, *more: Any, **options: Any) -> None:
        raise Interrupted(**run_in_workers(count, run_stopped, command[-1])[0])

    one = type("One", (Ends,), {"way": "request"})(**SIX)
    with pytest.raises(KeyboardInterrupt):
        one.fit()
    monkeypatch.setattr("rapidformer_templates.system.launch.run_workers", run_workers)
    counts = Counts()
    two = AsksOnce(callbacks=[counts], **{**SIX, "micro_batch_size": 2})
    with pytest.raises(KeyboardInterrupt, match="stopped after step 4, as requested"):
        two.fit(workers=2)
    assert two.model.weight.item() == pytest.approx(one.model.weight.item(), abs=1e-6)
    assert two.evaluate()["eval_loss"] == pytest.approx(one.evaluate()["eval_loss"], rel=1e-5)
    assert counts.steps == 4
    lost = mock.Mock(side_effect=WorkerFailed("worker 1 was killed"))
    monkeypatch.setattr("rapidformer_templates.system.launch.run_workers", lost)
    with pytest.raises(WorkerFailed):
        two.fit(workers=2)
    with pytest.raises(ConfigError, match="has left no trained model"):
        two.evaluate()


def test_what_cannot_be_done_is_said(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    with says(DataError):
        Held(**LINE).evaluate(iter(range(3)))
    job = Line(**LINE)
    job.fit()
    with says(DataError):
        job.evaluate()
    with says(ConfigError):
        job.predict(job.data.train[0])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with says(ConfigError):
        Held(**LINE).evaluate()
    predict = lambda self, outputs, batch: ([], [])  # noqa: E731
    with says(ConfigError, HERE=f"test_inference.py:{predict.__code__.co_firstlineno}"):
        type("Own", (Line,), {"predict": predict})(**LINE)


PROGRAM = """
import os, signal, sys, threading
import numpy as np
import torch
from rapidformer_templates import Callback, Data
from tests.support.lines import Line

SLOPE, lock = 2.0, threading.Lock()

class Cell(Line):
    def build_data(self):
        x = np.random.default_rng(0).normal(size=(20, 1)).astype(np.float32)
        rows = [{"x": row, "y": SLOPE * row + 1} for row in x]
        return Data(train=rows, valid=rows[:6])

class Losses(Callback):
    seen = ()
    def on_step_end(self, trainer, step, result): self.seen = [*self.seen, float(result.loss)]
    def state_dict(self): return {"seen": list(self.seen)}
    def load_state_dict(self, state): self.seen = state["seen"]

class Stops(Cell):
    def on_step_end(self, step, result):
        if step == 3 and self.is_main:
            os.kill(os.getppid(), signal.SIGINT)  # Ctrl-C in the notebook

class Short(Cell):
    last = 0
    def on_step_end(self, step, result):
        if step == self.last:
            self.stop()

class Fails(Cell):
    def compute_loss(self, model, batch):
        raise ZeroDivisionError("of my own")

class Locked(Cell):
    def compute_loss(self, model, batch):
        with lock:
            return super().compute_loss(model, batch)

sys.argv = ["notebook", "--unknown"]
flags = {"lr": 0.1, "epochs": 2, "no_save": True, "device": "cpu"}
losses = [Losses(), Losses()]
one = Cell(micro_batch_size=4, callbacks=losses[:1], **flags)
two = Cell(micro_batch_size=2, callbacks=losses[1:], **flags)
summaries = [one.fit(), two.fit(workers=2)]
assert summaries[1]["metrics"] == two.evaluate(), summaries
assert torch.allclose(one.model.weight, two.model.weight, rtol=0, atol=1e-7)
assert np.allclose(losses[0].seen, losses[1].seen, rtol=1e-6) and len(losses[1].seen) == 10
assert two.config.launch.nproc_per_node is None  # the workers were those of that call
print("trained")
stopped = Stops(micro_batch_size=2, **{**flags, "epochs": 3000})
try:
    stopped.fit(workers=2)
except KeyboardInterrupt as error:
    Short.last = int(error.message.split()[3].strip(","))  # stopped after step N, as requested
short = Short(micro_batch_size=4, **{**flags, "epochs": 3000})
short.fit()
assert torch.allclose(short.model.weight, stopped.model.weight, rtol=0, atol=1e-6), Short.last
print("stopped")
try:
    Fails(micro_batch_size=2, **flags).fit(workers=2)
except ZeroDivisionError as error:
    assert "in worker" in error.__notes__[0] and "of my own" in error.__notes__[0]
    print("own error")
try:
    Locked(micro_batch_size=2, **flags).fit(workers=2)
except Exception as error:
    print(error)
"""


@pytest.mark.longer
@pytest.mark.distributed
def test_a_class_that_is_in_no_file_goes_to_workers(tmp_path: Path) -> None:
    """This is the case in a notebook, where workers cannot run the cells again."""
    root = Path(__file__).parents[2]
    settings = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-"], input=PROGRAM, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "trained\n" in done.stdout
    assert "stopped\n" in done.stdout

    assert "own error\n" in done.stdout
    assert done.stdout.endswith(
        "error: lock (which Locked.compute_loss uses), a lock, cannot be sent to workers: "
        "cannot pickle '_thread.lock' object\n"
        "  where  fit(workers=…)\n"
        "  help   make it in the hook that needs it (build_data, build_model …), which runs in each worker\n"
    )
    assert "results" in done.stdout  # the output of the workers
    assert "step 10/10" in done.stderr
    assert list(tmp_path.iterdir()) == []


PREFERENCES = "--task preference --micro-batch-size 4 --eval-interval 3 --device cpu --no-keep-best --lr 2e-2"
REFERENCES = {"copy": "", "adapters": "--lora-rank 2", "average": "--ema-decay 0.5"}
LOSSES = {"dpo": pairs, "ipo": pairs, "kto": judged}
LAYOUTS = {
    "pipeline": "--pipeline-model-parallel-size 2",
    "replicas": "",
    "tensor": "--tensor-model-parallel-size 2",
    "context": "--context-parallel-size 2",
}


def trained(flags: list[str], *more: str, workers: int | None = None) -> tuple[Trainer, dict[str, Any]]:
    job = Trainer([*flags, *PREFERENCES.split(), *(word for words_ in more for word in words_.split())])
    return job, job.fit(workers=workers)


def assert_same(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "way"), few([("dpo", "copy")], itertools.product(LOSSES, REFERENCES)))
def test_rows_are_measured_against_the_reference(loss: str, way: str, gpt_folder: Path, tmp_path: Path) -> None:
    if way == "adapters":
        pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
    rows = LOSSES[loss]()
    job, summary = trained(make(tmp_path, gpt_folder, rows), f"--preference-loss {loss}", REFERENCES[way], "--no-save")
    wanted = {name: value for name, value in summary["metrics"].items() if name.startswith(("eval_", "rewards"))}
    assert abs(wanted["rewards/chosen"]) > 1e-3, "the model is not its own reference any more"
    assert_same(job.evaluate(), wanted)
    assert_same(job.evaluate(rows[:5]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "is_kept"), by_default([("copy", True)], [("copy", True), ("average", False)]))
def test_a_reference_that_was_computed_once(
    way: str, is_kept: bool, gpt_folder: Path, tmp_path: Path, says: Says
) -> None:
    place = f"--save {tmp_path / 'run'}" if is_kept else "--no-save"
    job, summary = trained(make(tmp_path, gpt_folder, pairs()), REFERENCES[way], "--precompute-reference", place)
    assert abs(summary["metrics"]["rewards/chosen"]) > 1e-3
    assert_same(job.evaluate(), summary["metrics"])
    with says(DataError):
        job.evaluate(pairs()[:5])


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default([], LAYOUTS))
def test_a_model_that_workers_have_divided_is_whole_afterwards(layout: str, gpt_folder: Path, tmp_path: Path) -> None:
    rows = pairs()
    flags = make(tmp_path, gpt_folder, rows, layers=4)
    once = "--precompute-reference" if layout == "pipeline" else ""
    job, summary = trained(flags, LAYOUTS[layout], once, "--no-save --micro-batch-size 2", workers=2)
    assert_same(job.evaluate(), summary["metrics"])
    assert abs(summary["metrics"]["rewards/chosen"]) > 1e-3
    assert isinstance(job.model, torch.nn.Module)
    if not once:
        assert_same(job.evaluate(rows[:5]), summary["metrics"])


@pytest.mark.slow
def test_rows_of_a_decoder_that_does_not_shift_labels(gpt_folder: Path, tmp_path: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(gpt_folder), tmp_path / "model"
    torch.manual_seed(0)
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    config = BartConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
    BartForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows = [{"text": words(3 + i % 9, i)} for i in range(12)]
    for part, of_part in (("train", rows), ("valid", rows[:5])):
        write_jsonl(tmp_path / f"{part}.jsonl", of_part)
    flags = "--task causal_lm --train-iters 2 --lr 1e-2 --micro-batch-size 4 --no-save --seq-length 32 --device cpu"
    job = Trainer([*flags.split(), "--data-dir", str(tmp_path), "--pretrained-model-name-or-path", str(model)])
    metrics = job.fit()["metrics"]
    assert_same(job.evaluate(rows[:5]), metrics)


def untrained(folder: Path, tokenizer: Path, model: str) -> Trainer:
    flags = f"{model} --no-save --seq-length 32 --device cpu --epochs 1 --lr 1 --data-dir {folder}"
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    return Trainer([*flags.split(), *sizes, f"--tokenizer-path={tokenizer}"])


def test_tables_in_memory_are_rows(bert_folder: Path, tmp_path: Path, says: Says) -> None:
    """A Dataset, which names its labels, and a DataFrame give the numbers of the same rows in a list."""
    rows = [{"text": words(3 + i % 5, i), "label": "yes" if i % 3 else "no"} for i in range(8)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    job = untrained(tmp_path, bert_folder, "--task sequence_classification --model-type bert")
    wanted = job.evaluate(rows)
    names = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no"])})
    tables = [datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows, features=names), pd.DataFrame(rows)]
    for table in tables:
        assert job.evaluate(table) == wanted
        texts = table.drop(columns="label") if isinstance(table, pd.DataFrame) else table
        assert job.predict(texts) == job.predict(rows)
    for wrong in (datasets.DatasetDict(train=tables[0]), pd.DataFrame([*rows, {"text": "a"}])):
        with says(DataError):
            job.evaluate(wrong)
    with says(ConfigError):
        job.predict(rows, batch_size=0)


def test_messages_are_one_conversation(gpt_folder: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": words(6, i)} for i in range(4)])
    job = untrained(tmp_path, gpt_folder, "--task causal_lm --model-type gpt2")
    messages = [{"role": "user", "content": "the cat"}]
    (wanted,) = job.predict([{"messages": messages}], max_new_tokens=4)
    assert job.predict(messages, max_new_tokens=4) == wanted
    assert job.predict([messages], max_new_tokens=4) == [wanted]
    assert job.predict(messages[0], max_new_tokens=4) == wanted
    assert job.predict("the cat", max_new_tokens=4) != wanted
