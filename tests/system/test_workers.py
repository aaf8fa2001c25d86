"""Joining workers: the device of each, and what the system allows it."""

import resource
from unittest import mock

import pytest
import torch

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.system.accelerator import device_of
from rapidformer_templates.system.processes import LAUNCHER
from rapidformer_templates.system.workers import join
from tests.support.messages import Says


def _device(devices: int, local_rank: int) -> torch.device:
    with mock.patch.object(torch.accelerator, "device_count", return_value=devices):
        return device_of("cuda", local_rank)


def test_a_process_takes_the_only_device_that_it_sees(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    """Schedulers such as SLURM can show each process its own. Our launcher shows all devices to all workers."""
    monkeypatch.delenv(LAUNCHER, raising=False)
    assert [_device(1, 3), _device(4, 3), _device(0, 0)] == [torch.device("cuda", n) for n in (0, 3, 0)]
    with says(ConfigError):
        _device(2, 2)
    monkeypatch.setenv(LAUNCHER, "1")
    assert _device(1, 0) == torch.device("cuda", 0)
    with says(ConfigError):
        _device(1, 1)


def test_workers_may_open_as_many_files_as_the_system_allows() -> None:
    """The store and gloo have connections to all other workers. 1,024 files would be enough for 190 workers."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        with join("cpu"):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
    assert limit == (2**20 if most == resource.RLIM_INFINITY else min(most, 2**20), most)
