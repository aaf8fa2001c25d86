"""16-bit weights with fp32 masters: compared with a loop by hand, under each layout, and in checkpoints."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from rapidformer_templates.data.order import SampleOrder
from rapidformer_templates.engines.parallel import engine
from rapidformer_templates.engines.parallel.replicas import ShardedGradients, TrainedParameter, sum_rows_in_fp32
from rapidformer_templates.errors import RapidformerError
from tests.support.jobs import CausalJob, _pad, _sequences
from tests.support.parallel_jobs import resumed, train_all
from tests.support.parity import reference, train, trained, weights_apart
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

STEPS = "--train-iters 4 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
BF16, FP16, KEPT = "--mixed-precision bf16", "--mixed-precision fp16", "--keep-fp32-parameters"
DISTRIBUTED, PIPELINE = "--use-distributed-optimizer", "--pipeline-model-parallel-size"
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}
"""Rounding of the formats, with 8 and 11 bits of mantissa."""

TWO = {
    "ddp": f"{BF16} --micro-batch-size 4",
    "ddp-accumulated": f"{BF16} --micro-batch-size 2",
    "ddp-sums-in-bf16": f"{BF16} --micro-batch-size 2 --grad-accum-dtype bf16 --grad-reduce-dtype bf16",
    "distributed": f"{BF16} --micro-batch-size 4 {DISTRIBUTED}",
    "distributed-accumulated": f"{FP16} --micro-batch-size 1 {DISTRIBUTED} --checkpoint-activations",
    "pipeline": f"{BF16} --micro-batch-size 2 {PIPELINE} 2",
}
"""Layouts of two workers. tests/engines/parallel/test_engine.py has some of four."""
SHORT = ("distributed-accumulated",)
RESUMED = "--train-iters 5 --global-batch-size 8 --clip-grad 0.1 --lr 1e-3 --no-export-model"
CHAIN = (
    (f"--micro-batch-size 4 {BF16}", 2),
    (f"--micro-batch-size 2 {BF16} {DISTRIBUTED} --resume", 3),
    (f"--micro-batch-size 4 {BF16} {KEPT} --resume", 4),
    (f"--micro-batch-size 4 {BF16} {PIPELINE} 2 --resume", None),
)
"""A run that dies and continues in another layout, and with the other way to keep its weights."""


def _train_all(workers: Any, layouts: list[str]) -> dict[str, Any]:
    cases = {name: ("gpt2-4-tied", False, f"{STEPS} {TWO[name]}") for name in layouts}
    with mock.patch.object(engine, "bucket_size_for", return_value=700):
        return train_all(workers, cases)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Any]:
    """All layouts, trained by one group of workers. Windows have 700 elements: they are many and cross parameters."""
    return run_in_workers(2, _train_all, selected(request, "layout"))[0]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default(SHORT, TWO))
def test_layouts_follow_one_process_within_the_rounding_of_the_format(layout: str, runs: Any) -> None:
    kind = "fp16" if FP16 in TWO[layout] else "bf16"
    found = runs[layout]
    wanted = reference("gpt2-4-tied", False, f"{STEPS} --micro-batch-size 2 --mixed-precision {kind}")
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(wanted["curve"]), rtol=ROUNDING[kind], atol=0)
    # Adam divides a gradient by its own magnitude, so a gradient near zero shows its rounding in full.
    assert weights_apart(found["weights"], wanted["weights"]) < 5e-3
    assert found["summary"]["receipts"]["parameter_dtypes"] == wanted["summary"]["receipts"]["parameter_dtypes"]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default(SHORT, [name for name in TWO if name != "pipeline"]))
def test_gradients_leave_while_the_backward_is_at_work(layout: str, runs: Any) -> None:
    exchange = runs[layout]["summary"]["receipts"]["gradient_exchange"]
    assert exchange["windows"] > 10
    assert exchange["sent_in_backward"] == exchange["windows"]


@pytest.mark.distributed
@pytest.mark.longer
def test_a_run_goes_on_with_either_way_to_keep_weights(tmp_path: Path) -> None:
    run = "gpt2-4-tied", str(tmp_path), f"{RESUMED} --save-interval 1"
    alone = reference(run[0], False, f"{RESUMED} --micro-batch-size 8 {BF16}", lr=None)
    found, wanted = torch.tensor(run_in_workers(2, resumed, *run, CHAIN)[0]), torch.tensor(alone["curve"])
    assert found.shape == wanted.shape == (5, 2)
    torch.testing.assert_close(found, wanted, rtol=3 * ROUNDING["bf16"], atol=0)


def _in_fp32(table: nn.Embedding) -> Any:
    return lambda ids: nn.functional.embedding(ids, table.weight.float()).to(table.weight.dtype)


@pytest.mark.parametrize("padding", [None, 1])
def test_rows_of_a_table_are_summed_in_fp32(padding: int | None) -> None:
    """torch's own CPU kernel reaches 4 of 10 here."""
    table = nn.Embedding(5, 8, padding_idx=padding, dtype=torch.bfloat16)
    ids = torch.arange(4096).reshape(4, 1024) % 4
    exact = nn.Embedding(5, 8, padding_idx=padding)
    (exact(ids).sum() * 0.01).backward()
    sum_rows_in_fp32(table)
    found = table(ids)
    assert torch.equal(found, nn.functional.embedding(ids, table.weight))
    (found.float().sum() * 0.01).backward()
    torch.testing.assert_close(table.weight.grad.float(), exact.weight.grad, rtol=2**-7, atol=0)


