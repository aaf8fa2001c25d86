"""A DeepSpeed file and the flags: the file is completed, adopted, or refused if it contradicts the flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rapidformer_templates.engines.recipe import default_optimizer, schedule
from rapidformer_templates.errors import ConfigError, Refused
from rapidformer_templates.planning.deepspeed_file.file import key_table
from rapidformer_templates.planning.deepspeed_file.settings import bucket_sizes, fill_bucket_sizes, merge_file
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.resolve import resolve
from tests.support.requests import CPU, GPUS, config_of, on

ZERO_3 = "--zero-3-memory-optimization"
TWO = on(GPUS, world_size=2, local_world_size=2)
ON_CPU = on(CPU, packages={"deepspeed": "any"})
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 12345,
        "sub_group_size": 1000,
        "offload_optimizer": {"device": "cpu"},
    },
    "wall_clock_breakdown": True,
}


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(content: Any) -> str:
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def effective(flags: str) -> dict[str, Any]:
    return dict(resolve(merge_file(config_of(flags)), TWO).engine_options.deepspeed)


def refusals(flags: str) -> list[str]:
    with pytest.raises(Refused) as refused:
        resolve(merge_file(config_of(flags)), TWO)
    return [f"{found.rule}: {found.message}" for found in refused.value.diagnostics]


def test_auto_is_filled_from_the_flags(file: Any) -> None:
    flags = "--micro-batch-size 4 --global-batch-size 24 --clip-grad 0.5 --mixed-precision bf16"
    told = effective(f"--deepspeed-config {file(AUTO)} {flags}")
    assert told["train_batch_size"] == 24
    assert told["train_micro_batch_size_per_gpu"] == 4
    assert told["gradient_accumulation_steps"] == 3
    assert told["gradient_clipping"] == 0.5
    assert told["bf16"]["enabled"] is True
    assert told["fp16"]["enabled"] is False
    sizes = {name for name, value in told["zero_optimization"].items() if value == "auto"}
    assert sizes == set(bucket_sizes(1)), "the model's width is not known yet"
    assert "auto" not in json.dumps({**told, "zero_optimization": fill_bucket_sizes(told["zero_optimization"], 64)})
    assert "optimizer" not in told  # the plan has it, and the engine receives a ready optimizer
    assert "scheduler" not in told  # the plan has it


def test_what_the_file_says_becomes_a_flag_with_the_file_as_its_origin(file: Any) -> None:
    content = {**AUTO, "gradient_clipping": 0.25, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2}
    content["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.2}}
    plan = resolve(merge_file(config_of(f"--deepspeed-config {file(content)}")), TWO)
    assert {"zero-3", "cpu-offload", "mixed-precision", "deepspeed-config"} <= set(plan.switches)
    assert plan.precision == "bf16"
    values = {name: (given["value"], given["origin"]) for name, given in plan.values.items()}
    assert values["--lr"] == (3e-4, "ds.json:1")
    assert values["--weight-decay"] == (0.2, "ds.json:1")
    assert values["--clip-grad"] == (0.25, "ds.json:1")
    assert values["--micro-batch-size"] == (2, "ds.json:1")
    assert values["--zero-3-max-live-parameters"] == (12345, "ds.json:1")


def test_what_no_flag_knows_is_handed_on(file: Any) -> None:
    told = effective(f"--deepspeed-config {file(AUTO)}")
    assert told["wall_clock_breakdown"] is True
    assert told["zero_optimization"]["sub_group_size"] == 1000
    assert told["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


CONTRADICTIONS = [
    (
        {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}},
        "--clip-grad 0.5",
        "RF036: ds.json has gradient_clipping = 1.0, --clip-grad is 0.5 (command line)",
    ),
    (
        {"zero_optimization": {"stage": 3}},
        "--zero-2-memory-optimization",
        "RF036: ds.json has zero_optimization.stage = 3, --zero-2-memory-optimization is on (command line)",
    ),
    (
        {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}},
        "--mixed-precision bf16",
        "RF036: ds.json has fp16.enabled = True, --mixed-precision is bf16 (command line)",
    ),
    (
        {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}},
        "--micro-batch-size 2 --global-batch-size 8",
        "RF036: ds.json has gradient_accumulation_steps = 4, the batch sizes make 2",
    ),
    (
        {"optimizer": {"params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}},
        "--lr 0.2",
        "RF036: ds.json has optimizer.params.lr = 0.1, --lr is 0.2 (command line)",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}},
        "--cpu-offload",
        "RF036: ds.json has zero_optimization.offload_optimizer.device = none, --cpu-offload is on (command line)",
    ),
]


@pytest.mark.parametrize(("content", "flags", "message"), CONTRADICTIONS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_contradiction_shows_both(content: Any, flags: str, message: str, file: Any) -> None:
    assert refusals(f"--deepspeed-config {file(content)} {flags}") == [message]


def test_the_same_value_in_both_is_no_contradiction(file: Any) -> None:
    content = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}
    assert effective(f"--deepspeed-config {file(content)} --clip-grad 0.5 --zero-2-memory-optimization")


BROKEN = [
    ("{", "ds.json is not JSON"),
    ("[1]", "does not hold a JSON object"),
    ('{"bf16": {"enabled": true},\n "bf16": {}}', "ds.json has bf16 twice in a section"),
    (
        {"zero_optimization": {"stage": 2}, "gradient_clipping": "much"},
        r"--clip-grad needs a value of type float, not 'much'\n  where  ds\.json:1, gradient_clipping",
    ),
]


@pytest.mark.parametrize(("content", "message"), BROKEN, ids=lambda x: x if isinstance(x, str) else "")
def test_a_file_that_cannot_be_used(content: Any, message: str, file: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        merge_file(config_of(f"--deepspeed-config {file(content)}"))


METRICS = "metrics go to metrics.jsonl; send them elsewhere in on_step_end and on_evaluate"
IDLE: list[tuple[dict[str, Any], str]] = [
    ({"amp": {"enabled": True}}, "ds.json has a section amp: --mixed-precision sets the precision; leave it out"),
    ({"wandb": {"enabled": True, "project": "x"}}, f"ds.json has a section wandb: {METRICS}"),
    ({"prescale_gradients": True}, "ds.json has prescale_gradients: ZeRO scales gradients itself; leave it out"),
    (
        {"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}},
        "optimizer.type = Adagrad is not possible: choose from adam, adamw, lamb, muon, lion, adafactor",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
        "optimizer.params.adam_w_mode = false needs the type Adam, not AdamW",
    ),
    ({"optimizer": {"params": {"betas": [0.9]}}}, "optimizer.params.betas must be two numbers, not [0.9]"),
    (
        {"scheduler": {"type": "WarmupLr"}},
        "scheduler.type = WarmupLr is not possible: "
        "choose from WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}},
        "scheduler.params.warmup_type = cubic is not possible: choose from log, linear",
    ),
    (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}},
        "scheduler.params.cycle_momentum must be false: the optimizer sets the betas; "
        "DeepSpeed would move them with the learning rate",
    ),
    (
        {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}},
        "zero_optimization.zero_quantized_gradients = true is not possible: a switch does not change the mathematics",
    ),
    ({"communication_data_type": "fp8"}, "communication_data_type = fp8 is not possible: choose from fp16, bf16, fp32"),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param needs offload_optimizer: "
        "parameters leave the device after the optimizer state",
    ),
    ({"gradient_cliping": 1.0}, "no such key: gradient_cliping; did you mean gradient_clipping?"),
    ({"something": 1}, "no such key: something"),
    (
        {"optimizer": {"type": "AdamW", "params": {"beta": 1}}},
        "no such key: optimizer.params.beta; did you mean optimizer.params.betas?",
    ),
    ({"bf16": True}, "bf16 must be a section, not True"),
    ({"optimizer": "AdamW"}, "optimizer must be a section, not 'AdamW'"),
]
ZERO_2 = {"zero_optimization": {"stage": 2}}
UNKNOWN_BELOW: list[tuple[dict[str, Any], str]] = [
    (
        {"zero_optimization": {"stage": 2, "reduce_bucket_sise": 1}},
        "no such key: zero_optimization.reduce_bucket_sise; did you mean zero_optimization.reduce_bucket_size?",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memry": True}}},
        "no such key: zero_optimization.offload_optimizer.pin_memry; "
        "did you mean zero_optimization.offload_optimizer.pin_memory?",
    ),
    ({"fp16": {"enabled": False, "loss_scal": 1}}, "no such key: fp16.loss_scal; did you mean fp16.loss_scale?"),
    ({"aio": {"block": 1}}, "no such key: aio.block; did you mean aio.block_size?"),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        "zero_optimization.cpu_offload is deprecated in DeepSpeed: write zero_optimization.offload_optimizer",
    ),
    (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": "much"}},
        "zero_optimization.reduce_bucket_size cannot be 'much': "
        "Input should be a valid integer, unable to parse string as an integer",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_steps": 4}}},
        "no such key: scheduler.params.warmup_steps; did you mean scheduler.params.warmup_num_steps?",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0, "warmup_min_lr": "auto"}}},
        "WarmupLR of DeepSpeed refuses scheduler.params: warmup_num_steps must be a positive integer, got 0",
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}},
        "scheduler.params.total_num_steps: Field required",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": -1}}},
        "scheduler.params.warmup_min_lr cannot be -1: Input should be greater than or equal to 0",
    ),
]


@pytest.mark.parametrize(("content", "message"), [*IDLE, *UNKNOWN_BELOW], ids=lambda x: x if isinstance(x, str) else "")
def test_what_deepspeed_does_not_take_or_what_would_do_nothing_is_refused(
    content: Any, message: str, file: Any
) -> None:
    if (content, message) in UNKNOWN_BELOW:
        pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
    assert refusals(f"--deepspeed-config {file(ZERO_2 | content)}") == [f"RF102: {message}"]


def test_a_refusal_names_the_line(file: Any) -> None:
    text = '{\n  // comments, and last commas, are read\n  "zero_optimization": {"stage": 2,},\n  "wandb": {"a": 1},\n}'
    with pytest.raises(Refused) as refused:
        resolve(merge_file(config_of(f"--deepspeed-config {file(text)}")), TWO)
    assert refused.value.diagnostics[0].asked[-1] == "wandb (ds.json:4)"


def test_every_key_that_deepspeed_asks_for_is_decided() -> None:
    """Use DeepSpeed's own parser, with a dictionary that records which keys it reads."""
    config = pytest.importorskip("deepspeed.runtime.config", reason="needs DeepSpeed")

    class Asked(dict[str, Any]):
        names: ClassVar[set[str]] = set()

        def __contains__(self, key: object) -> bool:
            self.names.add(str(key))
            return super().__contains__(key)

        def get(self, key: str, default: Any = None) -> Any:
            self.names.add(key)
            return super().get(key, default)

        def keys(self) -> Any:
            return self

    config.DeepSpeedConfig(Asked(train_batch_size=1))
    assert "zero_optimization" in Asked.names
    assert Asked.names - key_table().top == set()


