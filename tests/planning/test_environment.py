"""The device of a run: torch's current accelerator, and devices that are refused."""

import importlib.metadata
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning import environment
from rapidformer_templates.planning.environment import detect, detect_accelerator
from tests.support.messages import Says


@pytest.fixture(autouse=True)
def afresh() -> Any:
    detect_accelerator.cache_clear()
    yield
    detect_accelerator.cache_clear()


def _machine(monkeypatch: pytest.MonkeyPatch, *, gpu: tuple[int, int] | None = None, other: str | None = None) -> None:
    monkeypatch.setattr(environment, "detect_gpu", lambda: gpu)
    found = None if other is None else torch.device(other)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)


@pytest.mark.parametrize(
    ("gpu", "other", "asked", "device", "capability", "seen"),
    [
        (None, None, "auto", "cpu", None, True),
        ((9, 0), None, "auto", "cuda", (9, 0), True),
        (None, "cuda", "auto", "cuda", None, True),  # AMD's GPU: nvidia-smi does not know it
        (None, "xpu", "auto", "xpu", None, True),
        (None, "xpu", "cpu", "cpu", None, True),
        (None, None, "npu", "npu", None, False),
        ((9, 0), None, "xpu", "xpu", None, False),
        (None, None, "cuda", "cuda", None, False),
    ],
)
def test_the_device_is_what_torch_can_use(
    gpu: Any, other: Any, asked: str, device: str, capability: Any, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(monkeypatch, gpu=gpu, other=other)
    found = detect("Trainer", "default", device=asked)
    assert (found.device, found.compute_capability, found.has_device) == (device, capability, seen)


def test_what_a_package_makes_known_is_a_device(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    _machine(monkeypatch)
    for device in ("brand", "gpu", "cuda:1", "cudo"):
        with says(ConfigError):
            detect("Trainer", "default", device=device)
    detect_accelerator.cache_clear()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: _Brand())
    assert detect("Trainer", "default", device="brand").has_device


class _Brand:
    type = "brand"


@pytest.mark.parametrize(("version", "asks"), [("2.13.0+rocm7.1", True), ("2.13.0+xpu", True), ("2.13.0+cpu", False)])
def test_torch_is_imported_only_where_its_build_says_that_there_may_be_another(
    version: str, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "version_of_package", lambda name: version)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **unused: ())
    monkeypatch.setattr(environment, "detect_gpu", lambda: None)
    (tmp_path / "torch.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ImportError) if asks else nullcontext():
        assert detect_accelerator() is None
