"""The export of a model that transformers itself would refuse to save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.support.jobs import CausalJob


class Loose(CausalJob):
    """A temperature without sampling, as in some pretrained models."""

    def make(self) -> Any:
        model = super().make()
        model.generation_config.temperature = 0.5
        return model


def test_loose_settings_of_generation_are_exported_as_they_are(tmp_path: Path) -> None:
    job = Loose(["--train-iters", "1", "--lr", "1e-3", "--save", str(tmp_path / "run")])
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        job.make().save_pretrained(tmp_path / "plain")
    job.fit()
    for folder in (tmp_path / "run" / "export", *(tmp_path / "run").glob("**/generation_config.json")):
        file = folder if folder.is_file() else folder / "generation_config.json"
        assert json.loads(file.read_text())["temperature"] == 0.5
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").generation_config.temperature == 0.5