def test_what_hooks_make_of_the_rows_of_a_table_stays() -> None:
    table = nn.Embedding(5, 8).bfloat16()
    table.register_forward_hook(lambda module, inputs, output: output * 2)  # like noise on embeddings
    sum_rows_in_fp32(table)
    ids = torch.arange(4096).reshape(4, 1024) % 4
    for found in (table(ids), table(input=ids)):
        assert torch.equal(found, 2 * nn.functional.embedding(ids, table.weight))
        table.weight.grad = None
        (found.float().sum() * 0.01).backward()
        assert table.weight.grad is not None
        torch.testing.assert_close(table.weight.grad[0, 0].float(), torch.tensor(20.48), rtol=2**-7, atol=0)


class Pruned(CausalJob):
    """A user's hook masks weights after each step."""

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        with torch.no_grad():
            self.model.transformer.wte.weight[::2] = 0


def _pruned(workers: Any) -> Any:
    flags = f"{STEPS} --micro-batch-size 4 {BF16} {DISTRIBUTED}" if workers else f"{STEPS} --micro-batch-size 8 {BF16}"
    return trained(Pruned([*flags.split(), "--lr", "1e-3"]))


@pytest.mark.distributed
def test_what_a_hook_sets_of_the_weights_stays_set() -> None:
    alone = _pruned(None)
    shared = run_in_workers(2, _pruned)[0]
    for found in (alone, shared):
        table = found["weights"]["transformer.wte.weight"]
        assert not table[::2].any()
        assert table[1::2].all()
    torch.testing.assert_close(torch.tensor(shared["curve"]), torch.tensor(alone["curve"]), rtol=2**-7, atol=0)


def _broken_off(workers: Any) -> list[list[torch.Tensor]]:
    """Return a step's summed gradients, without and with an earlier step whose backward fails in the first layer."""
    found = []
    for breaks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        trained = [TrainedParameter(name, parameter) for name, parameter in model.named_parameters()]
        shards = ShardedGradients(trained, workers, shards="gradients", tied={}, bucket_size=64)
        if breaks:
            hook = model[0].weight.register_hook(lambda gradient: 1 / 0)
            shards.begin_backward(last=True)
            with pytest.raises(ZeroDivisionError):
                model(torch.full((1, 8), 3.0)).sum().backward()
            shards.drop()
            hook.remove()
        shards.begin_backward(last=True)
        model(torch.ones(1, 8)).sum().backward()
        shards.end_backward()
        shards.reduce()
        found.append([gradient.clone() for gradient in shards.gradients()])
    return found


