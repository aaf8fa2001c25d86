"""A file cannot allow what only the command line may: code of a model folder runs only with --trust-remote-code."""

from __future__ import annotations

import io
import json
from pathlib import Path
from unittest import mock

import pytest
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.models.loading import read_config_of
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run.saved_model import find_saved
from tests.support.messages import Says
from tests.support.saved_models import open_saved

CODE = """
from pathlib import Path
from transformers import GPT2Config
Path({marker!r}).write_text("ran")
class Config(GPT2Config):
    pass
"""
ONLY_ON_COMMAND_LINE = [f.name for f in parse([], REGISTRY.options()).fields() if not f.metadata.get("in_files", True)]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Path of a file that exists once foreign code has run."""
    return tmp_path / "ran"


@pytest.fixture
def model(tmp_path: Path, gpt_folder: Path, marker: Path) -> Path:
    """Create an exported model with code, in a run folder whose plan trusts it."""
    run = tmp_path / "run"
    folder = run / "export"
    tokenizer = AutoTokenizer.from_pretrained(gpt_folder)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(CODE.format(marker=str(marker)))
    values = {"trust_remote_code": True, "task": "causal_lm", "user_script": str(folder / "mine.py")}
    plan = {"values": {spelling(name): {"value": value, "origin": "command line"} for name, value in values.items()}}
    (run / "plan.json").write_text(json.dumps(plan))
    return folder


@pytest.mark.parametrize("beside", ["run", "export"], ids=["of a run folder", "of a model in one"])
def test_a_plan_grants_nothing(beside: str, model: Path, marker: Path, tmp_path: Path, says: Says) -> None:
    given = str(model if beside == "export" else model.parent)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "one"}) + "\n")
    for words in (
        f"predict {given} --input {rows} --output {tmp_path}/out.jsonl",
        f"evaluate {given} --device cpu --data-dir {tmp_path} --data-name rows",
        f"chat {given}",
    ):
        with mock.patch("sys.stdin", io.StringIO("hello\n")):
            says.command(words)
        assert "--trust-remote-code" in says.said[-1]
        assert not marker.exists(), words
    with pytest.raises(RapidformerError, match="trust"):
        open_saved(given)
    assert not marker.exists()
    assert not find_saved(given).values.keys() & set(ONLY_ON_COMMAND_LINE)


def test_the_command_line_grants_it(model: Path, marker: Path) -> None:
    """Otherwise the test above would not prove anything."""
    assert find_saved(model).config(trust_remote_code=True).model.trust_remote_code
    assert type(read_config_of(model, trust_remote_code=True)).__name__ == "Config"
    assert marker.exists()


def test_a_yaml_file_cannot_set_it(tmp_path: Path, says: Says) -> None:
    assert ONLY_ON_COMMAND_LINE == ["user_script", "trust_remote_code"]
    file = tmp_path / "flags.yaml"
    for name in ONLY_ON_COMMAND_LINE:
        file.write_text(f"lr: 1.0e-3\n{name}: true\n")
        with says(ConfigError):
            parse(["--config", str(file)], REGISTRY.options())
