"""Fixtures that the tests of adapters share."""

from pathlib import Path

import pytest
import torch

from tests.support.jobs import CausalJob


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small pretrained model."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    CausalJob(["--lr", "1", "--train-iters", "1"]).make().save_pretrained(folder)  # type: ignore[operator]
    return folder