def test_the_optimizer_of_the_file_acts(file: Any) -> None:
    params = {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 3e-7}
    plan = resolve(merge_file(config_of(f"--deepspeed-config {file({**ZERO_2, 'optimizer': _adam(params)})}")), ON_CPU)
    assert plan.optimizer_options == {"betas": (0.8, 0.99), "eps": 1e-6}
    assert plan.values["--adam-beta1"] == {"value": 0.8, "origin": "ds.json:1"}
    recipe = default_optimizer(plan, TrainingFlags(lr=3e-5, weight_decay=3e-7))
    built = recipe.build([("w", torch.nn.Parameter(torch.zeros(2, 2)))], {"w": {}})
    assert built.param_groups[0]["betas"] == (0.8, 0.99)
    assert built.param_groups[0]["eps"] == 1e-6


def _adam(params: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Adam", "params": params}


def test_adam_without_w_decays_in_the_gradient(file: Any) -> None:
    content = {**ZERO_2, "optimizer": _adam({"adam_w_mode": False, "weight_decay": 0.1, "lr": 1.0})}
    plan = resolve(merge_file(config_of(f"--deepspeed-config {file(content)}")), ON_CPU)
    built = default_optimizer(plan, TrainingFlags(lr=1.0)).build(
        [("w", torch.nn.Parameter(torch.zeros(2, 2)))], {"w": {}}
    )
    assert plan.optimizer_implementation == "torch.optim.Adam (fused)"
    assert built.param_groups[0]["decoupled_weight_decay"] is False
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    plan = resolve(merge_file(config_of(f"--deepspeed-config {file(content | offload)}")), ON_CPU)
    assert plan.optimizer_options == {"adamw_mode": False}


def test_lamb_is_asked_for_by_the_file_and_refused_as_ever(file: Any) -> None:
    content = {**ZERO_2, "optimizer": {"type": "Lamb", "params": {"lr": "auto"}}}
    assert refusals(f"--deepspeed-config {file(content)}") == ["RF025: lamb cannot update the shards of zero-2"]


def test_the_schedule_of_the_file_is_the_runs(file: Any) -> None:
    params = {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 5, "warmup_type": "linear"}
    content = {**ZERO_2, "scheduler": {"type": "WarmupLR", "params": params}}
    config = merge_file(config_of(f"--deepspeed-config {file(content)}"))
    plan = resolve(config, TWO)
    assert plan.values["--lr"] == {"value": 3e-5, "origin": "ds.json:1"}
    assert plan.values["--lr-warmup-iters"] == {"value": 5, "origin": "ds.json:1"}
    factor = schedule(config.training, 10, plan.schedule)
    assert [round(factor(step), 12) for step in range(8)] == [0, 0, 0.2, 0.4, 0.6, 0.8, 1, 1]
    (line,) = (note for note in plan.notes if "learning rate" in note)
    assert line.startswith("ds.json: the learning rate follows DeepSpeed's WarmupLR (warmup_min_lr 0, ")


BESIDE = [
    ("WarmupLR", "--min-lr 1e-6", "--min-lr"),
    ("WarmupLR", "--lr-decay-iters 5", "--lr-decay-iters"),
    ("WarmupDecayLR", "--lr-decay-style cosine", "--lr-decay-style"),
]


@pytest.mark.parametrize(("kind", "flags", "idle"), BESIDE)
def test_flags_of_another_schedule_are_refused(kind: str, flags: str, idle: str, file: Any) -> None:
    params = dict.fromkeys(("warmup_max_lr", "warmup_num_steps"), "auto")
    params |= {"total_num_steps": "auto"} if kind == "WarmupDecayLR" else {}
    path = file({**ZERO_2, "scheduler": {"type": kind, "params": params}})
    message = f"RF036: ds.json has the schedule {kind}, with which {idle} (command line) would do nothing"
    assert refusals(f"--deepspeed-config {path} {flags}") == [message]


def test_of_two_learning_rates_in_one_file_none_is_ignored(file: Any) -> None:
    params = {"warmup_max_lr": 1e-4, "warmup_num_steps": "auto"}
    content = {**ZERO_2, "scheduler": {"type": "WarmupLR", "params": params}, "optimizer": _adam({"lr": 3e-5})}
    assert refusals(f"--deepspeed-config {file(content)}") == [
        "RF036: ds.json has scheduler.params.warmup_max_lr = 0.0001, --lr is 3e-05 (ds.json:1)"
    ]


SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)


