"""``kill -9`` during a run of adapters with an 8-bit frozen base, and the runs that resume from the disk."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rapidformer_templates import Finetuner
from rapidformer_templates.commands.main import main
from rapidformer_templates.run.folder import read_metrics
from tests.support.texts import WORDS, write_jsonl
from tests.support.worker_pool import run_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = [pytest.mark.longer, pytest.mark.distributed]

STEPS, KILLED_AFTER = 60, 8
TIMINGS = {"samples_per_second", "tokens_per_second", "step_ms", "peak_memory_mb"}
ONE, TWO = "--micro-batch-size 8", "--micro-batch-size 2 --oss-memory-optimization"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path) -> str:
    """The command line: conversations, and a small model that an earlier run has trained."""
    folder, draw = tmp_path_factory.mktemp("chat"), np.random.default_rng(3)
    talks = [
        [{"role": role, "content": " ".join(draw.choice(WORDS, 5))} for role in ("user", "assistant")]
        for _ in range(48)
    ]
    write_jsonl(folder / "chat-train.jsonl", [{"messages": talk} for talk in talks])
    common = (
        f"--task causal_lm --data-dir {folder} --data-name chat --validation-fraction 0 --device cpu --seq-length 64"
    )
    sizes = "--model-type gpt2 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --dropout 0"
    first = f"{sizes} --tokenizer-path {gpt_folder} --train-iters 3 --lr 1e-3 --micro-batch-size 8 --save {folder}/base"
    assert main([*common.split(), *first.split()]) == 0
    return (
        f"{common} --pretrained-model-name-or-path {folder}/base/export --lora-rank 4 --quantize-base int8"
        f" --train-iters {STEPS} --global-batch-size 8 --save-interval 4 --log-interval 1 --lr 1e-2"
    )


def _go_on(workers: Any, words: str) -> None:
    with mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        Finetuner(words.split()).fit()


def _lines(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in read_metrics(run / "metrics.jsonl")]


def _adapters(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export/adapter_model.safetensors")


def test_a_killed_run_goes_on_as_if_nothing_was(words: str, tmp_path: Path) -> None:
    assert main([*words.split(), *ONE.split(), "--save", str(tmp_path / "whole")]) == 0
    run, other = tmp_path / "run", tmp_path / "other"
    command = [sys.executable, "-m", "rapidformer_templates", *words.split(), *ONE.split(), "--save", str(run)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not (run / f"checkpoints/step-{KILLED_AFTER}").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (run / "summary.json").exists()
    shutil.copytree(run, other)
    assert main([*words.split(), *ONE.split(), "--save", str(run), "--resume"]) == 0
    assert _lines(run) == _lines(tmp_path / "whole")
    wanted, found = _adapters(tmp_path / "whole"), _adapters(run)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    # Two workers, each with the state of half of the adapters, resume from the same checkpoint.
    run_in_workers(2, _go_on, f"{words} {TWO} --save {other} --resume")
    losses, theirs = ([line["loss"] for line in _lines(folder)] for folder in (tmp_path / "whole", other))
    assert len(losses) == len(theirs) == STEPS
    assert theirs == pytest.approx(losses, rel=1e-3)
    assert theirs[: KILLED_AFTER + 8] == pytest.approx(losses[: KILLED_AFTER + 8], rel=1e-5)
    assert all(float(weight.abs().sum()) > 0 for weight in wanted.values())  # half of them start at zero
