"""A resume notices samples that are not those of its checkpoint, from every source, and continues if asked."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rapidformer_templates import Data, Pretrainer, Trainer
from rapidformer_templates.data.fingerprints import checksum
from rapidformer_templates.errors import CheckpointError
from tests.support.jobs import CausalJob
from tests.support.messages import Says
from tests.support.selection import by_default
from tests.support.texts import WORDS, write_jsonl

STEPS = (
    "--model-type gpt2 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --device cpu --lr 1e-3 --seq-length 32"
    " --micro-batch-size 2 --no-export-model --train-iters"
)
TUNING = "--task causal_lm --validation-fraction 0"
SOURCES = {
    "files": f"{TUNING} --data-dir {{0}} --data-name a",
    "packed": f"{TUNING} --data-dir {{0}} --data-name a --pack-sequences",
    "mixture": f"{TUNING} --data-dir {{0}} --data-name",
    "stream": f"{TUNING} --data-dir {{0}} --data-name a --streaming",
    "corpus": "--task pretraining --data-path {0}/a.jsonl --split 1,0,0",
    "streamed corpus": "--task pretraining --data-path {0}/a.jsonl --streaming",
}
LAST_WORD = {"mixture": ["1 a 3 b"]}
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
@pytest.mark.parametrize("source", by_default(["mixture", "stream", "corpus"], SOURCES))
def test_other_rows_of_equal_size(
    source: str, gpt_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, template = tmp_path / "data", Pretrainer if "corpus" in source else Trainer
    data.mkdir()
    flags = [*SOURCES[source].format(data).split(), *LAST_WORD.get(source, []), "--tokenizer-path", str(gpt_folder)]
    flags += ["--save", str(tmp_path / "run"), *STEPS.split()]
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
    flags = [*f"{TUNING} --data-dir {tmp_path} --data-name chat --save {tmp_path}/run {STEPS}".split()]
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


@pytest.mark.parametrize("where", by_default(["collate", "count", "random"], ["samples", "collate", "count", "random"]))
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
