"""``bench preprocess`` on a few hundred kB. The tests never check how long anything took."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from benchmarks import preprocess, texts
from benchmarks.__main__ import main
from benchmarks.preprocess import FAST, PLAIN, SAME, Place, Row
from benchmarks.texts import write_corpus
from rapidformer_templates.errors import DataError, RapidformerError

absent = [name for name in ("megatron", "gigatoken") if importlib.util.find_spec(name) is None]


@pytest.mark.longer
@pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")
def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess, "SMALL", 0.2)
    words = ["preprocess", "--megabytes", "0.3", "--repeats", "1", "--workers", "1", "--output", str(tmp_path)]
    assert main(words) == 0
    result = json.loads((tmp_path / "preprocess.json").read_text())
    names = [PLAIN, SAME, FAST]
    assert list(result["seconds"]) == list(result["ratios"]) == names
    assert list(result["peak_memory_bytes"]) == [SAME, FAST]
    assert result["ratios"][PLAIN] == [1, 1]
    assert 20_000 < result["tokens"] < 200_000
    assert all(result["seconds"][name][0] > 0.1 for name in names)
    for memory in result["peak_memory_bytes"].values():
        assert list(memory) == ["0.2", "0.3"]
        assert min(memory.values()) > 2e7
    shown = capsys.readouterr().out
    assert "all wrote the same .bin and .idx files, byte for byte" in shown
    assert "goal 8 ×" in shown
    assert (tmp_path / "preprocess.png").stat().st_size > 0


@pytest.mark.slow
def test_a_smaller_corpus_begins_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("small", 0.05), ("large", 0.3)):
        write_corpus(tmp_path / name, size)
    small, large = ((tmp_path / name).read_bytes() for name in ("small", "large"))
    assert large.startswith(small)
    assert len(small) >= 50_000
    rows = [json.loads(line) for line in large.splitlines()]
    assert all(row["text"].strip() for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    monkeypatch.setattr(texts, "_documents", lambda: iter([("one", "x" * 1_990_000)]))
    with pytest.raises(DataError, match="this machine has 2 MB of text"):
        write_corpus(tmp_path / "all", 3)


def test_who_makes_other_files_is_found_out(tmp_path: Path) -> None:
    place = Place(tmp_path, {}, 1)
    for name in (PLAIN, SAME):
        for end in ("bin", "idx"):
            Path(f"{place.output(name)}.{end}").write_bytes(b"same")
    preprocess._refuse_differences(place, [PLAIN, SAME])
    Path(f"{place.output(SAME)}.idx").write_bytes(b"other")
    with pytest.raises(RapidformerError, match=r"wrote different \.idx files"):
        preprocess._refuse_differences(place, [PLAIN, SAME])


def test_commands_that_fail_are_errors() -> None:
    with pytest.raises(RapidformerError, match="a command failed") as raised:
        preprocess._run([sys.executable, "-c", "raise SystemExit('no')"])
    assert raised.value.hint == "no\n"
    with pytest.raises(RapidformerError, match="a command failed"):
        preprocess._peak_memory([sys.executable, "-c", "raise SystemExit(1)"])


@pytest.mark.slow
def test_memory_of_all_processes_is_counted() -> None:
    child = "b = bytearray(b'x') * 40_000_000; import time; time.sleep(0.6)"
    alone = preprocess._peak_memory([sys.executable, "-c", child])
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); b = 1"
    assert 40e6 < alone < 80e6
    assert alone < preprocess._peak_memory([sys.executable, "-c", program]) < alone + 20e6


def test_ratios_and_verdicts() -> None:
    rows = [
        Row(PLAIN, [11.0, 9.0, 10.0], 2.0, {10: 100, 100: 100}),
        Row(SAME, [6.0], 2.0, {10: 100, 100: 150}),
        Row(FAST, [2.5], 2.0, {10: 100, 100: 105}),
    ]
    assert preprocess.ratios(rows, SAME) == pytest.approx((10 / 6, 2.0))
    assert preprocess.ratios(rows, FAST) == pytest.approx((4.0, 16.0))
    notes = preprocess._notes(rows)
    assert notes[1:] == [
        f"{SAME}: 1.67 × (the lower of the two); goal 1.5 ×: reached",
        f"{SAME}: peak memory 1.50 × that of the small corpus: it grows",
        f"{FAST}: 4.00 × (the lower of the two); goal 8 ×: missed",
        f"{FAST}: peak memory 1.05 × that of the small corpus: flat",
    ]
