"""The exact text of refusals."""

from __future__ import annotations

from pathlib import Path

from rapidformer_templates.planning.registry import REGISTRY
from tests.support.requests import CPU, GPUS, exactly, on, refusal


def test_a_script_is_told_to_change_its_base_class(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# my run\nlr: 3e-5\nzero-3-memory-optimization: true\n")
    place = on(GPUS, template="Finetuner", template_origin="train.py:8")
    assert refusal(f"--config {tmp_path / 'run.yaml'}", place, REGISTRY) == exactly(
        """
        error[RF002]: zero-3 needs the Trainer template
          why    ZeRO partitions through DeepSpeed, which owns the optimizer step (Rapidformer parameter reference)
          asked  --zero-3-memory-optimization (run.yaml:3), template Finetuner (train.py:8)
          works  class MyTask(Trainer)       your hooks stay unchanged
            or   --fsdp-memory-optimization  shards the same three states
          more   rapidformer explain RF002
        """
    )


def test_a_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
    assert refusal("--micro-batch-size 4 --global-batch-size 20", CPU) == exactly(
        """
        error[RF030]: global batch size 20 is not divisible by micro batch 4 × data-parallel size 2; \
the nearest that work: 16 and 24
          why    an optimizer step is a whole number of micro batches on every worker (Rapidformer parameter reference)
          asked  --global-batch-size 20 (command line), --micro-batch-size 4 (command line), data-parallel size 2
          works  --global-batch-size 16  2 × 8 samples per step
            or   --global-batch-size 24  3 × 8 samples per step
          more   rapidformer explain RF030
        """
    )


def test_a_missing_package_is_told_with_what_to_install() -> None:
    assert refusal("--optimizer adamw_torch_8bit", on(GPUS, packages={})) == exactly(
        """
        error[RF023]: adamw_torch_8bit needs torchao, which is not installed: pip install 'rapidformer_templates[torchao]'
          why    nothing else is used instead, and a switch that cannot act is refused (this library)
          asked  --optimizer adamw_torch_8bit (command line)
          works  --optimizer adamw
          more   rapidformer explain RF023
        """  # noqa: E501 - a message
    )


def test_groups_that_do_not_divide_the_workers_name_the_nearest_that_do() -> None:
    assert refusal("--fsdp-memory-optimization --fsdp-shard-size 6", GPUS) == exactly(
        """
        error[RF225]: 8 workers cannot be divided into groups of 6
          why    every group shares one copy of the states, and all groups are equal; if each worker had its own \
copy, it would be plain data parallelism (torch)
          asked  --fsdp-shard-size 6 (command line), 8 workers in all
          works  --fsdp-shard-size 4
          more   rapidformer explain RF225
        """
    )


def test_accumulation_by_epochs() -> None:
    flags = "--lr 5e-5 --epochs 3 --micro-batch-size 4 --global-batch-size 16 --no-save"
    assert refusal(flags, CPU, training=True) == exactly(
        """
        error[RF006]: gradient accumulation (2 micro batches per step) needs --train-iters, not --epochs
          why    an epoch need not hold a whole number of accumulated steps (Rapidformer parameter reference)
          asked  --micro-batch-size 4 (command line), --global-batch-size 16 (command line), --epochs 3 (command line)
          works  rapidformer --lr 5e-05 --micro-batch-size 4 --global-batch-size 16 --no-save \
--train-iters 3epochs  # in place of --epochs 3
            or   --micro-batch-size 8   the same global batch in one forward
            or   --global-batch-size 8  no accumulation
          more   rapidformer explain RF006
        """
    )


def test_two_partitionings_and_a_switch_that_needs_another() -> None:
    assert refusal("--nvme-path /d --oss-memory-optimization", GPUS, REGISTRY) == exactly(
        """
        error[RF011]: nvme-offload needs --zero-3-memory-optimization
          why    DeepSpeed swaps to disk only what ZeRO-3 has partitioned (DeepSpeed guide of Transformers)
          asked  --nvme-path /d (command line)
          works  without --nvme-path
            or   --zero-3-memory-optimization without --oss-memory-optimization
          more   rapidformer explain RF011
        """
    )
