"""Compiled blocks: the numbers of plain eager under every engine, few graphs, and a report of what was not compiled."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from rapidformer_templates.switches.torch_compile.transform import AUTOMATIC, EVALUATION
from tests.support import compiled_jobs as _jobs  # noqa: F401 - registers them
from tests.support.parity import assert_close, assert_follows, reference, train
from tests.support.selection import by_default

pytestmark = pytest.mark.slow

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
    # Two blocks share one graph.
    assert report == {
        "backend": "aot_eager",
        "regions": 2,
        "limit": AUTOMATIC,
        "graphs": 1,
        "graph_breaks": {},
        "recompilations": {},
        "not_compiled": {},
    }


def test_inductor_computes_the_same() -> None:
    run = train("even-causal", False, f"{ONE} --torch-compile")
    assert_follows(run, reference("even-causal", False, ONE), atol=2e-6)
    assert (_report(run)["backend"], _report(run)["graphs"]) == ("inductor", 1)


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
    assert 3 < report["graphs"] <= report["limit"]
    assert not report["not_compiled"]
    again = sum("size mismatch" in reason for reason in report["recompilations"])
    assert again >= 2


@pytest.mark.longer
def test_shapes_that_vary_share_a_graph() -> None:
    steps = "--train-iters 12 --global-batch-size 8 --micro-batch-size 8"
    expected = reference("causal", False, steps)
    run = train("causal", False, f"{steps} --torch-compile aot_eager")
    assert_follows(run, expected, atol=2e-6)
    # Training: one graph for the first shape and one for all others. Evaluation: any shape, another number of rows.
    assert _report(run)["graphs"] <= 4


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
