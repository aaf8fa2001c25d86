"""Preference runs: splitting into batches or workers, and the way to get the reference, do not change any step."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification

from rapidformer_templates import Trainer
from rapidformer_templates.errors import CheckpointError, Refused
from tests.support.messages import Says
from tests.support.preference_runs import STEPS, Curve, curve_of, judged, make, pairs, run, run_all, scored
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.slow

LORA = ("--lora-rank", "2")
KINDS = ("dpo", "ipo", "orpo", "simpo", "kto", "kto of pairs", "reward", "numbers", "labels")
ENGINES: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("--fsdp-memory-optimization",),
    "zero-1": ("--zero-1-memory-optimization",),
    "zero-3": ("--zero-3-memory-optimization", "--zero-3-param-persistence-threshold", "40"),
    "oss": ("--oss-memory-optimization",),
    "tensor": ("--tensor-model-parallel-size", "2"),
}
"""Ways to divide the trained model and its frozen copy."""

STAGES = {"pipeline": ("--pipeline-model-parallel-size", "2", "--pipeline-stages", "1,1")}
"""An engine that cannot hold a copy."""

CLASSIFIES = ("--task", "sequence_classification", "--dropout", "0")

ONCE = ("--precompute-reference",)
CHECKED = ("zero-3", "pipeline")
"""Engines, of two different kinds, with which the log-probabilities are computed once."""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path) -> Mapping[str, list[str]]:
    folder = tmp_path_factory.mktemp("preferences")
    of_pairs = make(folder / "pairs", gpt_folder, pairs())
    of_judged = make(folder / "judged", gpt_folder, judged())
    return {
        **{loss: [*of_pairs, "--preference-loss", loss] for loss in ("dpo", "ipo", "orpo", "simpo")},
        "kto": [*of_judged, "--preference-loss", "kto"],
        "kto of pairs": [*of_pairs, "--preference-loss", "kto"],
        "reward": [*of_pairs, "--task", "reward"],
        "numbers": [*make(folder / "numbers", gpt_folder, scored(float)), *CLASSIFIES],
        "labels": [*make(folder / "labels", gpt_folder, scored(list)), *CLASSIFIES],
    }


def check_alike(curves: Mapping[str, Curve], wanted: Curve, tolerance: float = 2e-4) -> None:
    for name, curve in curves.items():
        assert len(curve) == len(wanted) == STEPS + 1, name
        for got, want in zip(curve, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=1e-5, err_msg=name)


def in_workers(count: int, runs: Mapping[str, Sequence[str]]) -> dict[str, Curve]:
    curves: dict[str, Curve] = run_in_workers(count, run_all, runs)[0]
    return curves


@pytest.fixture(scope="module")
def whole(flags: Mapping[str, list[str]]) -> Callable[[str], Curve]:
    """Return a function that trains a kind of run in one process, with one micro batch per step."""
    return cache(lambda kind: run([*flags[kind], "--micro-batch-size", "4"]))


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_micro_batches_agree(
    kind: str, flags: Mapping[str, list[str]], whole: Callable[[str], Curve]
) -> None:
    """Two workers, with two micro batches per step."""
    check_alike(in_workers(2, {kind: [*flags[kind], "--micro-batch-size", "1"]}), whole(kind))


RUNS = ENGINES | {f"{name}, once": (*(ENGINES | STAGES)[name], *ONCE) for name in CHECKED}


@pytest.mark.distributed
@pytest.mark.parametrize("name", by_default(["fsdp"], RUNS))
def test_every_engine_has_the_same_reference(
    name: str, flags: Mapping[str, list[str]], whole: Callable[[str], Curve], tmp_path: Path
) -> None:
    assert whole("dpo")[1][2] != 0  # by then the model differs from its reference
    given = [*flags["dpo"], "--micro-batch-size", "2", *RUNS[name], "--save", str(tmp_path / "run")]
    check_alike(in_workers(2, {name: given}), whole("dpo"))
    assert (tmp_path / "run" / "reference.safetensors").is_file() == ("once" in name)


@pytest.mark.longer
def test_a_model_without_its_adapters_is_the_reference(flags: Mapping[str, list[str]]) -> None:
    given = [*flags["dpo"], *LORA, "--micro-batch-size", "2"]
    wanted = run(given)
    assert wanted[1][2] != 0
    runs = {name: [*given, *more] for name, more in ENGINES.items() if name in ("fsdp", "zero-3", "tensor")}
    runs |= {f"{name}, once": [*given, *more, *ONCE] for name, more in STAGES.items()}
    check_alike(in_workers(2, runs), wanted)


class Dies(Trainer):
    """Ends after its third step, as if it were killed."""

    def on_step_end(self, step: int, result: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt


def test_a_run_goes_on_from_its_own_log_probabilities(gpt_folder: Path, tmp_path: Path, says: Says) -> None:
    given = make(tmp_path / "data", gpt_folder, judged())
    given += ["--preference-loss", "kto", "--train-iters", "5", "--micro-batch-size", "2", *ONCE]
    wanted = run([*given, "--dataloader-num-workers", "1"])
    half = [*given, "--task", "preference", "--save-interval", "2", "--save", str(tmp_path / "half")]
    with pytest.raises(KeyboardInterrupt):
        Dies(half).fit()
    reference, rows = tmp_path / "half" / "reference.safetensors", tmp_path / "data" / "train.jsonl"
    kept, text = reference.read_bytes(), rows.read_text(encoding="utf-8")
    rows.write_text(text.replace('"prompt": "', '"prompt": "a ', 1), encoding="utf-8")
    for more in ([], ["--allow-changed-data"]):
        with says(CheckpointError):
            Trainer([*half, "--resume", *more]).fit()
    rows.write_text(text, encoding="utf-8")
    reference.write_bytes(kept[:40])
    with pytest.raises(CheckpointError, match="the log-probabilities of the reference cannot be read"):
        Trainer([*half, "--resume"]).fit()
    reference.write_bytes(kept)
    Trainer([*half, "--resume"]).fit()
    np.testing.assert_array_equal(np.concatenate(curve_of(tmp_path / "half")), np.concatenate(wanted))


def test_loaded_adapters_are_the_reference_if_it_is_computed_once(gpt_folder: Path, tmp_path: Path) -> None:
    tuned = [*make(tmp_path / "answers", gpt_folder, judged()), *LORA, "--micro-batch-size", "2"]
    Trainer([*tuned, "--task", "causal_lm", "--save", str(tmp_path / "tuned")]).fit()
    given = [*make(tmp_path / "pairs", gpt_folder, pairs()), *LORA, "--micro-batch-size", "2", "--lora-dropout", "0"]
    given += ["--task", "preference", "--load", str(tmp_path / "tuned"), "--weights-only"]
    with pytest.raises(Refused, match="RF133"):
        Trainer(given).fit()
    Trainer([*given, *ONCE, "--save", str(tmp_path / "run")]).fit()
    loss, *_, chosen, rejected, _, _ = curve_of(tmp_path / "run")[0]
    assert loss == pytest.approx(math.log(2), rel=1e-6)
    # The reference was computed in other batches, whose padding rounds differently.
    assert [chosen, rejected] == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.longer
def test_a_loaded_run_keeps_its_reference(gpt_folder: Path, tmp_path: Path) -> None:
    """Job scripts pass --resume at every start, even before there is a checkpoint."""
    given = [*make(tmp_path / "pairs", gpt_folder, pairs()), "--task", "preference", "--micro-batch-size", "2", *ONCE]
    first, folder = str(tmp_path / "first"), tmp_path / "run"
    Trainer([*given, "--train-iters", "2", "--save", first]).fit()
    again = [*given, "--load", first, "--resume", "--train-iters", "6", "--save-interval", "1"]
    Trainer([*again, "--save", str(tmp_path / "whole")]).fit()
    with pytest.raises(KeyboardInterrupt):
        Dies([*again, "--save", str(folder), "--save-interval", "9"]).fit()
    with pytest.raises(KeyboardInterrupt):
        Dies([*again, "--save", str(folder)]).fit()
    Trainer([*again, "--save", str(folder)]).fit()
    assert curve_of(folder) == curve_of(tmp_path / "whole")
    Trainer([*given, "--train-iters", "6", "--save", str(tmp_path / "in one")]).fit()
    assert curve_of(folder) == curve_of(tmp_path / "in one")[2:]


@pytest.mark.longer
def test_what_a_run_leaves(flags: Mapping[str, list[str]], tmp_path: Path) -> None:
    for kind, field, value in (("reward", "num_labels", 1), ("numbers", "problem_type", "regression")):
        Trainer([*flags[kind], "--export-model", "--save", str(tmp_path / kind)]).fit()
        exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / kind / "export")
        assert getattr(exported.config, field) == value
