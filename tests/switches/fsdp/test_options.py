"""The options of FSDP and sharding inside groups of workers change what is sent, never what is computed."""

import json
import math
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rapidformer_templates.engines import local
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.plan import Plan, Sizes
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.switch import Measured
from rapidformer_templates.switches.fsdp import engine
from tests.support import combinations, engine_runs
from tests.support.collectives import GATHER, REDUCE, SUM, count_collectives
from tests.support.engine_runs import SAVED
from tests.support.jobs import OTHERS, VOCABULARY, CausalJob
from tests.support.lines import Line
from tests.support.parity import EXACT, Trained, assert_close, assert_follows, observed, reference, train
from tests.support.requests import config_of
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed

STEPS = "--train-iters 5 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1"
TWO_STEPS = "--train-iters 2"
FSDP = "--micro-batch-size 2 --fsdp-memory-optimization"  # with two workers: two micro batches per step
KEPT = "--no-fsdp-reshard-after-forward"
ONCE = "--no-fsdp-reduce-every-micro-batch"
GROUPS = 3  # the model's two blocks, and the root with the rest
REDUCED = {
    "bf16": ("bf16", None),
    "bf16, sums in bf16": ("bf16", "bf16"),
    "fp16": ("fp16", "fp16"),
    "fp16, sums in bf16": ("fp16", "bf16"),
}
"""(precision, type of the sums) by name."""


class OwnOutput(CausalJob):
    """A model without blocks, whose output is not a container that torch's ``fully_shard`` looks into."""

    def make(self) -> torch.nn.Module:
        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding, self.head = torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY)

            def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
                return SimpleNamespace(logits=self.head(torch.tanh(self.embedding(input_ids))))

        return Model()


OTHERS["own-output"] = OwnOutput


class Counted(NamedTuple):
    """A run, the messages of its second step, and the types in which it summed gradients."""

    run: Trained
    sent: dict[str, int]
    types: set[str]


def _count(workers: Any, flags: str, double: bool) -> Counted:
    job = CausalJob([*f"{STEPS} {FSDP} {flags}".split(), "--lr", "1e-3"])
    job.double = double
    run, seen = count_collectives(job)
    messages, _, types = seen[2]
    return Counted(run, {name: messages[name, 2] for name in (GATHER, REDUCE)}, types)


@pytest.fixture(scope="module")
def runs() -> dict[str, Counted]:
    return {flags: run_in_workers(2, _count, f"{TWO_STEPS} {flags}", True)[0] for flags in (KEPT, ONCE, "")}


@pytest.mark.parametrize("flags", [KEPT, ONCE])
def test_what_stays_whole_changes_nothing(flags: str, runs: dict[str, Counted]) -> None:
    assert_follows(runs[flags].run, reference("causal", True, f"{STEPS} {TWO_STEPS} --micro-batch-size 8"), *EXACT)


def test_gradients_are_sent_once_a_step_and_parameters_are_gathered_once_if_they_stay_whole(runs: Any) -> None:
    # Each of two micro batches gathers everything for its forward, and all but the root again for its backward.
    assert runs[""].sent == {GATHER: 2 * (2 * GROUPS - 1), REDUCE: 2 * GROUPS}
    assert runs[ONCE].sent == {GATHER: 2 * (2 * GROUPS - 1), REDUCE: GROUPS}
    assert runs[KEPT].sent == {GATHER: GROUPS, REDUCE: 2 * GROUPS}


def test_only_shards_of_gradients_are_kept_between_micro_batches(runs: Any) -> None:
    """With one sum per step, each worker keeps the gradients of the whole model."""
    elements = sum(p.numel() for p in CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make().parameters())
    between = {flags: runs[flags].run["summary"]["receipts"]["whole_gradients_between"] for flags in runs}
    assert between == {"": 0, KEPT: 0, ONCE: elements}


def test_receipt_shows_what_is_whole_when_the_backward_begins(runs: Any) -> None:
    model = CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make().double()
    held = {flags: runs[flags].run["summary"]["receipts"]["parameter_bytes_in_backward"] for flags in runs}
    whole = sum(p.nbytes for p in model.parameters())
    blocks = sum(p.nbytes for p in model.transformer.h.parameters())
    assert whole <= held[KEPT] < 1.01 * whole  # rows that do not divide by two are padded
    assert whole - blocks < held[""] < whole - 0.49 * blocks


