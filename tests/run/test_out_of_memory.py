"""A model that does not fit, the text of the error, and the ladder of ways to use less memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from socket import gethostname

import pytest
import torch
import transformers

from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import OutOfMemory
from rapidformer_templates.models.loading import build_model
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run.configure import resolve_plan
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.run.out_of_memory import explained_without_plan, next_step
from tests.support.jobs import CausalJob
from tests.support.machine import why_no_nvme

SCRIPT = Path(__file__).parents[1] / "support/scripts/large_model.py"
CAP = 1900 * 2**20
"""Bytes of private memory per worker: more than ZeRO-3 with offload needs on 4 workers, and less than DDP needs."""


def run(folder: Path, workers: int, *flags: str) -> subprocess.CompletedProcess[str]:
    def cap() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (CAP, CAP))

    where = ["--nproc-per-node", str(workers), "--save", str(folder), "--no-export-model"]
    command = [sys.executable, str(SCRIPT), *where, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, preexec_fn=cap, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="a process's data is limited on Linux only")
def test_plain_training_says_what_to_do_when_memory_runs_out(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", 2)
    assert ended.returncode == 1
    assert "is out of memory: " in ended.stderr
    assert "where  checkpoint-activations → optimizer on 2 workers" in ended.stderr
    assert "help   the next step that saves memory: --mixed-precision bf16" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.exhaustive
@pytest.mark.distributed
@pytest.mark.deepspeed
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_zero_3_trains_it_in_the_same_memory(place: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
    if place == "nvme" and (why := why_no_nvme()):
        pytest.skip(why)
    zero = {"stage3_max_live_parameters": 10_000_000, "stage3_prefetch_bucket_size": 1_000_000}
    if place == "nvme":
        zero |= {"offload_param": {"buffer_size": 4_000_000}, "sub_group_size": 5_000_000}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, **zero}}))
    flags = ["--cpu-offload"] if place == "cpu" else ["--nvme-path", str(tmp_path / "disk")]
    ended = run(tmp_path / "run", 4, "--deepspeed-config", str(tmp_path / "ds.json"), *flags)
    assert ended.returncode == 0, ended.stderr
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2
    told = json.loads((tmp_path / "run" / "deepspeed.json").read_text())
    assert told["zero_optimization"]["stage3_max_live_parameters"] == 10_000_000


LADDER = [  # (configuration that runs, next suggestion)
    ("--micro-batch-size 8 --global-batch-size 16", "--micro-batch-size 1 --global-batch-size 16"),
    ("", "--checkpoint-activations"),
    ("--recompute-activations", "--recompute-granularity full"),
    ("--checkpoint-activations", "--mixed-precision bf16"),
    ("--checkpoint-activations --mixed-precision bf16", "--zero-2-memory-optimization"),
    (
        "--checkpoint-activations --mixed-precision bf16 --oss-memory-optimization",
        "--zero-2-memory-optimization in place of --oss-memory-optimization",
    ),
    (
        "--checkpoint-activations --mixed-precision bf16 --zero-2-memory-optimization",
        "--cpu-offload",
    ),
    (
        "--checkpoint-activations --mixed-precision bf16 --zero-2-memory-optimization --cpu-offload",
        "--zero-3-memory-optimization in place of --zero-2-memory-optimization --cpu-offload",
    ),
    ("--checkpoint-activations --mixed-precision bf16 --zero-3-memory-optimization", "--cpu-offload"),
    (
        "--checkpoint-activations --mixed-precision bf16 --zero-3-memory-optimization --cpu-offload",
        "--nvme-path DIR in place of --cpu-offload",
    ),
    ("--checkpoint-activations --mixed-precision bf16 --zero-3-memory-optimization --nvme-path d", None),
]


@pytest.mark.parametrize(("flags", "said"), LADDER, ids=lambda x: x if isinstance(x, str) else "")
def test_the_ladder(flags: str, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"deepspeed": "0.19", "fairscale": "0.4"}
    monkeypatch.setattr("rapidformer_templates.planning.environment.installed_packages", lambda: packages)
    job = CausalJob([*flags.split(), "--nproc-per-node", "2", "--train-iters", "4", "--lr", "1e-3"])
    plan = resolve_plan(type(job), job.config)
    assert next_step(job.config, plan, lambda config: resolve_plan(type(job), config)) == said


def test_a_run_by_epochs_gets_its_passes_in_iterations() -> None:
    job = CausalJob(["--epochs", "2", "--global-batch-size", "16", "--nproc-per-node", "2", "--lr", "1e-3"])
    plan = resolve_plan(type(job), job.config)
    assert plan.sizes.micro_batch == 8
    expected = "--micro-batch-size 1 --global-batch-size 16 --train-iters 2epochs in place of --epochs"
    assert next_step(job.config, plan, lambda config: resolve_plan(type(job), config)) == expected


def test_without_deepspeed_the_ladder_leads_to_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapidformer_templates.planning.environment.installed_packages", dict)
    flags = "--checkpoint-activations --mixed-precision bf16 --nproc-per-node 2 --train-iters 4 --lr 1e-3"
    job = CausalJob(flags.split())
    plan = resolve_plan(type(job), job.config)
    assert next_step(job.config, plan, lambda c: resolve_plan(type(job), c)) == "--fsdp-memory-optimization"


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (2, "--fsdp-shard-size 3"),
        (3, "--fsdp-shard-size 6"),
        (6, "--zero-3-memory-optimization in place of --fsdp-memory-optimization --fsdp-shard-size"),
    ],
)
def test_groups_grow_before_another_engine_is_named(size: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"deepspeed": "0.19"}
    monkeypatch.setattr("rapidformer_templates.planning.environment.installed_packages", lambda: packages)
    flags = "--checkpoint-activations --mixed-precision bf16 --nproc-per-node 6 --train-iters 4 --lr 1e-3"
    job = CausalJob([*flags.split(), "--fsdp-memory-optimization", "--fsdp-shard-size", str(size)])
    plan = resolve_plan(type(job), job.config)
    assert next_step(job.config, plan, lambda c: resolve_plan(type(job), c)) == said


HUGE = 400 * 2**40
"""Bytes that no process can address."""


def _fails_while_building(error: str) -> CausalJob:
    """Return a job whose model does not fit: a real allocation, or the error of a kind of allocator."""

    class Job(CausalJob):
        def build_model(self) -> torch.nn.Module:
            if error == "real":
                torch.empty(HUGE, dtype=torch.uint8)
            raise {"python": MemoryError(), "device": torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")}[error]

    return Job(["--train-iters", "2", "--lr", "0.1", "--no-save", "--device", "cpu"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("real", "can't allocate memory: you tried to allocate 439804651110400 bytes"),
        ("python", f"worker 0 on {gethostname()} is out of memory: MemoryError"),
        ("device", f"worker 0 on {gethostname()} is out of memory: CUDA out of memory. Tried"),
    ],
)
def test_memory_that_runs_out_while_the_model_is_built(error: str, message: str) -> None:
    with pytest.raises(OutOfMemory) as caught:
        _fails_while_building(error).fit()
    lines = caught.value.render().splitlines()
    assert len(lines) == 3
    assert message in lines[0]
    assert lines[1] == "  where  while the model is built, optimizer on 1 worker"
    assert "fewer workers per machine" in lines[2]
    assert caught.value.exit_status == 1


def test_other_errors_while_building_stay_what_they_are() -> None:
    class Job(CausalJob):
        def build_model(self) -> torch.nn.Module:
            raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        Job(["--train-iters", "2", "--lr", "0.1", "--no-save", "--device", "cpu"]).fit()


def test_a_model_of_huge_sizes_is_out_of_memory_and_not_a_wrong_size(
    gpt_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "train.csv").write_text("text\n" + "some words\n" * 20)
    words = f"--task causal_lm --model-type gpt2 --num-layers 1 --hidden-size 20000000000000 --num-attention-heads 2 \
        --tokenizer-path {gpt_folder} --data-dir {tmp_path} --lr 1e-3 --epochs 1 --no-save --device cpu"
    assert main(words.split()) == 1
    lines = capsys.readouterr().err.splitlines()
    start = next(
        i for i, line in enumerate(lines) if line.startswith(f"error: worker 0 on {gethostname()} is out of memory: ")
    )
    assert "can't allocate memory" in lines[start]
    assert lines[start + 1].startswith("  where  while the model is built")


def test_weights_that_do_not_fit_are_not_called_damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = CausalJob([]).make()
    model.save_pretrained(tmp_path)

    def fail(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    config = parse(["--pretrained-model-name-or-path", str(tmp_path)], REGISTRY.options())
    with pytest.raises(OutOfMemory, match="out of memory: MemoryError"), explained_without_plan("here", "help"):
        build_model(config, "AutoModelForCausalLM", tokenizer=object())  # type: ignore[arg-type]
