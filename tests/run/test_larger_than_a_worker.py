"""A pretrained model whose fp32 weights alone exceed the memory of a worker: built, trained and exported in parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rapidformer_templates.commands.main import main
from rapidformer_templates.run.folder import read_metrics
from tests.support.scripts.larger_than_a_worker import samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="a process's data is limited on Linux only"),
]

SCRIPT = Path(__file__).parents[1] / "support/scripts/larger_than_a_worker.py"
LAYOUTS = {
    "fsdp": "--fsdp-memory-optimization --micro-batch-size 1",
    "2 × 2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 335 million parameters in bf16."""
    path = tmp_path_factory.mktemp("pretrained")
    words = {f"w{number}": number for number in range(7990)} | {"<unk>": 7990, "<pad>": 7991}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>").save_pretrained(path)
    sizes = {"hidden_size": 1280, "num_hidden_layers": 16, "num_attention_heads": 20, "intermediate_size": 3413}
    config = LlamaConfig(**sizes, vocab_size=8000, max_position_embeddings=512)
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def _bytes_of_file(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def _train(folder: Path, workers: int, flags: str, save: Path) -> subprocess.CompletedProcess[str]:
    """Train with 95 % of the bytes of the fp32 weights for each worker, libraries included."""
    # The mapped file also counts as data of the process, although its pages belong to the system.
    limit = int(0.95 * 2 * _bytes_of_file(folder)) + _bytes_of_file(folder)
    command = [sys.executable, str(SCRIPT), str(limit), "--pretrained-model-name-or-path", str(folder)]
    command += ["--nproc-per-node", str(workers), "--save", str(save), *flags.split()]
    return subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )


@pytest.mark.parametrize(
    "layout", [pytest.param("fsdp", marks=pytest.mark.exhaustive), pytest.param("2 × 2", marks=pytest.mark.longer)]
)
def test_four_workers_train_and_export_it(layout: str, folder: Path, tmp_path: Path) -> None:
    ended = _train(folder, 4, LAYOUTS[layout], tmp_path / "run")
    assert ended.returncode == 0, ended.stderr[-2000:]
    (evaluation,) = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "eval_loss" in line]
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "run/export", dtype=torch.float32).eval()
    tokens = torch.stack([sample["input_ids"] for sample in samples()])
    with torch.no_grad():
        loss = float(exported(input_ids=tokens, labels=tokens).loss)
    assert evaluation["eval_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.longer
def test_one_worker_cannot_build_it(folder: Path, tmp_path: Path) -> None:
    ended = _train(folder, 1, "--micro-batch-size 4", tmp_path / "run")
    assert ended.returncode == 1
    assert "while the model is built" in ended.stderr
    assert "each worker builds the whole model: fewer workers per machine, a smaller model, or --fsdp" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.longer
def test_the_planner_refuses_one_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", f"{0.95 * 2 * _bytes_of_file(folder) / 1e9:.5f}")
    monkeypatch.setenv("COLUMNS", "200")
    flags = f"--pretrained-model-name-or-path {folder} --seq-length 16 --micro-batch-size 1 --lr 1e-4 --task causal_lm"
    main(["plan", "--auto-strategy", "--world-size", "1", "--device", "cuda", *flags.split()])
    assert "memory: 7.1 GB per worker of 1.27332 GB" in capsys.readouterr().out