def test_buckets_are_filled_from_the_width_as_the_guide_says(file: Any) -> None:
    auto = dict.fromkeys(SIZES, "auto")
    for begin in (f"--deepspeed-config {file({'zero_optimization': {'stage': 3, **auto}})}", ZERO_3):
        zero = effective(f"{begin} --model-type gpt2 --hidden-size 1000")["zero_optimization"]
        assert [zero[name] for name in SIZES] == [1_000_000, 1_000_000, 900_000, 10_000]
        zero = effective(f"{begin} --hidden-size 1000 --zero-3-prefetch-bucket-size 7")["zero_optimization"]
        assert [zero[name] for name in SIZES] == [1_000_000, 1_000_000, 7, 10_000]
        zero = effective(f"{begin} --zero-3-param-persistence-threshold 0")["zero_optimization"]
        assert [zero[name] for name in SIZES] == ["auto", "auto", "auto", 0]


def test_a_number_in_the_file_is_followed_and_one_stage_has_no_sizes_of_another(file: Any) -> None:
    said = {"stage": 2, "reduce_bucket_size": 5, "allgather_bucket_size": "auto"}
    zero = effective(f"--deepspeed-config {file({'zero_optimization': said})} --hidden-size 1000")["zero_optimization"]
    assert [zero.get(name) for name in SIZES] == [5, 1_000_000, None, None]


