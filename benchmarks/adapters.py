"""``benchmarks adapters``: adapters, also on frozen weights in 8 and 4 bits, compared with training the whole model.

There are two jobs. One is the demo's classifier of tweets. The other is a small llama that first reads docstrings of
one part of Python's library, and then explains in a chat what the functions of the other part do. A turn is a whole run
with the black box's own template.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Group
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.contest import Advance, Answer, Columns, Contest, Flag, Row, asks, mean_sd, progress, table
from benchmarks.texts import documented
from rapidformer_templates.commands.demo import DATA_NAME, demo_model_folder, make_demo_data
from rapidformer_templates.finetuner import Finetuner
from rapidformer_templates.pretrainer import Pretrainer

FLAGS = (
    Flag("repeats", 1, "runs of each way, each with another seed"),
    Flag("train", 1000, "training tweets"),
    Flag("held-out", 500, "held-out tweets"),
    Flag("steps", 150, "of the llama before it is adapted"),
    Flag("talks", 600, "conversations, of which a sixth is held out"),
)

WHOLE = "the whole model"
LORA = "--lora-rank 16"
WAYS = {
    WHOLE: "",
    "LoRA": LORA,
    "DoRA": f"{LORA} --lora-variant dora",
    "QLoRA, int8": f"{LORA} --quantize-base int8",
    "QLoRA, int4": f"{LORA} --quantize-base int4",
    "QLoRA, nf4": f"{LORA} --quantize-base nf4",
}
"""Flags of each way. The rank of all adapters is 16."""
NEEDS_BITSANDBYTES = "QLoRA, nf4"
VOCABULARY, LENGTH, LONGEST = 2000, 128, 300
SIZES = "--model-type llama --num-layers 4 --hidden-size 192 --num-attention-heads 6 --dropout 0"
COMMON = f"--device cpu --log-interval 10 --seq-length {LENGTH}"


@dataclass
class Job:
    """A model that is adapted.

    Attributes:
        words: Its flags, without the learning rate.
        rates: Learning rates of the whole model and of adapters.
        metric: The metric on held-out data.
        figures: Results of each run, by way.
    """

    words: list[str]
    rates: tuple[float, float]
    metric: str
    figures: dict[str, list[Row]] = field(default_factory=dict)

    def turn(self, name: str) -> Callable[[], float]:
        """Return a function that trains in one way and returns the seconds of its steps."""
        rate = self.rates[0 if name == WHOLE else 1]

        def run() -> float:
            runs = self.figures.setdefault(name, [])
            with tempfile.TemporaryDirectory(prefix="rapidformer-adapters-") as folder:
                more = ["--lr", str(rate), "--seed", str(len(runs)), "--save", folder]
                runs.append(train([*self.words, *shlex.split(WAYS[name]), *more], Path(folder), self.metric))
            return float(runs[-1]["seconds"])

        return run


def train(words: list[str], folder: Path, metric: str, template: type = Finetuner) -> Row:
    """Train without output. Returns the results and the costs.

    The time is processor time, because the machine may be busy during one run and idle during another.
    """

    class Watched(template):
        def on_train_start(self) -> None:
            self.began = time.process_time()

        def on_step_end(self, step: int, result: Any) -> None:
            self.ended = time.process_time()

    run: Any = Watched(words)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        summary = run.fit()
    (held,) = summary["receipts"]["held_bytes_by_rank"]
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
    return {
        "value": summary["metrics"].get(metric),
        "seconds": run.ended - run.began,
        **{kind.removesuffix("_bytes"): held[kind] for kind in kinds},
        "held": sum(held[kind] for kind in kinds),
        "checkpoint": _size(max((folder / "checkpoints").iterdir())),
        "export": _size(folder / "export"),
    }


def _size(folder: Path) -> int:
    """Return the bytes of the weights and states in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def tweets(options: argparse.Namespace, folder: Path) -> Job:
    """Prepare the demo's job."""
    make_demo_data(folder, options.train, options.held_out)
    words = f"--task sequence_classification --pretrained-model-name-or-path {demo_model_folder()} --device cpu"
    more = f"--data-dir {folder} --data-name {DATA_NAME} --seq-length 64 --epochs 1 --micro-batch-size 16"
    return Job(shlex.split(f"{words} {more} --lr-warmup-fraction 0.1 --log-interval 10"), (2e-4, 1e-3), "accuracy")