@pytest.mark.longer
@pytest.mark.parametrize("case", REDUCED)
def test_gradients_are_summed_in_the_type_that_is_asked_for(case: str) -> None:
    precision, reduced = REDUCED[case]
    name = {None: "float32", "bf16": "bfloat16", "fp16": "float16"}[reduced]
    reduce = f"--fsdp-reduce-dtype {reduced}" if reduced else ""
    actual, _, types = run_in_workers(2, _count, f"--mixed-precision {precision} {reduce}", False)[0]
    assert types == {name}
    expected = reference("causal", False, f"{STEPS} --micro-batch-size 8 --mixed-precision {precision}")
    tolerance = 2**-8 if "bf16" in (precision, reduced) else 2**-10
    assert_close(actual["curve"], expected["curve"], tolerance, 0)


class SharingJob(CausalJob):
    """Two blocks share one feed-forward."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        model.transformer.h[1].mlp = model.transformer.h[0].mlp
        return model


class TiedJob(CausalJob):
    """A block and the last norm have one bias, and two blocks have one matrix in different modules."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        first, second = model.transformer.h
        first.ln_1.bias = model.transformer.ln_f.bias
        second.attn.c_proj.weight = first.attn.c_proj.weight
        return model


OTHERS |= {"sharing": SharingJob, "tied": TiedJob}
SHARED = "--train-iters 3 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1"


SHARING = [("sharing", KEPT), ("tied", ""), ("sharing", ""), ("sharing", "--checkpoint-activations")]


@pytest.mark.longer
@pytest.mark.parametrize(("job", "flags"), SHARING)
def test_what_several_blocks_share_is_of_none_of_their_units(job: str, flags: str) -> None:
    expected = reference(job, True, f"{SHARED} --micro-batch-size 8")
    for run in observed(2, job, True, f"{SHARED} {FSDP} {flags}"):
        assert_follows(run, expected, 1e-10, 1e-10)


