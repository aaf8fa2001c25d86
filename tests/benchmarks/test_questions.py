"""What the commands of the benchmarks measure and write. No test checks how long anything took."""

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import (
    loops,
    moe,
    overhead,
    packing,
    padding,
    preprocess,
    reading,
    saving,
    small_gpt,
    streaming,
    texts,
)  # fmt: skip
from benchmarks.__main__ import main
from benchmarks.contest import why_absent
from benchmarks.overhead import CONTENDERS, OURS, PACKAGES, measure_overhead
from benchmarks.preprocess import FAST, PLAIN, SAME, Place
from benchmarks.saving import DISK, PAST_CACHE, Stalls, State
from benchmarks.small_gpt import FUSED, WHOLE
from rapidformer_templates.errors import RapidformerError
from tests.support.demo import needs_packages

Ask = Callable[..., tuple[Any, str]]
CONTROL, *_ = CONTENDERS


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Ask a question. Returns the results in its file, and what it has printed. There is a picture, too."""

    def ask(words: str) -> tuple[Any, str]:
        question, *flags = words.split()
        assert main([question, *flags, "--output", str(tmp_path)]) == 0
        assert (tmp_path / f"{question}.png").stat().st_size > 0
        return json.loads((tmp_path / f"{question}.json").read_text()), capsys.readouterr().out

    return ask


def _smaller(monkeypatch: pytest.MonkeyPatch, module: Any, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)


def test_a_mixture_beside_a_dense_model(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    _smaller(monkeypatch, small_gpt, HELD_OUT=8)
    _smaller(monkeypatch, moe, BYTES=100_000, SHAPE={"tokens": 64, "hidden": 16, "width": 32})
    result, shown = ask("moe --steps 12 --rounds 2")
    dense, sparse = result["ways"]
    gates = moe.LAYERS * moe.EXPERTS * moe.HIDDEN
    biases = moe.LAYERS * moe.HIDDEN * (moe.TOP_K - 1)
    assert dense["parameters"] == dense["active"] == sparse["active"] - gates - biases
    assert sparse["parameters"] > 2 * dense["parameters"]
    assert max(dense["loss"], sparse["loss"]) < 5.5  # ln 256 = 5.55
    assert 0 <= sparse["load"]["min"] < 1 < sparse["load"]["max"] < 16
    assert min(result["grouped_over"].values()) > 0
    assert "expert load within a factor of 2" in shown


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_loop_does_the_work_of_the_plain_one(name: str) -> None:
    """``measure_overhead`` compares the losses after its warm-up."""
    if reason := why_absent(*PACKAGES.get(name, ("torch", "torch"))):
        pytest.skip(reason)
    (row,) = measure_overhead(rounds=2, steps=3, contenders={name: CONTENDERS[name]})
    assert row["name"] == name
    assert row["step_ms"] > 0
    assert row["low_ms"] <= row["extra_ms"] <= row["high_ms"]


def _lazy(step_done: Any, job: Any) -> None:
    step_done.begin()
    for _ in itertools.count():
        step_done(1.0)


def test_a_loop_that_does_less_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loops.LOOPS, "lazy", _lazy)
    monkeypatch.setattr(overhead, "WARMUP", 2)
    with pytest.raises(RapidformerError, match="they do different work"):
        measure_overhead(rounds=1, steps=1, contenders={"lazy": "lazy"})


def test_the_overhead_of_loops(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (CONTROL, OURS, overhead.FABRIC)
    absent = {overhead.FABRIC: ("no_such_module", "lightning-fabric")}
    _smaller(monkeypatch, overhead, CONTENDERS={name: CONTENDERS[name] for name in names}, PACKAGES=absent)
    result, shown = ask("overhead --rounds 1 --steps 1")
    assert [row["name"] for row in result["loops"]] == [CONTROL, OURS]
    assert result["absent"] == {"Lightning Fabric": "lightning-fabric is not installed (pip install lightning-fabric)"}
    assert {"python", "torch"} <= result["versions"].keys()
    assert "absent: Lightning Fabric" in shown


def test_packed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    positions = packing.make_batch(4096)["position_ids"]
    begins = positions == 0
    assert positions[:, 0].tolist() == [0, 0]
    assert torch.equal(positions.diff(dim=1) == 1, ~begins[:, 1:])
    assert 60 < positions.numel() / int(begins.sum()) < 140
    monkeypatch.setattr(packing, "run_in_workers", lambda *arguments: [1.0])  # it would start separate processes
    assert main(["packing", "--rounds", "1", "--tokens", "128", "--output", str(tmp_path)]) == 0
    ways = json.loads((tmp_path / "packing.json").read_text())["ways"]
    assert [way["name"] for way in ways] == list(packing.WAYS)
    assert ways[0]["over_mask"] == 1
    assert "a mask of the row" in capsys.readouterr().out


@pytest.fixture
def unequal(monkeypatch: pytest.MonkeyPatch) -> Any:
    whole = padding.docstrings
    _smaller(monkeypatch, padding, LONGEST=256, ROWS=4, BUDGET=1024, WARMUP=1)
    monkeypatch.setattr(padding, "docstrings", lambda longest: whole(longest, 600))
    return padding.docstrings(256)


def test_every_way_to_pad_has_the_budget_and_the_whole_text(unequal: Any) -> None:
    assert (len(unequal), unequal.lengths.max()) == (600, 256)
    assert len(np.unique(unequal.lengths)) > 100
    bytes(unequal[0]["input_ids"].astype(np.uint8)).decode()
    fills = {}
    for name, way in padding.ways(unequal.lengths).items():
        contender = padding.Contender(unequal, *way())
        shapes, fills[name] = contender.epoch()
        assert all(rows * length <= 1024 for rows, length in shapes)
        steps = range(contender.order.steps_per_epoch)
        assert sorted(i for step in steps for i in contender.order.step(step)[0]) == list(range(600))
        contender.advance(2)
        assert contender.useful[-1] == sum(unequal.lengths[contender.order.step(step)[0]].sum() for step in range(2))
    assert fills[padding.MAXIMUM] == pytest.approx(unequal.lengths.sum() / (150 * 1024)) == fills["1 shape"]
    rising = [fills[name] for name in ("1 shape", "2 shapes", "4 shapes", "8 shapes", "16 shapes", padding.UNCAPPED)]
    assert rising == sorted(rising)
    assert fills[padding.RANDOM] < min(fills[padding.GROUPED], fills[padding.UNCAPPED])


def test_ways_to_pad(unequal: Any, ask: Ask) -> None:
    result, shown = ask("padding --rounds 1 --steps 1")
    assert [row["name"] for row in result["ways"]] == list(padding.ways(unequal.lengths))
    assert all(row["tokens_per_second"] > 0 for row in result["ways"])
    shapes = {row["name"]: row["shapes"] for row in result["ways"]}
    assert all(shapes[f"{cap} shapes"] <= cap for cap in (2, 4, 8, 16))
    assert "goal: without a cap a fill of 0.97" in shown


@needs_packages
@pytest.mark.exhaustive
def test_the_demo_beside_transformers(ask: Ask) -> None:
    assert "× transformers, dynamic padding; goal 1.4 ×" in ask("peers --repeats 1 --train 96 --held-out 16")[1]


absent = [name for name in ("megatron", "gigatoken") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")
def test_preprocessing(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "SMALL", 0.2)
    result, shown = ask("preprocess --megabytes 0.3 --repeats 1 --workers 1")
    names = [PLAIN, SAME, FAST]
    assert list(result["seconds"]) == list(result["ratios"]) == names
    assert result["ratios"][PLAIN] == [1, 1]
    assert 20_000 < result["tokens"] < 200_000
    assert all(result["seconds"][name][0] > 0.1 for name in names)
    assert list(result["peak_memory_bytes"]) == [SAME, FAST]
    for memory in result["peak_memory_bytes"].values():
        assert list(memory) == ["0.2", "0.3"]
        assert min(memory.values()) > 2e7
    assert "all wrote the same .bin and .idx files, byte for byte" in shown


def test_who_makes_other_files_or_fails_is_found_out(tmp_path: Path) -> None:
    place = Place(tmp_path, {}, 1)
    for name, end in itertools.product((PLAIN, SAME), ("bin", "idx")):
        Path(f"{place.output(name)}.{end}").write_bytes(b"same")
    preprocess._refuse_differences(place, [PLAIN, SAME])
    Path(f"{place.output(SAME)}.idx").write_bytes(b"other")
    with pytest.raises(RapidformerError, match=r"wrote different \.idx files"):
        preprocess._refuse_differences(place, [PLAIN, SAME])
    for run in (preprocess._run, preprocess._peak_memory):
        with pytest.raises(RapidformerError, match="a command failed"):
            run([sys.executable, "-c", "raise SystemExit('no')"])


def test_readers(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    _smaller(monkeypatch, reading, BATCHES=1, DOCUMENTS=50)
    result, shown = ask("reading --repeats 2 --megatokens 6 --samples 4000")
    samples, documents = result["contests"]
    assert (samples["what"], samples["count"]) == (reading.SAMPLES, reading.BATCH)
    assert (documents["what"], documents["count"]) == ("random documents", 50)
    assert {reading.OURS, reading.LIMIT} <= samples["seconds"].keys()
    assert all(len(seconds) == 2 for contest in (samples, documents) for seconds in contest["seconds"].values())
    assert min(result["first_batch"]["anonymous_mb"]) > 0
    assert "first batch of 4,000 samples" in shown


def test_ways_to_save(ask: Ask, tmp_path: Path) -> None:
    result, shown = ask(f"saving --gigabytes 0.004 --repeats 2 --folder {tmp_path}/disk")
    ours = [saving.OURS, saving.OURS_ASYNC]
    names = [DISK, PAST_CACHE, *ours, "torch.save", "torch.distributed.checkpoint", "safetensors"]
    assert list(result["seconds"]) == list(result["ratios"]) == names
    assert all(len(row) == 2 and min(row) > 0 for row in (*result["seconds"].values(), *result["ratios"].values()))
    assert result["ratios"][DISK] == [1, 1]
    assert min(result["stall_seconds_first"], *result["stall_seconds"], *result["copy_seconds"]) > 0
    assert 3e6 < result["bytes"] < 5e6
    assert list((tmp_path / "disk").iterdir()) == []
    assert "× the disk's own write + fsync (median); goal 0.85 ×" in shown


def test_who_writes_less_is_found_out_and_a_stall_is_compared_with_its_copy(tmp_path: Path) -> None:
    with pytest.raises(RapidformerError, match=r"lazy wrote 1 of \d+ bytes, so it does different work"):
        saving._timed(tmp_path / "lazy", lambda path: (path / "file").write_bytes(b"x"), State(0.004))
    stalls = Stalls(None, None)  # type: ignore[arg-type]
    stalls.steps, stalls.copies = [0.3, 0.2], [0.2, 0.2]
    assert stalls.ratios() == pytest.approx([1.5, 1.0])


@pytest.mark.distributed
def test_a_worker_holds_its_share(tmp_path: Path) -> None:
    words = "setup-memory --width 64 --blocks 2 --engines ddp,fsdp --weights pretrained --json"
    assert main([*words.split(), str(tmp_path / "f.json")]) == 0
    whole, share = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert share["share"] == pytest.approx(whole["share"] / 4, rel=0.01)
    assert whole["largest"] == 32_000 * 64 * 4  # an embedding


def test_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").mkdir()
    streaming.make_text(tmp_path / "text", 1.2)
    files = list((tmp_path / "text").glob("*.jsonl"))
    assert sum(file.stat().st_size for file in files) == pytest.approx(1.2e6, rel=0.02)
    words = f"streaming --megabytes 0.2 --folder {tmp_path} --json {tmp_path}/f.json"
    assert main(words.split()) == 0
    result = json.loads((tmp_path / "f.json").read_text())
    tokens = {row["way"]: row["tokens"] for row in result["rows"]}
    assert list(tokens) == list(streaming.TASKS)
    whole = tokens[streaming.WHOLE]
    assert whole > 20_000
    # A pass ends with its last full batch. Windows also count the ends of texts.
    assert [tokens[way] for way in (streaming.STREAMED, streaming.WINDOWS)] == pytest.approx([whole] * 2, rel=0.02)
    assert "the peak grows to 1.00 × (goal 1.3 ×): reached" in capsys.readouterr().out
    assert streaming.STREAMED in result["growth"]


@pytest.fixture
def ways(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Ask about ways to train a small model on few texts. Returns the rows by name."""
    _smaller(monkeypatch, small_gpt, HELD_OUT=8, docstrings=lambda longest: texts.docstrings(longest, 300))
    sizes = "--steps 12 --layers 1 --hidden 64"
    return lambda question: {row["name"]: row for row in ask(f"{question} {sizes}")[0]["ways"]}


