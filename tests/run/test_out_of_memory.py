"""A model that does not fit, the text of the error, and the ladder of ways to use less memory."""

import json
import os
import re
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
from tests.support.messages import Says

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


FULL = "--checkpoint-activations --mixed-precision bf16"
SHARDS = "--nproc-per-node 6 --fsdp-memory-optimization --fsdp-shard-size"
ZERO_2, ZERO_3, OFFLOAD = "--zero-2-memory-optimization", "--zero-3-memory-optimization", "--cpu-offload"
LADDER = (
    "--micro-batch-size 8 --global-batch-size 16", "--epochs 2 --global-batch-size 16", "", "--recompute-activations",
    "--checkpoint-activations", FULL, f"{FULL} --oss-memory-optimization", f"{FULL} {ZERO_2}",
    f"{FULL} {ZERO_2} {OFFLOAD}", f"{FULL} {ZERO_3}", f"{FULL} {ZERO_3} {OFFLOAD}", f"{FULL} {ZERO_3} --nvme-path d",
    f"{FULL} {SHARDS} 2", f"{FULL} {SHARDS} 6", f"{FULL} {SHARDS} 6 --no-fsdp-reduce-every-micro-batch",
    f"{FULL} {SHARDS} 6 --no-fsdp-reshard-after-forward", f"{FULL} --lora-rank 8",
)  # fmt: skip
"""Flags of runs. The test writes what is suggested next."""


@pytest.mark.longer
def test_the_ladder(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    for packages, runs in (({"deepspeed": "0.19", "fairscale": "0.4", "peft": "0.19"}, LADDER), ({}, (FULL,))):
        monkeypatch.setattr("rapidformer_templates.planning.environment.installed_packages", lambda p=packages: p)
        for flags in runs:
            length = [] if "--epochs" in flags else ["--train-iters", "4"]
            job = CausalJob(["--nproc-per-node", "2", *flags.split(), *length, "--lr", "1e-3"])
            plan = resolve_plan(CausalJob, job.config)
            told = next_step(job.config, plan, lambda config: resolve_plan(CausalJob, config))
            says.text(f"{flags or 'nothing'} → {told}")


HUGE = 400 * 2**40
"""Bytes that no process can address."""


ERRORS = {
    "python": MemoryError(),
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"),
    "other": RuntimeError("shapes differ"),
}


def _fails_while_building(error: str) -> CausalJob:
    """Return a job whose model does not fit: a real allocation, or the error of a kind of allocator."""

    class Job(CausalJob):
        def build_model(self) -> torch.nn.Module:
            if error == "real":
                torch.empty(HUGE, dtype=torch.uint8)
            raise ERRORS[error]

    return Job(["--train-iters", "2", "--lr", "0.1", "--no-save", "--device", "cpu"])


@pytest.mark.parametrize("error", ["real", "python", "device"])
def test_memory_that_runs_out_while_the_model_is_built(error: str, says: Says) -> None:
    with pytest.raises(OutOfMemory) as caught:
        _fails_while_building(error).fit()
    told = caught.value.render()
    assert (f"you tried to allocate {HUGE} bytes" in told) == (error == "real")
    says.text(re.sub(r"\[enforce fail.*", "…", told), HOST=gethostname())
    assert len(told.splitlines()) == 3
    assert OutOfMemory.exit_status == 1


def test_other_errors_while_building_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"):
        _fails_while_building("other").fit()


def test_huge_sizes_are_out_of_memory(gpt_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text\n" + "some words\n" * 20)
    words = f"--task causal_lm --model-type gpt2 --num-layers 1 --hidden-size 20000000000000 --num-attention-heads 2 \
        --tokenizer-path {gpt_folder} --data-dir {tmp_path} --lr 1e-3 --epochs 1 --no-save --device cpu"
    assert main(words.split()) == 1
    told = capsys.readouterr().err.partition(f"\nerror: worker 0 on {gethostname()} is out of memory: ")[2]
    assert "can't allocate memory" in told
    assert "\n  where  while the model is built" in told


def test_weights_that_do_not_fit_are_not_called_damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = CausalJob([]).make()
    model.save_pretrained(tmp_path)

    def fail(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    config = parse(["--pretrained-model-name-or-path", str(tmp_path)], REGISTRY.options())
    with pytest.raises(OutOfMemory, match="out of memory: MemoryError"), explained_without_plan("here", "help"):
        build_model(config, "AutoModelForCausalLM", tokenizer=object())  # type: ignore[arg-type]
