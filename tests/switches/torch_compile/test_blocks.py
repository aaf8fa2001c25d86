"""Compiled blocks have the numbers of plain eager ones, in one process and in divided models, and few graphs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from transformers.loss.loss_utils import ForCausalLMLoss

from rapidformer_templates.engines import collectives
from rapidformer_templates.engines.collectives import copy_all_to_region
from rapidformer_templates.switches.torch_compile.transform import AUTOMATIC, EVALUATION, CompiledLoss
from tests.support import compiled_jobs as _jobs  # noqa: F401 - registers them
from tests.support import parity
from tests.support.compiled_jobs import train_exactly
from tests.support.messages import Says
from tests.support.parity import assert_close, assert_follows, observed, reference, train
from tests.support.selection import by_default
from tests.support.worker_pool import Failure, outcomes_in_workers, run_in_workers

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

STEPS = "--train-iters 6 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1"
ONE = f"{STEPS} --micro-batch-size 8"
LIMITED = f"{ONE} --train-iters 20"
"""Enough steps for the limit of recompilations."""
COMPILED = "--torch-compile aot_eager"


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    """Restore the compiler's settings, which belong to the process."""
    settings = torch._dynamo.config
    names = ("optimize_ddp", "recompile_limit", "skip_fwd_side_effects_in_bwd_under_checkpoint")
    with settings.patch(**{name: getattr(settings, name) for name in names}):
        yield
    torch.compiler.reset()


def _report(run: Any) -> Any:
    return run["summary"]["receipts"]["compile"]


@pytest.mark.parametrize("job", by_default(["even-llama"], ["even-causal", "even-masked", "even-llama"]))
def test_steps_are_those_of_plain_eager(job: str) -> None:
    expected = reference(job, False, ONE)
    run = train(job, False, f"{ONE} {COMPILED}")
    assert_follows(run, expected, atol=2e-6)
    report = _report(run)
    assert report.pop("seconds") > 0
    # Two blocks share one graph. The loss of transformers has one, too. The class of "even-masked" has its own loss.
    assert report == {
        "backend": "aot_eager",
        "regions": 2,
        "limit": AUTOMATIC,
        "graphs": 1 + (job != "even-masked"),
        "graph_breaks": {},
        "recompilations": {},
        "not_compiled": {},
    }


def test_inductor_computes_the_same() -> None:
    run = train("even-causal", False, f"{ONE} --torch-compile")
    assert_follows(run, reference("even-causal", False, ONE), atol=2e-6)
    assert (_report(run)["backend"], _report(run)["graphs"]) == ("inductor", 2)


