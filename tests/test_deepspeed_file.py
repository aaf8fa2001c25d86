"""A DeepSpeed file and the flags: filled, adopted, refused where they contradict each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.deepspeed_file import adopt, look_up
from rapidformer_templates.errors import ConfigError, Refused
from rapidformer_templates.switches import resolve
from tests.switches.helpers import GPUS, config_of, on

TWO = on(GPUS, world_size=2, local_world_size=2)
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
    options = resolve(adopt(config_of(flags)), TWO).engine_options
    found: dict[str, Any] = options["deepspeed"]
    return found


def refusals(flags: str) -> list[str]:
    with pytest.raises(Refused) as refused:
        resolve(adopt(config_of(flags)), TWO)
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
    assert look_up(told, "zero_optimization.stage3_prefetch_bucket_size") == 50_000_000
    assert "auto" not in json.dumps(told)
    assert "optimizer" not in told  # its values are flags, and the engine gets a built optimizer
    assert "scheduler" not in told


def test_what_the_file_says_becomes_a_flag_with_the_file_as_its_origin(file: Any) -> None:
    content = {**AUTO, "gradient_clipping": 0.25, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2}
    content["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.2}}
    plan = resolve(adopt(config_of(f"--deepspeed-config {file(content)}")), TWO)
    assert {"zero-3", "cpu-offload", "mixed-precision", "deepspeed-config"} <= set(plan.switches)
    assert plan.precision == "bf16"
    values = {name: (given["value"], given["origin"]) for name, given in plan.values.items()}
    assert values["--lr"] == (3e-4, "ds.json")
    assert values["--weight-decay"] == (0.2, "ds.json")
    assert values["--clip-grad"] == (0.25, "ds.json")
    assert values["--micro-batch-size"] == (2, "ds.json")
    assert values["--zero-3-max-live-parameters"] == (12345, "ds.json")


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


def test_a_file_without_a_stage_is_refused(file: Any) -> None:
    assert refusals(f"--deepspeed-config {file({})}") == [
        "RF037: deepspeed-config needs a ZeRO stage, in the file or as a flag"
    ]


BROKEN = [
    ("{", "ds.json is not JSON"),
    ("[1]", "does not hold a JSON object"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "has a section scheduler"),
    ({"amp": {"enabled": True}}, "has a section amp"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN, ids=lambda x: x if isinstance(x, str) else "")
def test_a_file_that_cannot_be_used(content: Any, message: str, file: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        adopt(config_of(f"--deepspeed-config {file(content)}"))


def test_a_section_that_is_switched_off_is_no_matter(file: Any) -> None:
    assert effective(f"--deepspeed-config {file({'amp': {'enabled': False}, 'zero_optimization': {'stage': 1}})}")


def test_no_such_file() -> None:
    with pytest.raises(ConfigError, match=r"the DeepSpeed file none\.json does not exist"):
        adopt(config_of("--deepspeed-config none.json"))


def test_deepspeed_takes_what_it_is_told(file: Any) -> None:
    """Its own parser reads every effective configuration: the key names are its own."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for flags in ("--zero-1-memory-optimization", "--zero-2-memory-optimization --cpu-offload"):
        assert DeepSpeedZeroConfig(**effective(flags)["zero_optimization"]).stage in (1, 2)
    told = effective("--zero-3-memory-optimization --nvme-path /fast --zero-3-max-live-parameters 7")
    zero = DeepSpeedZeroConfig(**told["zero_optimization"])
    assert zero.max_live_parameters == 7
    assert str(zero.offload_param.nvme_path) == "/fast"
    assert zero.offload_optimizer.device == "nvme"