class Squeezed(torch.nn.Module):
    """Returns a view of a linear layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).squeeze(-1)


class ViewJob(Line):
    def build_model(self) -> torch.nn.Module:
        return Squeezed()

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"].squeeze(-1))


class InPlaceJob(ViewJob):
    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = model(batch["x"])
        outputs += 1
        return torch.nn.functional.mse_loss(outputs, batch["y"].squeeze(-1))


VIEW_FLAGS = ["--lr", "0.1", "--train-iters", "2", "--fsdp-memory-optimization", "--device", "cpu", "--no-save"]


def _refusal_of_a_changed_view(workers: Any) -> str:
    with mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        with pytest.raises(RapidformerError) as error:
            InPlaceJob(VIEW_FLAGS).fit()
        return str(error.value)


def _view_warnings(workers: Any, pattern: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(engine, "VIEW_WARNING", pattern):
        warnings.simplefilter("always")
        ViewJob(VIEW_FLAGS).fit()
    return [str(warning.message) for warning in caught if "view" in str(warning.message)]


@pytest.mark.longer
def test_no_worker_warns_about_views() -> None:
    assert run_in_workers(2, _view_warnings, engine.VIEW_WARNING) == [[], []]
    assert all(run_in_workers(2, _view_warnings, "another message")), "torch no longer warns: remove the filter"


def test_a_view_that_is_changed_in_place_is_refused() -> None:
    """Otherwise FSDP would lose the gradients without a word, and the run would train nothing."""
    for message in run_in_workers(2, _refusal_of_a_changed_view):
        assert "the output of Squeezed is a view and was changed in place" in message


MICRO = "--micro-batch-size 1"  # with four workers: two micro batches per step
PAIR = "--fsdp-shard-size 2"
HYBRID = f"{MICRO} --fsdp-memory-optimization {PAIR}"
AVERAGED = "--ema-decay 0.9"
BF16 = "--mixed-precision bf16 --checkpoint-activations"
BRANCHES = "--micro-batch-size 4 --fsdp-memory-optimization --fsdp-shard-size 2"
CONTINUED = {"all workers": ("fsdp", "--fsdp-shard-size 4"), "copies": ("plain", "")}
"""Engines that continue from a checkpoint of hybrid sharding, with their flags."""


def _norm_of_the_second_copy() -> Any:
    """Change the norm of the second copy. Its workers sum in another order, which changes the last bits of the norm."""
    norm = local.get_total_norm

    def rounded(*given: Any, **named: Any) -> Any:
        return norm(*given, **named) * (1 + 1e-6 * (dist.get_rank() >= 2))

    return mock.patch.object(local, "get_total_norm", rounded)


def _count_of_four() -> dict[str, Any]:
    """Return the collectives of the second step by name and group size, and the receipts after two steps."""
    job = CausalJob([*f"{STEPS} --train-iters 2 {HYBRID}".split(), "--lr", "1e-3"])
    with _norm_of_the_second_copy():
        run, seen = count_collectives(job)
    return {"counted": seen[2][0], "rounded": run["summary"]["receipts"]}


def _all_runs(workers: Any, folder: str) -> dict[str, Any]:
    """Train in each of four workers."""
    of_four = _count_of_four()
    of_four["bf16"] = train("causal", False, f"{STEPS} {HYBRID} {BF16}", "--save", f"{folder}/bf16")
    of_four["branches"] = combinations.train(workers, "Trainer", BRANCHES.split(), "branches")
    return of_four | _resumed(workers, folder)


def _resumed(workers: Any, folder: str) -> dict[str, Any]:
    """Return the curves of an uninterrupted run, of one that resumes, and of other engines that continue from it."""
    whole = engine_runs.run(f"{folder}/whole", "fsdp", 4, *PAIR.split())
    died = f"{folder}/died"
    engine_runs.run(died, "fsdp", 4, *PAIR.split(), dies_after=SAVED + 1)
    cases = {"again": ("fsdp", PAIR), **CONTINUED}
    if workers.is_main:
        for name in cases:
            shutil.copytree(died, f"{folder}/{name}")
    workers.barrier()
    curves = {
        name: engine_runs.run(f"{folder}/{name}", engine, 4, "--resume", *flags.split())
        for name, (engine, flags) in cases.items()
    }
    return {"whole": whole, **curves}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def of_four(folder: str) -> dict[str, Any]:
    return run_in_workers(4, _all_runs, folder)[0]


@pytest.mark.longer
def test_groups_follow_one_process() -> None:
    """Compare clipped steps of two micro batches each in fp64, and evaluations of averaged weights."""
    expected = reference("causal", True, f"{STEPS} --micro-batch-size 8 {AVERAGED}")
    assert all(norm > 0.1 for _, norm in expected["curve"]), "so that clipping acts"
    actual = observed(4, "causal", True, f"{STEPS} {HYBRID} {AVERAGED}")[0]
    assert_follows(actual, expected, *EXACT)
    _assert_shares_and_copies(actual["summary"]["receipts"])


def _assert_shares_and_copies(receipts: Any) -> None:
    assert (receipts["copies"], receipts["copies_equal"]) == (2, True)
    assert len(receipts["held_bytes_by_rank"]) == 4
    for held in receipts["held_bytes_by_rank"]:
        assert held["parameter_bytes"] == pytest.approx(receipts["parameter_bytes_whole"] / 2, rel=0.02)


@pytest.mark.longer
def test_groups_follow_one_process_in_bf16(of_four: Any) -> None:
    expected = reference("causal", False, f"{STEPS} --micro-batch-size 8 --mixed-precision bf16")
    assert_close(of_four["bf16"]["curve"], expected["curve"], 2**-8, 0)
    _assert_shares_and_copies(of_four["bf16"]["summary"]["receipts"])


@pytest.mark.longer
def test_what_some_copies_do_not_reach_counts_as_zero(of_four: Any) -> None:
    flags = ["--micro-batch-size", "16", "--global-batch-size", "16"]
    expected = combinations.train(None, "Trainer", flags, "branches")
    assert combinations.distance(of_four["branches"], expected).worst < 1e-5


@pytest.mark.longer
def test_parameters_travel_inside_groups_and_gradients_of_shards_between_them_once_a_step(of_four: Any) -> None:
    gathers = 2 * (2 * GROUPS - 1)  # for two micro batches, with a root that stays whole between forward and backward
    in_pairs = {name: count for (name, size), count in of_four["counted"].items() if size == 2}
    assert in_pairs == {GATHER: gathers, REDUCE: 2 * GROUPS, SUM: GROUPS}


@pytest.mark.longer
def test_copies_stay_equal_where_their_groups_add_up_in_other_orders(of_four: Any) -> None:
    assert of_four["rounded"]["copies_equal"] is True


@pytest.mark.longer
def test_a_run_goes_on_bitwise_and_in_other_layouts(of_four: Any, folder: str, tmp_path: Path) -> None:
    assert of_four["again"] == of_four["whole"][SAVED:]
    reference = engine_runs.run(str(tmp_path / "reference"), "plain", 1)
    torch.testing.assert_close(torch.tensor(of_four["whole"]), torch.tensor(reference), rtol=1e-5, atol=1e-6)
    shutil.copytree(f"{folder}/died", tmp_path / "one")
    curves = {name: of_four[name] for name in CONTINUED} | {
        "one": engine_runs.run(str(tmp_path / "one"), "plain", 1, "--resume")
    }
    for curve in curves.values():
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(reference[SAVED:]), rtol=1e-5, atol=1e-6)


@pytest.mark.longer
def test_a_checkpoint_has_one_copy_that_all_groups_write(of_four: Any, folder: str) -> None:
    (checkpoint,) = Path(folder, "whole", "checkpoints").glob(f"step-{SAVED}")
    index = json.loads((checkpoint / "index.json").read_text())
    for kind in ("weights", "optimizer"):
        files = set()
        for name, entry in index[kind].items():
            offsets = [tuple(offset) for _, _, offset, _ in entry["boxes"]]
            assert len(offsets) == len(set(offsets)), name
            assert len(offsets) == (2 if math.prod(entry["shape"]) > 1 else 1), name
            files |= {file for file, *_ in entry["boxes"]}
        assert len(files) == 4, "each worker writes"


@pytest.mark.longer
def test_the_export_has_one_copy(of_four: Any, folder: str) -> None:
    exported = load_file(f"{folder}/bf16/export/model.safetensors")
    assert exported
    for name, weight in exported.items():
        torch.testing.assert_close(weight.double(), of_four["bf16"]["weights"][name], rtol=0, atol=0)


ACTED = [  # (elements that each of four workers updates of the ten that are trained, copies equal, message)
    ((5, 5, 5, 5), True, None),
    ((6, 4, 6, 4), True, None),
    ((3, 3, 2, 2), True, "2 copies of shares for 2 workers were expected; the workers have 10 elements together"),
    ((10, 10, 10, 10), True, "2 copies of shares for 2 workers were expected; the workers have 40 elements together"),
    ((5, 5, 5, 5), False, "2 equal copies were expected; after an update they differ"),
]


@pytest.mark.parametrize(("updated", "equal", "said"), ACTED)
def test_the_first_step_shows_how_many_copies_there_are(
    updated: tuple[int, ...], equal: bool, said: str | None
) -> None:
    config = REGISTRY.complete(config_of(f"--fsdp-memory-optimization {PAIR}"))
    ranks = [{"updated_elements": count, "trained_elements": 10, "copies_equal": equal} for count in updated]
    plan = Plan("Trainer", ("fsdp", "hybrid-sharding"), Sizes(world=4, local_world=4, data=4))
    found = REGISTRY["hybrid-sharding"].acted(Measured(plan, config, ranks))
    assert found == said if said is None else str(found).startswith(said)


def test_gradients_are_summed_whatever_the_model_returns() -> None:
    found = run_in_workers(2, _train_own_output)[0]
    assert_follows(found, reference("own-output", True, f"{STEPS} --micro-batch-size 4"), *EXACT)


def _train_own_output(workers: Any) -> Trained:
    return train("own-output", True, f"{STEPS} --micro-batch-size 4 --fsdp-memory-optimization")
