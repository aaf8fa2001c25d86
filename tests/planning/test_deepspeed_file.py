"""A DeepSpeed file and the flags: the file is completed, adopted, or refused if it is wrong or contradicts flags."""

import contextlib
import copy
import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rapidformer_templates.engines.recipe import deepspeed_rates, default_optimizer, schedule
from rapidformer_templates.errors import ConfigError, Refused
from rapidformer_templates.planning import resolve as resolve_module
from rapidformer_templates.planning.deepspeed_file.file import key_table
from rapidformer_templates.planning.deepspeed_file.settings import bucket_sizes, fill_bucket_sizes, merge_file
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.planning.schedules import DEEPSPEED_SCHEDULES
from tests.support.messages import Says
from tests.support.requests import CPU, GPUS, config_of, on
from tests.support.rotten_input import DEEPSPEED_FILE

ZERO_3 = "--zero-3-memory-optimization"
TWO = on(GPUS, world_size=2, local_world_size=2)
ON_CPU = on(CPU, packages={"deepspeed": "any"})
AUTO = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3, "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": 12345, "sub_group_size": 1000,
        "offload_optimizer": {"device": "cpu"},
    },
    "wall_clock_breakdown": True,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def in_this_process() -> None:
    """Import DeepSpeed once, so that its own check of a file needs no child process."""
    with contextlib.suppress(ImportError):
        import deepspeed  # noqa: F401


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(content: Any) -> str:
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def effective(flags: str) -> dict[str, Any]:
    return dict(resolve(merge_file(config_of(flags)), TWO).engine_options.deepspeed)


