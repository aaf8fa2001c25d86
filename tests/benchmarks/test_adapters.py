"""``benchmarks adapters`` on a few conversations, because the tweets take minutes."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import adapters
from benchmarks.adapters import WHOLE, _columns, chat, measure
from benchmarks.contest import table
from benchmarks.texts import documented

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")


@pytest.mark.longer
@pytest.mark.slow
def test_every_way_is_trained_from_one_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = "--model-type llama --num-layers 2 --hidden-size 64 --num-attention-heads 2 --dropout 0"
    monkeypatch.setattr(adapters, "SIZES", small)
    monkeypatch.setattr(adapters, "VOCABULARY", 400)
    monkeypatch.setattr(adapters, "documented", lambda: islice(documented(), 300))
    options = argparse.Namespace(steps=2, talks=24, repeats=1)
    names = [WHOLE, "LoRA", "QLoRA, int4"]
    rows = measure(chat(options, tmp_path), options, names, lambda text: None)
    assert [row["name"] for row in rows] == names
    whole, lora, four = rows
    # Weights of two blocks: four attention matrices and three feed-forward matrices, with the width that the flags set.
    assert whole["gradient"] == whole["parameter"]
    assert lora["parameter"] == whole["parameter"] + lora["gradient"]
    assert lora["gradient"] == four["gradient"] < whole["gradient"] / 2
    assert lora["optimizer_state"] == pytest.approx(2 * lora["gradient"], rel=0.01)
    linear = (lora["parameter"] - four["parameter"]) / (4 - 0.5625)
    assert linear == int(linear)
    assert lora["export"] < lora["checkpoint"] < whole["export"] < whole["checkpoint"]
    assert all(4 < row["value"] < 8 for row in rows)
    assert rows[0]["time"] == 1
    assert table("", rows, _columns("loss")).row_count == 3