@pytest.mark.longer
def test_a_compiled_loss_keeps_no_logits_in_fp32() -> None:
    logits, words = torch.randn(2, 64, 1000, dtype=torch.bfloat16, requires_grad=True), 1000
    labels = torch.randint(words, (2, 64))
    losses, gradients, kept = {}, {}, {}
    for loss in (ForCausalLMLoss, CompiledLoss(ForCausalLMLoss, "inductor", static=False)):
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            if tensor.data_ptr() != logits.data_ptr():
                sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses[loss] = loss(logits, labels, vocab_size=words)
        gradients[loss] = torch.autograd.grad(losses[loss], logits)[0]
        kept[loss] = max(sizes)
    (eager, compiled), whole = losses, 4 * logits.numel()
    torch.testing.assert_close(losses[compiled], losses[eager])
    torch.testing.assert_close(gradients[compiled], gradients[eager])
    assert (kept[eager], kept[compiled] <= whole // 100) == (whole, True)


@pytest.mark.longer
def test_a_graph_for_each_shape_and_no_more() -> None:
    """With dynamic shapes, the number of graphs is the known number of shapes. Evaluations pad in another way."""
    flags = "--data-iterator dynamic-shape --tokens-per-batch 80 --max-shapes 3 --global-batch-size 2"
    flags += " --train-iters 20 --eval-interval 10 --micro-batch-size 2"
    expected = reference("pretrained-causal", False, flags)
    run = train("pretrained-causal", False, f"{flags} --torch-compile aot_eager")
    assert_follows(run, expected, atol=2e-6)
    assert run["evaluations"] == pytest.approx(expected["evaluations"], rel=1e-5)
    report, shapes = _report(run), run["summary"]["receipts"]["batch_shapes"]
    assert len(shapes) == 3
    assert report["limit"] == 3 + EVALUATION
    assert 3 < report["graphs"] <= report["limit"] + 3  # and a graph of the loss for each shape
    assert not report["not_compiled"]
    again = sum("size mismatch" in reason for reason in report["recompilations"])
    assert again >= 2


@pytest.mark.longer
def test_shapes_that_vary_share_a_graph() -> None:
    steps = "--train-iters 12 --global-batch-size 8 --micro-batch-size 8"
    expected = reference("causal", False, steps)
    run = train("causal", False, f"{steps} --torch-compile aot_eager")
    assert_follows(run, expected, atol=2e-6)
    # Training: graphs of blocks and of the loss for the first shape, and for all others. Evaluation: graphs of blocks
    # for any shape, and for another number of rows.
    assert _report(run)["graphs"] <= 6


@pytest.mark.parametrize(
    ("job", "regions", "graphs", "breaks", "limited"),
    [("breaking", 2, 1, 1, False), ("restless", 2, AUTOMATIC, 0, True), ("whole", 1, 1, 0, False)],
)
def test_report_of_models_that_do_not_compile_well(
    job: str, regions: int, graphs: int, breaks: int, limited: bool
) -> None:
    expected = reference(job, False, LIMITED)
    run = train(job, False, f"{LIMITED} --torch-compile eager")
    assert_follows(run, expected, atol=2e-6)
    report = _report(run)
    assert (report["regions"], report["graphs"]) == (regions, graphs)
    assert sum(report["graph_breaks"].values()) == breaks
    assert all("graph_break()" in reason for reason in report["graph_breaks"])
    # It stops at the limit and reports the reason of each graph but the first. Later calls run eagerly.
    assert report["not_compiled"] == ({"Dynamo recompile limit exceeded": 1} if limited else {})
    assert sum(report["recompilations"].values()) == (AUTOMATIC - 1 if limited else 0)
    assert all("self.calls" in reason or "'calls'" in reason for reason in report["recompilations"])


@pytest.mark.longer
@pytest.mark.parametrize("precision", ["", "--mixed-precision bf16"], ids=["fp32", "bf16"])
def test_dropout_draws_the_same_numbers_in_a_recomputed_graph(precision: str) -> None:
    flags = f"{ONE} --checkpoint-activations {precision}"
    found, eager = (train("stages-dropout", False, f"{flags} {more}") for more in (COMPILED, ""))
    assert_close(found["curve"], eager["curve"], 2**-7 if precision else 1e-5)


# Divided models, compared with one eager process in fp64, with graphs that do not break.

BASE = "--train-iters 3 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model --device cpu"
STAGES = "--pipeline-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2"
CONTEXT = "--context-parallel-size 2"
AGAIN = "--checkpoint-activations"
PRODUCTS = f"{AGAIN} --recompute-granularity selective"
MODELS = {
    "stages": "llama",
    "stages-gpt2": "gpt2",
    "seen-states": "llama, hidden states asked for",
}
GUIDE = Path(__file__).parents[3] / "docs" / "compile.md"
CASES = {
    "interleaved-checkpointed-seen": ("seen-states", 2, f"{STAGES} --virtual-pipeline-size 2 {AGAIN}"),
    "sequence-products": ("stages", 2, f"{TENSOR} --sequence-parallel {PRODUCTS}"),
    "gpt2-fused": ("stages-gpt2", 2, f"{TENSOR} --fused-linear-cross-entropy"),
    "3d": ("stages", 4, f"{STAGES} {TENSOR} --sequence-parallel {AGAIN} --virtual-pipeline-size 2"),
    "tensor-zero-2": ("stages", 4, f"{TENSOR} --zero-2-memory-optimization"),
    "context-ring-recomputed": ("stages-gpt2", 2, f"{CONTEXT} --context-parallel-kind ring {AGAIN}"),
    "context-sequence": ("stages", 4, f"{CONTEXT} {TENSOR} --sequence-parallel {PRODUCTS}"),
}
"""Job, workers and flags.

For ``make test-longer``. The covering table compiles models that are divided in every way.
"""
EXPERTS = "--num-experts 4 --moe-loss-coeff 2.5 --moe-z-loss-coeff 0.5"
STRETCHES = f"{TENSOR} --sequence-parallel {AGAIN}"
MIXTURES = [f"{STAGES} {AGAIN}", STRETCHES]


def _reference(job: str, more: str = "") -> Any:
    return reference(job, True, f"{BASE} --micro-batch-size 4 {more}")


def _assert_documented(job: str, layout: str, workers: int, report: Any) -> None:
    """Check that the table of docs/compile.md contains the measured numbers."""
    counts = (report["graphs"], sum(report["graph_breaks"].values()), sum(report["recompilations"].values()))
    row = f"| {MODELS[job]} | `{layout}` | {workers} | {' | '.join(map(str, counts))} |"
    assert row in GUIDE.read_text(encoding="utf-8").splitlines()


@pytest.mark.longer
@pytest.mark.parametrize("name", CASES)
def test_it_follows_one_eager_process_without_a_break(name: str) -> None:
    job, workers, layout = CASES[name]
    flags = f"{BASE} --micro-batch-size 4 --torch-compile aot_eager {layout}"
    run = observed(workers, job, True, flags)[0]
    assert_follows(run, _reference(job), 1e-10, 1e-10)
    report = run["summary"]["receipts"]["compile"]
    assert report["graphs"] > 0
    # Ring transfers run while scores are computed, which a graph cannot contain.
    outside = ["Skip calling `torch.compiler.disable()`d function"] if "ring" in name else []
    assert list(report["graph_breaks"]) == outside
    assert not report["recompilations"]
    assert not report["not_compiled"]
    _assert_documented(job, layout, workers, report)


def _train_with_breaks(workers: Any, job: str, flags: str) -> parity.Trained:
    def copy(*arguments: Any) -> Any:
        torch._dynamo.graph_break()
        return copy_all_to_region(*arguments)

    with mock.patch.object(collectives, "copy_all_to_region", copy):
        return train_exactly(workers, job, flags)


@pytest.mark.longer
def test_a_graph_break_inside_a_divided_layer_changes_no_number() -> None:
    """A forward that continues after a break must not use the parameters from before."""
    flags = f"{BASE} --micro-batch-size 4 --torch-compile aot_eager {TENSOR} --sequence-parallel"
    run = run_in_workers(2, _train_with_breaks, "stages-bert", flags)[0]
    assert_follows(run, _reference("stages-bert"), 1e-10, 1e-10)
    assert list(run["summary"]["receipts"]["compile"]["graph_breaks"]) == ["Call to `torch._dynamo.graph_break()`"]


@pytest.mark.deepspeed
@pytest.mark.longer
def test_zero_3_gathers_whole_blocks_outside_of_their_graphs() -> None:
    flags = f"{BASE} --micro-batch-size 4 --torch-compile aot_eager --zero-3-memory-optimization {PRODUCTS}"
    run = observed(2, "stages", True, flags)[0]
    assert_follows(run, _reference("stages"), 1e-5, 1e-5)  # DeepSpeed's partitions are in fp32
    report = run["summary"]["receipts"]["compile"]
    assert report["graphs"] > 0
    assert not report["graph_breaks"]
    assert not report["not_compiled"]
    _assert_documented("stages", f"--zero-3-memory-optimization {PRODUCTS}", 2, report)


@pytest.mark.deepspeed
@pytest.mark.parametrize("job", ["frozen-8", "whole"])
def test_zero_3_refuses_what_it_would_not_gather(job: str, says: Says) -> None:
    flags = f"{BASE} --micro-batch-size 4 --torch-compile aot_eager --zero-3-memory-optimization"
    found = outcomes_in_workers(2, train_exactly, job, flags)[0]
    assert isinstance(found, Failure)
    says.text(found.text)


@pytest.mark.longer
@pytest.mark.parametrize("layout", [TENSOR, STRETCHES], ids=["plain", "sequence"])
def test_dropout_draws_as_the_eager_layers_do(layout: str) -> None:
    flags = f"{BASE} --micro-batch-size 4 {layout}"
    eager, run = (
        observed(2, "stages-dropout", True, f"{flags}{more}")[0] for more in ("", " --torch-compile aot_eager")
    )
    assert_follows(run, eager, 1e-10, 1e-10)
    report = run["summary"]["receipts"]["compile"]
    assert report["graphs"] > 0
    assert bool(report["graph_breaks"]) == ("sequence" not in layout)  # a stretch draws all of its masks


def test_products_of_broken_graphs_are_refused(says: Says) -> None:
    flags = f"{BASE} --micro-batch-size 4 {TENSOR} {PRODUCTS} --torch-compile aot_eager"
    found = outcomes_in_workers(2, train_exactly, "stages-dropout", flags)[0]
    assert isinstance(found, Failure)
    says.text(found.text)


@pytest.mark.longer
@pytest.mark.parametrize("layout", MIXTURES)
def test_only_mixtures_break_graphs_of_blocks_with_experts(layout: str) -> None:
    """This includes recomputed blocks, of which torch would compile nothing."""
    flags = f"{BASE} --micro-batch-size 4 --torch-compile aot_eager {EXPERTS} {layout}"
    run = observed(2, "stages-gpt2", True, flags)[0]
    assert_follows(run, _reference("stages-gpt2", EXPERTS), 1e-10, 1e-10)
    report = run["summary"]["receipts"]["compile"]
    assert report["graphs"] >= 2  # before and after a gate
    assert all("torch.compiler.disable()" in reason for reason in report["graph_breaks"])
    assert not report["not_compiled"]
    _assert_documented("stages-gpt2", f"{EXPERTS} {layout}", 2, report)
