"""The examples of the manual's page about the planner: the commands print the numbers of the table below them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from rapidformer_templates.commands.main import main
from tests.support.manual import ROOT

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
EXAMPLES = (ROOT / "docs/planner.md").read_text(encoding="utf-8").partition("### Examples")[2]
LAYOUT = re.compile(r"(\d+) · (\d+) · (\d+), (\d+)(, full recomputation)?(, two stages per worker)?")


def _command(words: str) -> list[str]:
    """Return the words of the example's command that has these words."""
    for block in re.findall(r"```\w+\nrapidformer (.*?)```", EXAMPLES, re.DOTALL):
        if words in block:
            return shlex.split(block.replace("\\\n", " "))
    raise AssertionError(f"no example has {words}")


def _row(layout: re.Match[str], partitioning: str, found: list[dict[str, object]]) -> dict[str, float]:
    """Return the predicted memory of a layout of the table."""
    tensor, pipeline, data, micro = map(int, layout.groups()[:4])
    fields: dict[str, object] = {"tensor": tensor, "pipeline": pipeline, "data": data, "micro_batch_size": micro}
    fields |= {"recompute": "full" if layout[5] else "none", "virtual": 2 if layout[6] else 1}
    fields |= {"partitioning": partitioning.replace(" ", "-"), "shard_size": None, "offload_activations": False}
    (one,) = [entry for entry in found if all(entry[key] == value for key, value in fields.items())]
    memory = one["memory_gb"]
    assert isinstance(memory, dict)
    return memory


@pytest.mark.longer
@pytest.mark.parametrize(("model", "words"), [("70 B", "h100-80gb"), ("22 B", "a100-80gb")])
def test_the_table_has_the_memory_that_the_command_predicts(
    model: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FOLDER/config.json").write_text(json.dumps(LLAMA_70B), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    main([*_command(words), "--json"])
    found = json.loads(capsys.readouterr().out)["layouts"]
    rows = [
        [cell.strip() for cell in line.split("|")[2:-1]] for line in EXAMPLES.splitlines() if f"| {model} |" in line
    ]
    assert rows
    for text, partitioning, *numbers in rows:
        layout = LAYOUT.fullmatch(text)
        assert layout, text
        memory = _row(layout, partitioning, found)
        state = memory["parameters"] + memory["gradients"] + memory["optimizer"]
        activations = memory["activations"] + memory["buffers"]
        predicted = [state, activations, memory["setup"], memory["needed"], memory["node_host"]]
        assert [float(number) for number in numbers] == pytest.approx(predicted, abs=0.0501), text
