"""The ``rapidformer`` command: its output, and how it exits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from rapidformer_templates.commands.doctor import build_parser as doctor_parser
from rapidformer_templates.commands.main import main
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.registry import REGISTRY
from tests.support.messages import Says


@dataclass(frozen=True)
class MyFlags:
    """Mine"""

    margin: float = flag(0.5, "distance between classes")


TITLES = ["\ncommands:", "\nLaunch:", "\nModel:", "\nData:", "\nTraining:", "\nAcceleration:"]


def test_help_is_grouped_with_the_commands_first(capsys: pytest.CaptureFixture[str]) -> None:
    for words, titles in (([], TITLES), (["--help"], TITLES), (["--help-all"], [*TITLES, "\nPlan:"])):
        assert main(words) == 0
        text = capsys.readouterr().out
        places = [text.index(title) for title in titles]
        assert places == sorted(places)
        assert text.count("\nAcceleration:") == 1


def flags_in(text: str) -> set[str]:
    """Return the flags that a help text explains, one per entry."""
    return set(re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", text, re.MULTILINE))


def test_the_short_help_has_the_usual_flags_and_the_long_one_all(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--task", "causal_lm", "--help"])
    usual = flags_in(capsys.readouterr().out)
    main(["--help-all"])
    every = flags_in(capsys.readouterr().out)
    assert 25 <= len(usual) <= 32
    assert {"--task", "--lr", "--save", "--data-dir", "--lora-rank", "--mixed-precision"} < usual < every
    fields = {spelling(f.name) for f in parse([], REGISTRY.options()).fields()}
    assert fields <= every


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("plan", "json yaml world-size local-world-size device-kind device-file tokens price-per-hour "
                 "disk-gb-per-second compare plot search-cache engine-memory"),
        ("doctor", "json build"), ("switches", ""), ("explain", ""),
    ],
)  # fmt: skip
def test_commands_have_their_own_help(command: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: rapidformer {command} ")
    assert flags_in(text) == {"--help", *(f"--{name}" for name in flags.split())}


@pytest.mark.parametrize("command", ["plan", "explain", "doctor"])
def test_the_example_of_a_command_is_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    example = re.findall(r"^example: rapidformer (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(example) == 1
    words = example[0].split()
    if command == "doctor":
        assert not doctor_parser().parse_known_args(words[1:])[1]  # the example compiles for minutes
    else:
        assert main(words) == 0


def test_a_script_has_both_helps(capsys: pytest.CaptureFixture[str]) -> None:
    for word, has_all in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit, match="0"):
            parse([word], REGISTRY.options(), prog="mine.py", user=MyFlags)
        text = capsys.readouterr().out
        assert text.startswith("usage: mine.py [flags]")
        assert {"--margin", "--lr"} <= flags_in(text)
        assert ("--lr-power" in flags_in(text)) == has_all


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--device cpu --task pretraining --fsdp_memory_optimization --global-batch-size 8"
    assert main(f"plan --json --world-size 4 {words}".split()) == 0
    answer = json.loads(capsys.readouterr().out)
    plan = answer["plan"]
    assert (answer["ok"], plan["template"]) == (True, "Pretrainer")
    assert (plan["sizes"]["data"], plan["sizes"]["accumulation"]) == (4, 2)
    assert plan["values"]["--fsdp-memory-optimization"] == {"value": True, "origin": "command line"}
    assert plan["values"]["template"] == {"value": "Pretrainer", "origin": "chosen for task pretraining"}
    assert "--json" not in plan["values"]


def test_refused_plan_as_json(capsys: pytest.CaptureFixture[str], says: Says) -> None:
    words = "plan --tf32 --device cpu --epochs 1 --train-iters 2"
    says.command(words)
    assert capsys.readouterr().out == ""
    says.command("plan --auto-strategy --world-size 8")
    assert main([*words.split(), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert [error["rule"] for error in answer["errors"]] == ["RF015", "RF018"]
    for error in answer["errors"]:
        assert set(error) == {"rule", "message", "why", "source", "asked", "works"}
        assert error["works"]


def test_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "cpu", "--nproc-per-node", "2", "--task", "causal_lm", "--mixed-precision"]) == 0
    text = capsys.readouterr().out
    parts = ("chosen for task causal_lm", "mixed-precision → optimizer", "Finetuner", "ParallelEngine", "bf16", "note:")
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("code", ["rf002", "RF2", "2", "rf02"])
def test_explain(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code]) == 0
    text = capsys.readouterr().out
    assert text.startswith("RF002: ZeRO needs the Trainer template.")
    assert "rapidformer plan --template Finetuner --zero-3-memory-optimization --world-size 2" in text


@pytest.mark.parametrize(
    ("words", "codes"),
    [("", {"RF002", "RF225"}), ("fsdp", {"RF035", "RF140"}), ("lora", {"RF120"}), ("Warmup", {"RF032"})],
)
def test_explain_lists_rules_by_title(words: str, codes: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = {rule.code: rule.title for rule in REGISTRY.all_rules}
    listed = [line.partition("  ")[0] for line in lines]
    assert lines == [f"{code}  {titles[code]}" for code in listed]
    assert codes <= set(listed)
    assert ("RF018" in listed) == (not words)


@pytest.mark.slow
def test_whoever_reads_no_further_gets_no_stack_trace() -> None:
    """This happens in ``rapidformer schema | head``."""
    command = f"{sys.executable} -m rapidformer_templates schema | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 141  # as for any program that SIGPIPE ends
