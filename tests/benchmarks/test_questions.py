"""The commands of the benchmarks answer their questions at a small size. No test checks how long anything took."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loops, overhead, saving, small_gpt, texts
from benchmarks.__main__ import main
from benchmarks.overhead import measure_overhead
from benchmarks.saving import State
from benchmarks.small_gpt import WHOLE
from rapidformer_templates.errors import RapidformerError
from tests.support.demo import needs_packages

SIZES = "--steps 12 --layers 1 --hidden 64"
QUESTIONS = {
    "adapters": SIZES,
    "fp8": f"{SIZES} --turns 1 --length 64",
    "fused-loss": "--vocabulary 5003 --hidden 64 --layers 1 --steps 1",
    "moe": "--steps 12 --rounds 2",
    "optimizers": SIZES,
    "overhead": "--rounds 1 --steps 1",
    "packing": "--rounds 1 --tokens 128",
    "padding": "--rounds 1 --steps 1",
    "precision": SIZES,
    "reading": "--repeats 2 --megatokens 6 --samples 4000",
    "ring": "--longest 1024 --rounds 1",
    "saving": "--gigabytes 0.004 --repeats 2 --folder {folder}",
    "setup-memory": "--width 64 --blocks 2 --engines fsdp --weights pretrained",
    "streaming": "--megabytes 0.2 --folder {folder}",
}
"""Flags that make each question small."""

SMALLER = {
    "moe.BYTES": 100_000,
    "moe.SHAPE": {"tokens": 64, "hidden": 16, "width": 32},
    "packing.run_in_workers": lambda *arguments: [1.0],  # it would start separate processes
    "padding.BUDGET": 1024,
    "padding.LONGEST": 256,
    "padding.ROWS": 4,
    "padding.WARMUP": 1,
    "padding.docstrings": lambda longest: texts.docstrings(longest, 600),
    "reading.BATCHES": 1,
    "reading.DOCUMENTS": 50,
    "small_gpt.ADAPTERS": {name: small_gpt.ADAPTERS[name] for name in (WHOLE, "LoRA", "QLoRA, int4")},
    "small_gpt.HELD_OUT": 8,
    "small_gpt.available": lambda: (["adamw_torch_fused", "adamw_anyprecision", "muon"], ["one"]),
    "small_gpt.docstrings": lambda longest: texts.docstrings(longest, 300),
}
"""Values that make the questions small, by the attribute of a module that they replace."""


@pytest.mark.distributed
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered(
    question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if question == "fp8":
        pytest.importorskip("torchao", reason="needs torchao: pip install 'rapidformer_templates[torchao]'")
    if question == "adapters":
        pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
    for name, value in SMALLER.items():
        monkeypatch.setattr(f"benchmarks.{name}", value)
    words = QUESTIONS[question].format(folder=tmp_path)
    assert main([question, *words.split(), "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / f"{question}.json").read_text())
    assert len(capsys.readouterr().out.splitlines()) > 2


def _lazy(step_done: Any, job: Any) -> None:
    step_done.begin()
    for _ in itertools.count():
        step_done(1.0)


def test_a_small_model_reads_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_gpt, "docstrings", lambda longest: texts.docstrings(longest, 20))
    assert small_gpt.docstring_rows().min() > 0  # each element is a character, and not a byte of a wider number


def test_a_loop_that_does_less_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loops.LOOPS, "lazy", _lazy)
    monkeypatch.setattr(overhead, "WARMUP", 2)
    with pytest.raises(RapidformerError, match="they do different work"):
        measure_overhead(rounds=1, steps=1, contenders={"lazy": "lazy"})


def test_who_writes_less_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(RapidformerError, match=r"lazy wrote 1 of \d+ bytes, so it does different work"):
        saving._timed(tmp_path / "lazy", lambda path: (path / "file").write_bytes(b"x"), State(0.004))


@needs_packages
@pytest.mark.exhaustive
def test_the_demo_beside_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--repeats", "1", "--train", "96", "--held-out", "16", "--output", str(tmp_path)]) == 0
    assert "× transformers, dynamic padding; goal 1.4 ×" in capsys.readouterr().out
