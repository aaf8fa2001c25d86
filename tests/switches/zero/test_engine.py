"""ZeRO in all its forms follows the one-process run: loss, gradient norm, weights, and held memory."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.errors import NonFiniteLoss, RapidformerError
from rapidformer_templates.models.blocks import width_of
from rapidformer_templates.models.label_use import label_use
from tests.support.collectives import count_collectives
from tests.support.jobs import OTHERS, CausalJob
from tests.support.machine import why_no_nvme
from tests.support.parity import Trained, assert_close, assert_follows, observed, reference, train, weights_apart
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

CLIP = 0.1
STEPS = f"--train-iters 5 --eval-interval 2 --global-batch-size 8 --clip-grad {CLIP} --weight-decay 0.1"
ALONE = f"{STEPS} --micro-batch-size 8"
BF16 = "--mixed-precision bf16"
ALL_CUT = "--zero-3-memory-optimization --zero-3-param-persistence-threshold 0"
OVERLAP = '--deepspeed-config {"zero_optimization":{"overlap_comm":true}}'
"""What an accelerator does without a file."""

LAYOUTS = {
    "zero-1": "--zero-1-memory-optimization --micro-batch-size 2",
    "zero-2": "--zero-2-memory-optimization --micro-batch-size 2",
    "zero-3-all-cut": f"{ALL_CUT} --micro-batch-size 2",
    "zero-2-offload": "--zero-2-memory-optimization --micro-batch-size 2 --cpu-offload",
    "zero-3": "--zero-3-memory-optimization --micro-batch-size 2",
    "zero-3-checkpointed": f"{ALL_CUT} --micro-batch-size 1 --checkpoint-activations",
    "zero-1-offload": "--zero-1-memory-optimization --micro-batch-size 2 --cpu-offload",
    "zero-3-offload": "--zero-3-memory-optimization --micro-batch-size 4 --cpu-offload",
    "zero-1-overlap": f"--zero-1-memory-optimization --micro-batch-size 2 {OVERLAP}",
    "zero-2-overlap": f"--zero-2-memory-optimization --micro-batch-size 2 {OVERLAP}",
}
CASES = [("causal", layout) for layout in LAYOUTS] + [("frozen", "zero-2"), ("frozen", "zero-3-all-cut")]
"""A causal model with tied embeddings, and a classifier with frozen parameters."""

QUICK = [("causal", "zero-3-all-cut"), ("causal", "zero-2-overlap")]


def _flags(layout: str) -> str:
    return f"{STEPS} {LAYOUTS[layout]}"


def _assert_like(expected: Trained, actual: Trained) -> None:
    assert_follows(actual, expected, weights=(1e-5, 5e-6))
    assert len(expected["evaluations"]) == 3
    assert max(norm for _, norm in expected["curve"]) > 2 * CLIP  # so that clipping has an effect


@pytest.mark.parametrize(("job", "layout"), by_default(QUICK, CASES))
def test_zero_follows_one_process(job: str, layout: str) -> None:
    """In the matrix of resumes, ZeRO-1 and ZeRO-3 with offload follow one process, too."""
    run = observed(2, job, False, _flags(layout))[0]
    _assert_like(reference(job, False, ALONE), run)
    receipts = run["summary"]["receipts"]
    used = "DeepSpeedCPUAdam" if "offload" in layout else "torch.optim.adamw.AdamW"
    assert receipts["optimizer_class"].endswith(used)
    settings = receipts["zero_optimization"]
    assert (settings["reduce_bucket_size"], settings["allgather_bucket_size"]) == (2**18, 2**18)  # by the model's width
    if layout.startswith("zero-3") and job == "causal":
        width = width_of(CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make())
        kept_whole = 0 if ALL_CUT in LAYOUTS[layout] else 10 * width
        assert settings["prefetch_bucket_size"] == 2**18 * 9 // 10
        assert settings["param_persistence_threshold"] == kept_whole


@pytest.mark.longer
def test_nvme_follows_one_process_and_keeps_no_state_in_memory(tmp_path: Path) -> None:
    if why := why_no_nvme():
        pytest.skip(why)
    flags = f"{STEPS} --zero-3-memory-optimization --micro-batch-size 2 --nvme-path {tmp_path}"
    run = observed(2, "wide", False, flags)[0]
    _assert_like(reference("wide", False, ALONE), run)
    for held in run["summary"]["receipts"]["held_bytes_by_rank"]:
        # Partitions below a megabyte (biases and norms) stay. The whole state would be three times the parameters.
        assert held["optimizer_state_bytes"] < 0.05 * held["parameter_bytes"]


@pytest.mark.longer
@pytest.mark.parametrize("layout", ["zero-2-offload", "zero-1", "zero-3-all-cut"])
def test_bf16_follows_one_process_of_bf16(layout: str) -> None:
    actual, expected = (
        observed(2, "causal", False, f"{_flags(layout)} {BF16}")[0],
        reference("causal", False, f"{ALONE} {BF16}"),
    )
    assert_close(actual["curve"], expected["curve"], 2**-8, 0)
    assert actual["summary"]["receipts"]["parameter_dtypes"] == ["bfloat16"]
    # The saved masters differ from the reference's weights by less than the rounding of the format.
    assert 0 < weights_apart(actual["weights"], expected["weights"]) < 2**-8


def _failures(workers: Any, layout: str) -> list[RapidformerError]:
    """Train runs that must end, and return their errors."""
    ends = []
    with mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        for job in ("unreached", "broken"):
            with pytest.raises(RapidformerError) as error:
                train(job, False, _flags(layout))
            ends.append(error.value)
    return ends


@pytest.mark.parametrize("layout", by_default(["zero-2"], ["zero-2", "zero-3"]))
def test_unreached_parameters_and_an_infinite_loss_end_the_run_on_every_worker(layout: str) -> None:
    for unreached, broken in run_in_workers(2, _failures, layout):
        assert "spare.weight, spare.bias" in unreached.message
        assert isinstance(broken, NonFiniteLoss)
        assert "step 3" in broken.message


@pytest.mark.longer
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_alone_zero_is_plain_training(zero_stage: int) -> None:
    run = train("causal", False, f"{STEPS} --micro-batch-size 4 --zero-{zero_stage}-memory-optimization")
    _assert_like(reference("causal", False, ALONE), run)


def _gathered(workers: Any) -> list[int]:
    """Return the elements that are gathered before the first step and in each of four steps."""
    words = f"{_flags('zero-3-all-cut')} --train-iters 4 --lr 1e-3"
    return [gathered for _, gathered, _ in count_collectives(CausalJob(words.split()))[1]]


@pytest.mark.longer
def test_what_fits_is_gathered_once_for_forward_and_backward() -> None:
    """By default a parameter may stay whole until its backward. A step that gathers twice does not know its order."""
    parameters = sum(p.numel() for p in CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make().parameters())
    in_setup, *in_steps = run_in_workers(2, _gathered)[0]
    assert in_setup == 0
    assert 1 <= in_steps[-1] / (2 * parameters) < 1.2  # in each of two micro batches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_how_a_model_takes_labels_is_found_out_in_every_type(dtype: torch.dtype) -> None:
    """A forward that DeepSpeed runs in a narrow type keeps its signature for other code."""
    from rapidformer_templates.switches.zero.engine import _autocast_forward

    model = CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make()
    takes = inspect.signature(model.forward)
    _autocast_forward(model.to(dtype), dtype)
    assert inspect.signature(model.forward) == takes
    assert label_use(model).shifts


pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")

FILES: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in Path(__file__).with_name("guide").glob("*.json")
}
MANUAL = FILES["zero-2-manual"]
# The guide's rates hardly move a model in a few steps. The same file with other rates, in fp32, shows every option.
LOUDER = {
    "fp16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.6, 0.8], "eps": 1e-4, "weight_decay": 0.3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 4}},
}
SMALL = {"allgather_bucket_size": 2e6, "reduce_bucket_size": 2e6}  # those of the guide take 1.6 GB of each worker
FILES["zero-2-louder"] = {**MANUAL, **LOUDER, "zero_optimization": MANUAL["zero_optimization"] | SMALL}
GUIDED = "--train-iters 5 --global-batch-size 8"
FLAGS = {"auto": f"{GUIDED} --lr 1e-3 --weight-decay 0.1 --lr-warmup-iters 3", "manual": GUIDED, "louder": GUIDED}


def _train_all(workers: Any, folder: str, names: list[str]) -> dict[str, Any]:
    def flags(name: str) -> str:
        return f"{FLAGS[name.rpartition('-')[2]]} --micro-batch-size 2 --deepspeed-config {folder}/{name}.json"

    return {name: train("causal", False, flags(name), lr=None) for name in names}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    for name, file in FILES.items():
        text = json.dumps(file, indent=4).replace("\n    }\n", "\n    },\n")  # some files of the guide have such commas
        (folder / f"{name}.json").write_text(text)
    found: dict[str, Any] = run_in_workers(2, _train_all, str(folder), selected(request, "name"))[0]
    return found


def _by_hand(*, lr: float, warmup: dict[str, Any], **options: Any) -> type[CausalJob]:
    """Return a job for one process with torch's AdamW and DeepSpeed's schedule."""

    class ByHand(CausalJob):
        def build_optimizer(self) -> OptimizerSpec:
            return OptimizerSpec(torch.optim.AdamW, {"lr": lr, **options})

        def build_scheduler(self, total_steps: int) -> Callable[[int], float]:
            from deepspeed.runtime.lr_schedules import WarmupLR

            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
            schedule, rates = WarmupLR(optimizer, **warmup), []
            for _ in range(total_steps):
                rates.append(optimizer.param_groups[0]["lr"])
                schedule.step()
            return lambda step: float(rates[step] / lr)

    return ByHand


AS_AUTO = _by_hand(lr=1e-3, weight_decay=0.1, warmup={"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 3})
REFERENCES = {
    "auto": (AS_AUTO, ""),
    "manual": (
        _by_hand(warmup=MANUAL["scheduler"]["params"], **MANUAL["optimizer"]["params"]),
        "--mixed-precision fp16 --clip-grad 1.0",
    ),
    "louder": (_by_hand(warmup=LOUDER["scheduler"]["params"], **LOUDER["optimizer"]["params"]), ""),
}


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest) -> dict[str, Any]:
    found = {}
    for name in {name.rpartition("-")[2] for name in selected(request, "name")}:
        job, flags = REFERENCES[name]
        OTHERS["by-hand"] = job
        found[name] = train("by-hand", False, f"{GUIDED} --micro-batch-size 8 {flags}")
    del OTHERS["by-hand"]
    return found


@pytest.mark.parametrize("name", by_default(["zero-2-louder"], FILES))
def test_a_file_of_the_guide_follows_one_process(name: str, references: Any, runs: Any) -> None:
    kind = name.rpartition("-")[2]
    expected, actual = references[kind], runs[name]
    _assert_follows_the_file(expected, actual, 2**-9 if kind == "manual" else 1e-5, moved=kind != "manual")
    assert actual["summary"]["receipts"]["optimizer_class"].endswith("DeepSpeedCPUAdam")
    assert actual["summary"]["receipts"]["parameter_dtypes"] == ["float16" if kind == "manual" else "float32"]


def _assert_follows_the_file(expected: Any, actual: Any, rtol: float, *, moved: bool) -> None:
    assert_follows(actual, expected, rtol, weights=(1e-5, 2e-5))
    # Compare the norm: Adam turns rounding errors into steps if a gradient is about zero, 2 % of one in a few elements.
    assert weights_apart(actual["weights"], expected["weights"]) < 1e-5
    if moved:  # much more than this tolerance, so that other options of the optimizer would show
        assert max(float(weight.abs().max()) for name, weight in expected["weights"].items() if "bias" in name) > 1e-3