@pytest.mark.parametrize(("width", "square"), [(1, 2**18), (512, 2**18), (513, 263_169), (50_000, 50_000_000)])
def test_buckets_of_small_and_large_models_stay_within_bounds(width: int, square: int) -> None:
    even = square + square % 2
    assert list(bucket_sizes(width).values()) == [square, even, square * 9 // 10, 10 * width]
    assert tuple(bucket_sizes(width)) == SIZES


def test_the_plan_says_how_large_a_bucket_is() -> None:
    flags = f"--model-type gpt2 {ZERO_3}"
    known = resolve(config_of(f"{flags} --hidden-size 1000"), TWO)
    assert "ZeRO: a bucket holds 1,000,000 elements" in known.notes
    unknown = resolve(config_of(flags), TWO)
    assert "ZeRO: a bucket holds the square of the model's width, 262,144 to 50,000,000 elements" in unknown.notes


def test_of_the_two_offloads_the_file_names_one(file: Any) -> None:
    content = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    assert "offload_param" not in effective(f"--deepspeed-config {file(content)}")["zero_optimization"]


def test_under_3d_parallelism_what_only_deepspeed_knows_is_refused(file: Any) -> None:
    path = file({"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": True}})
    flags = f"--deepspeed-config {path} --tensor-model-parallel-size 2"
    assert refusals(flags) == [
        "RF104: DeepSpeed does not run under 3D parallelism, and only it knows zero_optimization.overlap_comm"
    ]