@pytest.mark.distributed
def test_gradients_that_an_error_leaves_on_their_way_are_forgotten() -> None:
    for wanted, got in run_in_workers(2, _broken_off):
        assert len(got) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_it_is_a_loop_by_hand() -> None:
    """Plain torch: a 16-bit model, its gradients in fp32, AdamW over fp32 copies."""
    found = train("causal", False, f"{STEPS} --micro-batch-size 4 {BF16}")
    torch.manual_seed(1234)
    model = CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make().train()
    model.transformer.wte.forward = _in_fp32(model.transformer.wte)  # gradients of rows are summed in fp32
    model.transformer.wpe.forward = _in_fp32(model.transformer.wpe)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    for parameter in (p for name, p in model.named_parameters() if ".ln_" not in name):
        parameter.data = parameter.data.bfloat16()
    decayed, rest = [m for m in masters if m.ndim >= 2], [m for m in masters if m.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    samples = _sequences()
    order, curve = SampleOrder(len(samples), 8, 1234, by_epochs=False), []
    for step in range(4):
        rows = [samples[index] for index in order.step(step)[0]]
        batches = [_pad(rows[first : first + 4], classes=False) for first in (0, 4)]
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        gradients, loss = [torch.zeros_like(m) for m in masters], 0.0
        for batch, count in zip(batches, counts, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                share = model(**batch).loss * count / sum(counts) if count else None
            if share is None:
                continue
            model.zero_grad()
            share.backward()
            loss += share.item()
            for total, parameter in zip(gradients, model.parameters(), strict=True):
                total += parameter.grad
        norm = torch.nn.utils.get_total_norm(gradients)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient * min(1.0, 0.1 / float(norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / 4)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        curve.append((loss, norm.item()))
    # A factor of the loss is rounded at another place here, which changes single bits of 16.
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(curve), rtol=1e-4, atol=0)
    other = train("causal", False, f"{STEPS} --micro-batch-size 4 {BF16} {KEPT}")
    assert (torch.tensor(other["curve"]) / torch.tensor(curve) - 1).abs().max() > 1e-3
    wanted = dict(zip((name for name, _ in model.named_parameters()), masters, strict=True))
    assert weights_apart(found["weights"], wanted) < 1e-4
    kept = [name for name, weight in found["weights"].items() if torch.equal(weight, weight.bfloat16().double())]
    assert not kept, "a checkpoint has the masters, which no format of 16 bits holds"


class Normalised(CausalJob):
    """Keeps running means of its inputs, which differ between workers."""

    def make(self) -> nn.Module:
        model = super().make()
        model.seen = self.seen = norm = nn.BatchNorm1d(16)
        model.transformer.drop.register_forward_hook(
            lambda module, inputs, output: (norm(output.detach().float().flatten(0, 1)), None)[1]
        )
        return model


def _running_means(workers: Any) -> list[torch.Tensor]:
    means = []
    for flags in (BF16, f"{BF16} {KEPT}"):
        job = Normalised([*STEPS.split(), "--lr", "1e-3", "--micro-batch-size", "4", *flags.split()])
        job.fit()
        means.append(job.seen.running_mean.clone())
    return means


@pytest.mark.longer
@pytest.mark.distributed
def test_running_means_are_those_of_the_first_worker_as_under_ddp() -> None:
    first, second = run_in_workers(2, _running_means)
    torch.testing.assert_close(second[0], first[0], rtol=0, atol=0)
    torch.testing.assert_close(first[0], first[1], rtol=ROUNDING["bf16"], atol=1e-3)


class ComesTwice(CausalJob):
    """Recomputes its blocks in nested backward passes. Each pass produces a gradient of the shared matrix."""

    def make(self) -> nn.Module:
        model = super().make()
        model.transformer.h[1].mlp.c_fc = model.transformer.h[0].mlp.c_fc
        for block in model.transformer.h:
            block.forward = _reentrant(block.forward)
        return model


def _reentrant(forward: Any) -> Any:
    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(lambda h: forward(h, *args, **kwargs), hidden, use_reentrant=True)

    return run


def _comes_twice(workers: Any) -> str:
    job = ComesTwice([*STEPS.split(), "--lr", "1e-3", "--micro-batch-size", "4", *BF16.split(), DISTRIBUTED])
    with (
        mock.patch.object(engine, "bucket_size_for", return_value=700),
        pytest.raises(RapidformerError, match="was ready twice in one backward") as refused,
    ):
        job.fit()
    return str(refused.value)


@pytest.mark.distributed
def test_a_gradient_that_comes_after_it_was_sent_is_no_silent_loss() -> None:
    messages = run_in_workers(2, _comes_twice)
    assert all("h.0.mlp.c_fc" in message and "use_reentrant=False" in message for message in messages)