def test_ways_to_keep_weights(ways: Any) -> None:
    rows = ways("precision")
    kinds = {name: (row["weights"], row["gradients"], row["optimizer"]) for name, row in rows.items()}
    assert kinds.pop("fp32") == kinds.pop("bf16, fp32 weights kept") == kinds.pop("fp16, fp32 weights kept")
    norms = 5 * 64 * 2 / (256 * 64 + 128 * 64 + 12 * 64**2 + 13 * 64 + 2 * 64)  # their share; they stay fp32
    for name, (weights, gradients, optimizer) in kinds.items():
        assert weights == pytest.approx(2 + 2 * norms, rel=0.01), name
        assert gradients == pytest.approx(weights if "gradients in bf16" in name else 4, rel=0.01), name
        assert optimizer == pytest.approx(12 - 4 * norms, rel=0.01), name
    assert all(row["loss_ratio"] == pytest.approx(1, abs=0.01) for row in rows.values())
    assert len({row["loss"] for row in rows.values()}) > 3  # the runs differ


def test_optimizers(ways: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_gpt, "available", lambda: (["adamw_torch_fused", "adamw_anyprecision", "muon"], ["one"]))
    rows = ways("optimizers")
    assert rows["adamw_torch_fused"]["optimizer"] == pytest.approx(8, abs=0.01)
    assert rows["adamw_anyprecision"]["optimizer"] == pytest.approx(4, abs=0.01)
    assert 4 < rows["muon"]["optimizer"] < 8
    assert rows["adamw_torch_fused"]["loss_ratio"] == 1.0
    assert all(row["loss"] < 5.5 for row in rows.values())  # ln 256 = 5.55


def test_adapters_beside_the_whole_model(ways: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
    names = (WHOLE, "LoRA", "QLoRA, int4")
    monkeypatch.setattr(small_gpt, "ADAPTERS", {name: small_gpt.ADAPTERS[name] for name in names})
    whole, lora, four = ways("adapters").values()
    assert whole["trained"] == whole["parameters"] == lora["parameters"] - lora["trained"]
    assert lora["trained"] == four["trained"] < whole["trained"]
    assert four["held_mb"] < lora["held_mb"] < whole["held_mb"]
    assert all(2 < row["loss"] < 5.5 for row in (whole, lora, four))


def test_fused_loss_needs_less_and_loses_nothing(ask: Ask) -> None:
    result, _ = ask("fused-loss --vocabulary 5003 --hidden 64 --layers 1 --steps 1")
    rows = {row["name"]: row for row in result["ways"]}
    plain = rows[small_gpt.PLAIN]
    assert rows[FUSED]["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    # The planner counts 8 bytes per word of a token, for its log probability and the gradient. A logit may add 4 more.
    predicted = result["predicted_saving_mb"]
    assert predicted <= plain["peak_mb"] - rows[FUSED]["peak_mb"] <= 1.5 * predicted