def chat(options: argparse.Namespace, folder: Path) -> Job:
    """Prepare a llama that has read documentation, and conversations about other functions."""
    asked, read = [], []
    for number, (name, text) in enumerate(documented()):
        if number // 50 % 3 == 0:  # split by blocks of 50, so that neighbours in a file are on the same side
            asked.append((name, text.partition("\n\n")[0][:LONGEST]))
        else:
            read.append(text)
    asked = asked[:: max(1, len(asked) // options.talks)][: options.talks]
    _write(folder / "read.jsonl", ({"text": text} for text in read))
    talks = [
        {"messages": [{"role": "user", "content": f"What is {name}?"}, {"role": "assistant", "content": text}]}
        for name, text in asked
    ]
    held_out = len(talks) // 6
    _write(folder / "chat-valid.jsonl", talks[:held_out])
    _write(folder / "chat-train.jsonl", talks[held_out:])
    tokenizer = folder / "tokenizer"
    _tokenizer(read).save_pretrained(tokenizer)
    words = f"--task pretraining {SIZES} {COMMON} --tokenizer-type HuggingFaceTokenizer --tokenizer-path {tokenizer}"
    data = f"--data-path {folder}/read.jsonl --data-cache-dir {folder}/cache --split 98,2,0"
    steps = f"--train-iters {options.steps} --micro-batch-size 16 --lr 2e-3 --lr-warmup-fraction 0.05"
    run = folder / "read"
    train([*shlex.split(f"{words} {data} {steps}"), "--save", str(run)], run, "eval_loss", Pretrainer)
    shutil.rmtree(run / "checkpoints")
    adapted = f"--task causal_lm --pretrained-model-name-or-path {run}/export {COMMON} --data-dir {folder}"
    more = "--data-name chat --epochs 2 --micro-batch-size 16 --lr-warmup-fraction 0.1"
    return Job(shlex.split(f"{adapted} {more}"), (1e-3, 5e-3), "eval_loss")


def _write(file: Path, rows: Iterator[Mapping[str, Any]] | list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer on these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    end = "<|endoftext|>"
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def available() -> tuple[list[str], list[str]]:
    """Return the ways that can run here, and lines about the one that cannot."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        return list(WAYS), []
    why = f"{NEEDS_BITSANDBYTES} is absent: pip install bitsandbytes"
    return [name for name in WAYS if name != NEEDS_BITSANDBYTES], [why]


def measure(job: Job, options: argparse.Namespace, names: list[str], advance: Advance) -> list[Row]:
    """Run every way in turns. Returns a row for each."""
    contest = Contest({name: job.turn(name) for name in names})
    contest.run(options.repeats, advance=advance)
    rows = []
    for name in names:
        runs = job.figures[name]
        sizes = {
            key: runs[0][key] for key in ("parameter", "gradient", "optimizer_state", "held", "checkpoint", "export")
        }
        row = {"name": name, "values": [run["value"] for run in runs], "seconds": contest.seconds[name], **sizes}
        rows.append({**row, "value": mean(row["values"]), "time": contest.ratio(name, WHOLE) ** -1})
    return rows


def _megabytes(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key] / 1e6:,.1f}"


def _columns(heading: str) -> Columns:
    return {
        "trained": "{name}",
        heading: lambda row: mean_sd(row["values"], ".3f") if len(row["values"]) > 1 else f"{row['value']:.3f}",
        "CPU seconds": lambda row: f"{mean(row['seconds']):.0f}",
        "× full fine-tuning": "{time:.2f}",
        "weights MB": _megabytes("parameter"),
        "gradients MB": _megabytes("gradient"),
        "optimizer MB": _megabytes("optimizer_state"),
        "together": _megabytes("held"),
        "checkpoint MB": _megabytes("checkpoint"),
        "export MB": _megabytes("export"),
    }


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    names, absent = available()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="rapidformer-adapters-") as name,
        progress("adapters", 2 * options.repeats + 1) as advance,
    ):
        (Path(name) / "chat").mkdir()
        jobs = {"tweets": tweets(options, Path(name) / "tweets"), "chat": chat(options, Path(name) / "chat")}
        advance("a small llama")
        found = {kind: measure(job, options, names, advance) for kind, job in jobs.items()}
    first = table("MiniLM on tweets", found["tweets"], _columns("accuracy"))
    second = table("a small llama on conversations", found["chat"], _columns("held-out loss"))
    settings = {flag.name: getattr(options, flag.name.replace("-", "_")) for flag in FLAGS}
    rates = {kind: job.rates for kind, job in jobs.items()}
    return Answer({**settings, "rates": rates, **found}, Group(first, second), absent)