def test_a_section_that_is_switched_off_is_no_matter(file: Any) -> None:
    assert effective(f"--deepspeed-config {file({'amp': {'enabled': False}, 'zero_optimization': {'stage': 1}})}")


def test_no_such_file() -> None:
    with pytest.raises(ConfigError, match=r"the DeepSpeed file none\.json does not exist"):
        merge_file(config_of("--deepspeed-config none.json"))


def test_deepspeed_takes_what_it_is_told(file: Any) -> None:
    """DeepSpeed's own parser reads every effective configuration, so the key names are DeepSpeed's."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for flags in ("--zero-1-memory-optimization", "--zero-2-memory-optimization --cpu-offload"):
        assert DeepSpeedZeroConfig(**effective(flags)["zero_optimization"]).stage in (1, 2)
    told = effective("--zero-3-memory-optimization --nvme-path /fast --zero-3-max-live-parameters 7")
    zero = DeepSpeedZeroConfig(**told["zero_optimization"])
    assert zero.max_live_parameters == 7
    assert str(zero.offload_param.nvme_path) == "/fast"
    assert zero.offload_optimizer.device == "nvme"


def test_a_warmup_of_the_file_may_be_longer_than_the_run(file: Any) -> None:
    """The guide's own file has a warmup of 500 steps, and a short run with it is a trial."""
    params = {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}
    path = file({**ZERO_2, "scheduler": {"type": "WarmupLR", "params": params}})
    resolve(merge_file(config_of(f"--deepspeed-config {path} --train-iters 5")), TWO)