def test_auto_is_filled_from_the_flags(file: Any) -> None:
    flags = "--micro-batch-size 4 --global-batch-size 24 --clip-grad 0.5 --mixed-precision bf16"
    told = effective(f"--deepspeed-config {file(AUTO)} {flags}")
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    assert [told[name] for name in names] == [24, 4, 3, 0.5]
    assert (told["bf16"]["enabled"], told["fp16"]["enabled"]) == (True, False)
    sizes = {name for name, value in told["zero_optimization"].items() if value == "auto"}
    assert sizes == set(bucket_sizes(1, "cpu")), "the model's width is not known yet"
    filled = fill_bucket_sizes(told["zero_optimization"], 64, "cpu")
    assert "auto" not in json.dumps({**told, "zero_optimization": filled})
    assert told.keys().isdisjoint({"optimizer", "scheduler"})  # the plan has both, and the engine a ready optimizer
    # Entries without a flag are passed on.
    assert told["wall_clock_breakdown"] is True
    assert told["zero_optimization"]["sub_group_size"] == 1000
    assert told["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


def test_what_the_file_says_becomes_a_flag_with_the_file_as_its_origin(file: Any) -> None:
    content = {**AUTO, "gradient_clipping": 0.25, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2}
    content["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.2}}
    plan = resolve(merge_file(config_of(f"--deepspeed-config {file(content)}")), TWO)
    assert {"zero-3", "cpu-offload", "mixed-precision", "deepspeed-config"} <= set(plan.switches)
    assert plan.precision == "bf16"
    for name, value in (
        ("lr", 3e-4), ("weight-decay", 0.2), ("clip-grad", 0.25), ("micro-batch-size", 2),
        ("zero-3-max-live-parameters", 12345),
    ):  # fmt: skip
        assert plan.values[f"--{name}"] == {"value": value, "origin": "ds.json:1"}


ZERO_2 = {"zero_optimization": {"stage": 2}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
DECAY = {"type": "WarmupDecayLR", "params": {**WARMUP["params"], "total_num_steps": "auto"}}  # type: ignore[dict-item]
CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
WARM = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": "auto"}}


def zero(stage: int = 2, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


REFUSED: list[tuple[Any, str]] = [
    # A contradiction shows both.
    ({"gradient_clipping": 1.0}, "--clip-grad 0.5"), (zero(3), "--zero-2-memory-optimization"),
    ({"fp16": {"enabled": True}}, "--mixed-precision bf16"),
    ({"gradient_accumulation_steps": 4}, "--micro-batch-size 2 --global-batch-size 8"),
    ({"optimizer": {"params": {"lr": 0.1}}}, "--lr 0.2"),
    (zero(offload_optimizer={"device": "none"}), "--cpu-offload"),
    ({"scheduler": WARMUP}, "--min-lr 1e-6"), ({"scheduler": WARMUP}, "--lr-decay-iters 5"),
    ({"scheduler": DECAY}, "--lr-decay-style cosine"),
    ({"scheduler": WARM, "optimizer": {"type": "Adam", "params": {"lr": 3e-5}}}, ""),
    ({**zero(1, overlap_comm=True), "bf16": {"enabled": True}}, "--tensor-model-parallel-size 2"),
    # Files that cannot be read
    ("{", ""), ("[1]", ""), ('{"bf16": {"enabled": true},\n "bf16": {}}', ""), ({"gradient_clipping": "much"}, ""),
    ('{\n  // comments, and last commas, are read\n  "zero_optimization": {"stage": 2,},\n  "wandb": {"a": 1},\n}', ""),
    # Keys that DeepSpeed does not take, or that would do nothing
    ({"amp": {"enabled": True}}, ""), ({"wandb": {"enabled": True, "project": "x"}}, ""),
    ({"prescale_gradients": True}, ""), ({"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}, ""),
    ({"optimizer": {"type": "Lamb", "params": {"lr": "auto"}}}, ""),
    ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, ""),
    ({"optimizer": {"params": {"betas": [0.9]}}}, ""), ({"scheduler": {"type": "WarmupLr"}}, ""),
    (scheduler("WarmupLR", warmup_type="cubic"), ""), ({"scheduler": CYCLE}, ""),
    (zero(zero_quantized_gradients=True), ""), ({"communication_data_type": "fp8"}, ""),
    (zero(3, offload_param={"device": "cpu"}), ""), ({"gradient_cliping": 1.0}, ""), ({"something": 1}, ""),
    ({"optimizer": {"type": "AdamW", "params": {"beta": 1}}}, ""), ({"bf16": True}, ""), ({"optimizer": "AdamW"}, ""),
]  # fmt: skip
REFUSED_BY_DEEPSPEED: list[dict[str, Any]] = [
    zero(reduce_bucket_sise=1), zero(offload_optimizer={"device": "cpu", "pin_memry": True}),
    {"fp16": {"enabled": False, "loss_scal": 1}}, {"aio": {"block": 1}}, zero(cpu_offload=True),
    zero(reduce_bucket_size="much"), scheduler("WarmupLR", warmup_num_steps="auto", warmup_steps=4),
    scheduler("WarmupLR", warmup_num_steps=0, warmup_min_lr="auto"),
    scheduler("WarmupDecayLR", warmup_max_lr="auto", warmup_num_steps="auto"), scheduler("WarmupLR", warmup_min_lr=-1),
]  # fmt: skip
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")


@pytest.mark.parametrize(
    ("content", "flags"),
    [*REFUSED, *(pytest.param(content, "", marks=needs_deepspeed) for content in REFUSED_BY_DEEPSPEED)],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)
def test_a_file_is_refused(content: Any, flags: str, file: Any, says: Says) -> None:
    whole = content if isinstance(content, str) else ZERO_2 | content
    with says((ConfigError, Refused)):  # type: ignore[arg-type]
        resolve(merge_file(config_of(f"--deepspeed-config {file(whole)} {flags}")), TWO)


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
    (group,) = recipe.build([("w", torch.nn.Parameter(torch.zeros(2, 2)))], {"w": {}}).param_groups
    assert (group["betas"], group["eps"]) == ((0.8, 0.99), 1e-6)


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


SIZES = (
    "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
)  # fmt: skip


def test_buckets_are_filled_from_the_width_as_the_guide_says(file: Any) -> None:
    auto = dict.fromkeys(SIZES, "auto")
    for begin in (f"--deepspeed-config {file({'zero_optimization': {'stage': 3, **auto}})}", ZERO_3):
        zero = effective(f"{begin} --model-type gpt2 --hidden-size 4000")["zero_optimization"]
        assert [zero[name] for name in SIZES] == [16_000_000, 16_000_000, 14_400_000, 40_000]
        zero = effective(f"{begin} --hidden-size 4000 --zero-3-prefetch-bucket-size 7")["zero_optimization"]
        assert [zero[name] for name in SIZES] == [16_000_000, 16_000_000, 7, 40_000]
        zero = effective(f"{begin} --zero-3-param-persistence-threshold 0")["zero_optimization"]
        assert [zero[name] for name in SIZES] == ["auto", "auto", "auto", 0]


def test_a_number_in_the_file_is_followed_and_one_stage_has_no_sizes_of_another(file: Any) -> None:
    said = {"stage": 2, "reduce_bucket_size": 5, "allgather_bucket_size": "auto"}
    zero = effective(f"--deepspeed-config {file({'zero_optimization': said})} --hidden-size 4000")["zero_optimization"]
    assert [zero.get(name) for name in SIZES] == [5, 16_000_000, None, None]


@pytest.mark.parametrize(
    ("stage", "device", "more", "overlaps"),
    [
        (1, "cuda", {}, True), (2, "cuda", {}, True), (2, "cuda", {"overlap_comm": False}, False),
        (3, "cuda", {}, None), (2, "cpu", {}, None),
    ],
)  # fmt: skip
def test_gradients_travel_during_the_backward(
    stage: int, device: str, more: dict[str, Any], overlaps: bool | None, file: Any
) -> None:
    config = merge_file(config_of(f"--deepspeed-config {file({'zero_optimization': {'stage': stage, **more}})}"))
    settings = resolve(config, dataclasses.replace(TWO, device=device)).engine_options.deepspeed
    assert settings["zero_optimization"].get("overlap_comm") is overlaps


@pytest.mark.parametrize(("width", "square"), [(1, 2**18), (512, 2**18), (513, 263_169), (50_000, 50_000_000)])
def test_buckets_of_small_and_large_models_stay_within_bounds(width: int, square: int) -> None:
    even = square + square % 2
    assert list(bucket_sizes(width, "cpu").values()) == [square, even, square * 9 // 10, 10 * width]
    assert tuple(bucket_sizes(width, "cpu")) == SIZES
    assert bucket_sizes(width, "cuda")["reduce_bucket_size"] == max(square, 2**23)


def test_what_a_file_may_say(file: Any) -> None:
    same = f"--deepspeed-config {file({'gradient_clipping': 0.5, **ZERO_2})} --zero-2-memory-optimization"
    assert effective(f"{same} --clip-grad 0.5")["gradient_clipping"] == 0.5
    assert effective(f"--deepspeed-config {file({'amp': {'enabled': False}, **zero(1)})}")
    offload = effective(f"--deepspeed-config {file(zero(3, offload_optimizer={'device': 'cpu'}))}")
    assert "offload_param" not in offload["zero_optimization"]


def test_the_plan_says_how_large_a_bucket_is() -> None:
    flags = f"--model-type gpt2 {ZERO_3}"
    known = resolve(config_of(f"{flags} --hidden-size 4000"), TWO)
    assert "ZeRO: a bucket holds 16,000,000 elements" in known.notes
    unknown = resolve(config_of(flags), TWO)
    assert "ZeRO: a bucket holds the square of the model's width, 8,388,608 to 50,000,000 elements" in unknown.notes


def test_deepspeed_takes_what_it_is_told(file: Any) -> None:
    """DeepSpeed's own parser reads every effective configuration, so the key names are DeepSpeed's."""
    kind = pytest.importorskip("deepspeed.runtime.zero.config", reason="needs DeepSpeed").DeepSpeedZeroConfig
    for flags in ("--zero-1-memory-optimization", "--zero-2-memory-optimization --cpu-offload"):
        assert kind(**effective(flags)["zero_optimization"]).stage in (1, 2)
    told = effective("--zero-3-memory-optimization --nvme-path /fast --zero-3-max-live-parameters 7")
    zero = kind(**told["zero_optimization"])
    assert zero.max_live_parameters == 7
    assert str(zero.offload_param.nvme_path) == "/fast"
    assert zero.offload_optimizer.device == "nvme"


def test_a_warmup_of_the_file_may_be_longer_than_the_run(file: Any) -> None:
    """The guide's own file has a warmup of 500 steps, and a short run with it is a trial."""
    params = {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}
    path = file({**ZERO_2, "scheduler": {"type": "WarmupLR", "params": params}})
    resolve(merge_file(config_of(f"--deepspeed-config {path} --train-iters 5")), TWO)


LR = 3e-4
WARM_UP = {"warmup_min_lr": 1e-5, "warmup_max_lr": LR, "warmup_num_steps": 7}
CYCLIC = {"cycle_min_lr": 1e-5, "cycle_max_lr": LR, "cycle_momentum": False, "cycle_first_step_size": 5}
SCHEDULES = [
    ("WarmupLR", {}),
    ("WarmupLR", {**WARM_UP, "warmup_num_steps": 7.0, "warmup_type": "linear"}),
    ("WarmupDecayLR", {**WARM_UP, "total_num_steps": 20}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 7, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}),
    ("OneCycle", {**CYCLIC, "cycle_second_step_size": 9, "decay_step_size": 2, "decay_lr_rate": 0.3}),
    ("LRRangeTest", {"lr_range_test_min_lr": LR, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 0.7}),
]


def _of_deepspeed(kind: str) -> Any:
    return getattr(pytest.importorskip("deepspeed.runtime.lr_schedules", reason="needs DeepSpeed"), kind)


@pytest.mark.parametrize(("kind", "given"), SCHEDULES)
def test_each_update_runs_at_deepspeeds_rate(kind: str, given: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    theirs = _of_deepspeed(kind)(optimizer, **{k: int(v) if v == 7 else v for k, v in given.items()})
    expected = []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        theirs.step()
    ours = deepspeed_rates({"type": kind, "params": given}, lr=LR, warmup=0, total=0)
    assert [ours(update) for update in (39, 0, 12)] == [expected[39], expected[0], expected[12]]  # in any order
    assert [ours(update) for update in range(40)] == expected


def test_a_linear_warmup_is_a_line() -> None:
    given = {"warmup_max_lr": LR, "warmup_num_steps": 4, "warmup_type": "linear"}
    ours = deepspeed_rates({"type": "WarmupLR", "params": given}, lr=LR, warmup=0, total=0)
    rates = [0, 0, LR / 4, LR / 2, LR * 3 / 4, LR, LR]  # it moves after an update, so the first two are the lowest
    assert [ours(update) for update in range(7)] == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("kind", DEEPSPEED_SCHEDULES)
def test_parameters_that_are_flags_and_their_defaults_are_deepspeeds(kind: str) -> None:
    theirs = inspect.signature(_of_deepspeed(kind)).parameters
    defaults = {name: theirs[name].default for name in DEEPSPEED_SCHEDULES[kind]}
    defaults = {name: None if value is inspect.Parameter.empty else value for name, value in defaults.items()}
    assert defaults == DEEPSPEED_SCHEDULES[kind]


def test_auto_is_filled_as_the_guide_says() -> None:
    given = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    ours = deepspeed_rates({"type": "WarmupDecayLR", "params": given}, lr=LR, warmup=4, total=12)
    told = {"warmup_min_lr": 0.0, "warmup_max_lr": LR, "warmup_num_steps": 4, "total_num_steps": 12}
    theirs = deepspeed_rates({"type": "WarmupDecayLR", "params": told}, lr=0.0, warmup=0, total=0)
    assert [ours(update) for update in range(14)] == [theirs(update) for update in range(14)]
    assert max(ours(update) for update in range(14)) == LR
    assert ours(13) == 0.0


WRONG = (
    None, True, -1, 10**400, 1e308, float("inf"), float("nan"), "", "much", "auto", [], [[1]], {}, {"a": {"b": []}},
)  # fmt: skip


def paths(section: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every value and every section."""
    for key, value in section.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def with_value(path: tuple[str, ...], value: object) -> dict[str, Any]:
    content: dict[str, Any] = copy.deepcopy(DEEPSPEED_FILE)
    section = content
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    return content


def outcomes(path: tuple[str, ...], file: Path) -> Iterator[Plan | str]:
    """Yield the plan or the message of the error, for each wrong value at the path."""
    more = ("", "--zero-2-memory-optimization --hidden-size 64 --mixed-precision fp16")
    parsed = [config_of(f"--deepspeed-config {file} {flags}") for flags in more]  # does not read the file yet
    for value in WRONG:
        file.write_text(json.dumps(with_value(path, value)))
        for without_file in parsed:
            try:
                yield resolve(merge_file(without_file), TWO)
            except (ConfigError, Refused) as error:
                yield error.render()


@pytest.mark.parametrize("path", list(paths(DEEPSPEED_FILE)), ids=".".join)
def test_a_wrong_value_makes_a_plan_or_an_error(
    path: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve_module, "nearest", lambda request, registry: [])  # the search takes a second
    results = list(outcomes(path, tmp_path / "ds.json"))
    assert len(results) == 2 * len(WRONG)
    assert [message for message in results if isinstance(message, str) and "ds.json" not in message] == []
