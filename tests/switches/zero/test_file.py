"""A DeepSpeed file: its loss scale takes effect and is resumed, and DeepSpeed itself checks the other keys."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.engines.step import DynamicLossScale
from rapidformer_templates.errors import ConfigError, Refused
from rapidformer_templates.switches.zero import file_check
from rapidformer_templates.switches.zero.engine import loss_scale_state, restore_loss_scale
from rapidformer_templates.switches.zero.file_check import deepspeed_problems
from rapidformer_templates.system import launch
from tests.support.jobs import CausalJob
from tests.support.messages import Says
from tests.support.selection import by_default

loss_scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler", reason="needs DeepSpeed")
pytestmark = pytest.mark.deepspeed

OVERFLOWS = (1, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1)


def _dynamic() -> Any:
    return loss_scaler.DynamicLossScaler(2.0**8, 2, 1, 2, False, raise_error_at_min_scale=False)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)


@pytest.mark.parametrize("saved_after", range(len(OVERFLOWS)))
@pytest.mark.usefixtures("alone")
def test_a_dynamic_scale_goes_on_as_if_it_had_never_stopped(saved_after: int) -> None:
    through, resumed, seen = _dynamic(), _dynamic(), set()
    for overflow in OVERFLOWS[:saved_after]:
        through.update_scale(bool(overflow))
    restore_loss_scale(resumed, json.loads(json.dumps(loss_scale_state(through))))
    for overflow in OVERFLOWS[saved_after:]:
        assert resumed.cur_scale == through.cur_scale
        seen.add(through.cur_scale)
        for scaler in (through, resumed):
            scaler.update_scale(bool(overflow))
    assert resumed.cur_scale == through.cur_scale
    assert len(seen) > 2 or saved_after > 3


def test_a_fixed_scale_stays_whatever_was_saved() -> None:
    fixed = loss_scaler.LossScaler(scale=128)
    restore_loss_scale(fixed, loss_scale_state(_dynamic()))
    assert fixed.cur_scale == 128
    ours = DynamicLossScale()
    ours.load_state(loss_scale_state(fixed))  # a run without ZeRO continues from it and grows
    assert float(ours.scale) == 128


def _job(told: dict[str, Any], *flags: str) -> CausalJob:
    file = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, **told}}
    return CausalJob([
        *("--deepspeed-config", json.dumps(file), "--lr", "1e-3", "--micro-batch-size", "4", "--log-interval", "1"),
        *("--train-iters", "6", "--lr-decay-style", "constant", *flags),
    ])  # fmt: skip


TOLD = [{"loss_scale": 64}, {"initial_scale_power": 4, "loss_scale_window": 2}]


@pytest.mark.parametrize("told", by_default(TOLD[1:], TOLD))
def test_it_is_saved_and_a_resumed_run_ends_as_one_that_was_not_stopped(told: dict[str, Any], tmp_path: Path) -> None:
    through = _job(told, "--save", str(tmp_path / "through"))
    through.fit()
    assert _saved_scale(tmp_path / "through", 6) == (64 if "loss_scale" in told else 2**6)
    _job(told, "--save", str(tmp_path / "halves"), "--train-iters", "3").fit()
    half = _job(told, "--save", str(tmp_path / "halves"), "--resume")
    half.fit()
    assert half.curve == through.curve[3:]
    assert _saved_scale(tmp_path / "halves", 6) == _saved_scale(tmp_path / "through", 6)


def _saved_scale(run: Path, step: int) -> float:
    state = json.loads((run / f"checkpoints/step-{step}/state.json").read_text())
    return float(state["engine"]["loss_scale"]["scale"])


def test_a_value_that_deepspeed_does_not_take_is_refused_before_the_run(tmp_path: Path, says: Says) -> None:
    with says(Refused):
        _job({"hysteresis": "two"}, "--save", str(tmp_path)).fit()
    assert not any(tmp_path.iterdir())


# DeepSpeed itself checks a file: in a child process, once, and only where it is needed.

MISSPELT: dict[str, Any] = {"zero_optimization": {"stage": 2, "overlap_com": True}}


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands of the child processes that a test starts. DeepSpeed is not imported in this process."""
    started: list[Any] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: started.append(words) or run(*words, **options))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    file_check._ask_deepspeed.cache_clear()
    return started


@pytest.mark.longer
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the deepspeed extra")
def test_one_child_checks_a_file(children: list[Any]) -> None:
    message = "no such key: zero_optimization.overlap_com; did you mean zero_optimization.overlap_comm?"
    for _ in range(2):
        assert deepspeed_problems(MISSPELT) == (("zero_optimization.overlap_com", message),)
    assert len(children) == 1
    assert "deepspeed" not in sys.modules


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), (launch.CHECKED, "1")])
def test_a_worker_starts_no_child(name: str, value: str, children: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert deepspeed_problems(MISSPELT) == ()
    assert children == []


def test_what_a_plan_reads_itself_needs_no_child(children: list[Any]) -> None:
    plain = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    content: dict[str, Any] = {"zero_optimization": plain, "bf16": {"enabled": "auto"}, "gradient_clipping": 0.5}
    assert deepspeed_problems(content) == ()
    assert children == []


def test_a_deepspeed_that_does_not_import_is_an_error(
    children: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/__init__.py").write_text("raise ImportError('libfoo.so: undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with says(ConfigError):
        deepspeed_problems(MISSPELT)
