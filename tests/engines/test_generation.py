"""Text generation with parameters that are sharded over the workers, in unequal numbers of forwards."""

import json
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates import Finetuner, Trainer
from rapidformer_templates.commands.demo import demo_model_folder
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

SHARDED = {"fsdp": "--fsdp-memory-optimization", "zero-3": "--zero-3-memory-optimization"}
FLAGS = (
    "--task seq2seq_lm --model-type t5 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
    " --micro-batch-size 2 --train-iters 2 --lr 1e-3 --data-name pairs --eval-interval 2 --no-save"
)


def _evaluate(workers: Any, folder: str, sharded: str) -> dict[str, Any]:
    metrics = {}
    for name, switch in {"plain": "", sharded: SHARDED[sharded]}.items():
        base = Trainer if name == "zero-3" else Finetuner
        given = f"{FLAGS} --tokenizer-path {demo_model_folder()} --data-dir {folder} {switch}"

        def read_outputs(self: Any, outputs: Any, batch: Any) -> Any:
            self.task.longest_target = 2 + 6 * workers.rank  # the second worker continues alone
            return super(type(self), self).read_outputs(outputs, batch)

        job = type("Job", (base,), {"read_outputs": read_outputs})(given.split())
        metrics[name] = job.fit()["metrics"]
    return metrics


@pytest.mark.parametrize("sharded", by_default(["fsdp"], SHARDED))
def test_all_workers_generate_to_the_end(sharded: str, tmp_path: Path) -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lines = [json.dumps({"source": f"say {word}", "target": f"{word} and {word}"}) for word in words]
    for part in ("train", "valid"):
        (tmp_path / f"pairs-{part}.jsonl").write_text("\n".join(lines) + "\n")
    metrics = run_in_workers(2, _evaluate, str(tmp_path), sharded)[0]
    assert metrics[sharded] == pytest.approx(metrics["plain"], rel=1e-4)
    assert "rouge_l" in metrics[sharded]
