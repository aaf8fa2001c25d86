"""Recomputation equals a run without it, bit for bit, in every engine, and keeps no more than the receipts say."""

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from rapidformer_templates.engines.forwards import Checkpointed
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages
from rapidformer_templates.switches.checkpoint_activations.transform import checkpoint_activations
from tests.support.jobs import VOCABULARY, DeepJob
from tests.support.messages import Says
from tests.support.model_shapes import MODELS, batch
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

STEPS = "--train-iters 3 --global-batch-size 8 --log-interval 1 --lr 1e-2"
SELECTIVE = "--recompute-granularity selective"
ENGINES = {
    "fsdp": "--micro-batch-size 4 --fsdp-memory-optimization",
    "sequence": "--micro-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--micro-batch-size 2 --pipeline-model-parallel-size 2",
    "ddp": "--micro-batch-size 2",
}
"""The covering table recomputes under all engines, and in compiled blocks."""


class Watched(DeepJob):
    """Records the shape of the first micro batch, and which blocks recompute."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.tokens = getattr(self, "tokens", batch["input_ids"].numel())
        return super().compute_loss(model, batch)

    def on_train_start(self) -> None:
        self.again = [isinstance(block.forward, Checkpointed) for block in self.model.transformer.h]


class Dropping(Watched):
    """Has dropout in every part of a block."""

    def make(self) -> torch.nn.Module:
        sizes = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=self.layers, n_head=2)
        return GPT2LMHeadModel(sizes)


def run(flags: str, job: type[Watched] = Watched) -> dict[str, Any]:
    made = job([*f"{STEPS} {flags}".split()])
    summary = made.fit()
    receipts = summary["receipts"]
    return {"curve": made.curve, "receipts": receipts, "tokens": made.tokens, "again": made.again}


@pytest.mark.slow
@pytest.mark.parametrize("precision", by_default(["--mixed-precision bf16"], ["", "--mixed-precision bf16"]))
def test_dropout_draws_the_same_masks(precision: str) -> None:
    curves = [run(f"--micro-batch-size 4 {precision} {how}", Dropping)["curve"] for how in ("", SELECTIVE)]
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_what_is_kept_beside_the_inputs_are_the_products_with_weights() -> None:
    """Per block of GPT-2: three widths of keys, queries and values, one, four of the feed-forward, and one."""
    full, selective, some = (
        run(f"--micro-batch-size 8 {how}")
        for how in ("--recompute-granularity full", "--recompute-activations", f"{SELECTIVE} --recompute-num-layers 3")
    )
    assert full["curve"] == selective["curve"] == some["curve"]
    kept = {name: found["receipts"]["saved_tensor_bytes"] for name, found in (("full", full), ("selective", selective))}
    layers, width = Watched.layers, 16
    assert kept["selective"] - kept["full"] == layers * full["tokens"] * 9 * width * 4
    whole = selective["receipts"]["saved_tensor_bytes_without"]
    a_block = (whole - kept["selective"]) // layers
    assert a_block > 0
    assert some["receipts"]["saved_tensor_bytes"] == pytest.approx(kept["selective"] + (layers - 3) * a_block, rel=0.02)
    assert some["again"] == [True] * 3 + [False] * (layers - 3)


class Overwriting(Watched):
    """Writes into a product without torch's knowledge, as a collective does."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda module, args, output: output.data.mul_(1.5))
        return model


@pytest.mark.parametrize("selective", [False, True])
def test_copies_of_weights_by_autocast_go_with_their_block(selective: bool) -> None:
    """The backward makes its own copies, block by block. The head's copy stays."""
    model = MODELS["llama"](5)
    blocks = find_blocks(model).values()
    for block in blocks:
        block.forward = Checkpointed(block.forward, selective=selective)

    def alive() -> int:
        with LiveStorages([*model.parameters(), *model.buffers()]) as live, torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch(2)).loss
            held = live.live
        loss.backward()
        model.zero_grad()
        return held

    without = alive()
    with mock.patch("torch.clear_autocast_cache"):
        kept = alive()
    assert kept - without == sum(2 * p.numel() for block in blocks for p in block.parameters() if p.ndim == 2)


@pytest.mark.slow
def test_a_product_that_is_written_over_is_told(says: Says) -> None:
    assert run("--micro-batch-size 8 --recompute-granularity full", Overwriting)
    with says(ModelError):
        run(f"--micro-batch-size 8 {SELECTIVE}", Overwriting)


def _engine(workers: Any, name: str) -> dict[str, Any]:
    return run(f"{ENGINES[name]} {SELECTIVE}")


@pytest.mark.distributed
@pytest.mark.parametrize("name", by_default(["pipeline"], ENGINES))
def test_every_engine_trains_as_one_process_does(name: str) -> None:
    wanted = run("--micro-batch-size 8")["curve"]
    found = run_in_workers(2, _engine, name)[0]
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(wanted), rtol=1e-4, atol=1e-5)
    assert found["receipts"]["saved_tensor_bytes"] < found["receipts"]["saved_tensor_bytes_without"]


def test_a_cache_of_keys_and_values_is_refused(says: Says) -> None:
    """xlm passes one to its layers in training, too. A recomputed forward would extend it again."""
    block = Checkpointed(lambda hidden, cache=None: hidden * 2)
    hidden = torch.ones(2, requires_grad=True)
    with says(ModelError):
        block(hidden, cache=DynamicCache())
    with torch.no_grad():
        block(hidden, cache=DynamicCache())


@pytest.mark.parametrize("selective", [False, True])
def test_batch_norms_count_each_batch_once(selective: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh())
    again = copy.deepcopy(plain)
    assembly: Any = SimpleNamespace(require_blocks=lambda user, flag: {"": again})
    granularity = "selective" if selective else "full"
    building: Any = SimpleNamespace(
        options=SimpleNamespace(recompute_granularity=granularity, recompute_num_layers=None)
    )
    checkpoint_activations(assembly, building)
    for step in range(3):
        for model in (plain, again):
            torch.manual_seed(step)
            sum(model(torch.randn(5, 4)).square().sum() for _ in range(2)).backward()
    for (name, value), (_, expected) in zip(again.state_dict().items(), plain.state_dict().items(), strict=True):
        assert torch.equal(value, expected), name
    for mine, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert int(again[1].num_batches_tracked) == 6
