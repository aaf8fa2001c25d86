"""The ``rapidformer`` command, how it exits, and the catalogue: every switch, declared once, and its documents."""

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rapidformer_templates.commands.catalogue import CompatibilityTable, compatibility, explain
from rapidformer_templates.commands.main import main
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flags import SECTIONS, flag
from rapidformer_templates.planning.registry import REGISTRY, switch_options
from rapidformer_templates.planning.switch import Rule
from scripts.manual import catalogue as document
from scripts.manual.catalogue import refused_pairs, rule_origin
from tests.support.messages import Says

ROOT = Path(__file__).parents[2]
FLAGS = """
mixed-precision tf32 zero-1-memory-optimization zero-2-memory-optimization zero-3-memory-optimization
oss-memory-optimization oss-sdp-memory-optimization fsdp-memory-optimization tensor-model-parallel-size
pipeline-model-parallel-size sequence-parallel use-distributed-optimizer cpu-offload nvme-path checkpoint-activations
onnx-runtime-training torch-compile use-flash-attn num-experts moe-top-k optimizer data-iterator deepspeed-config
auto-strategy fused-linear-cross-entropy
"""


def test_every_flag_of_the_specification_is_declared_once() -> None:
    declared = [field.name for options in switch_options().values() for field in dataclasses.fields(options)]
    assert len(declared) == len(set(declared))
    assert {f"--{name}" for name in FLAGS.split()} <= set(map(spelling, declared))
    others = {field.name for section in SECTIONS.values() for field in dataclasses.fields(section)}
    assert others.isdisjoint(declared)


def test_every_module_of_the_folder_is_in_the_registry() -> None:
    folder = ROOT / "src/rapidformer_templates/switches"
    modules = (path.relative_to(folder) for path in folder.rglob("*.py"))  # git leaves empty folders
    places = {path.parts[0].removesuffix(".py") for path in modules if path.parts[0] != "__init__.py"}
    declaring = {switch.options.__module__.split(".")[2] for switch in REGISTRY.switches}
    assert declaring == places


def test_each_code_is_one_rule() -> None:
    rules = [*REGISTRY.rules, *(rule for switch in REGISTRY.switches for rule in switch.rules)]
    assert len({rule.code for rule in rules}) == len({id(rule) for rule in rules})


@pytest.fixture(scope="module")
def pairs() -> list[list[CompatibilityTable]]:
    return list(compatibility())


@pytest.mark.slow
def test_generated_documents_are_up_to_date(pairs: list[list[CompatibilityTable]]) -> None:
    page = (ROOT / "docs/parallelism.md").read_text(encoding="utf-8")
    for name, made in (
        *document.pages(pairs).items(),
        ("parallelism.md", document.filled(page, pairs)),
    ):
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == made, f"docs/{name}: run make docs"


@pytest.mark.slow
def test_every_pair_that_is_refused_has_a_rule_and_whose_it_is(pairs: list[list[CompatibilityTable]]) -> None:
    refused = [(rules, names) for rules, names in refused_pairs(pairs)]
    assert sum(len(names) for _, names in refused) == sum(not pair.templates for row in pairs for pair in row)
    reasons = {name: {rule_origin(rule) for rule in rules} for rules, names in refused for name in names}
    assert reasons["tensor-parallel × fsdp"] == {"documented"}
    assert reasons["context-parallel × onnx-runtime"] == {"of a package"}
    assert not any("own" in found for found in reasons.values())
    assert reasons["onnx-runtime × fsdp"] == {"of a package"}


@pytest.mark.parametrize("rule", REGISTRY.all_rules, ids=lambda rule: rule.code)
def test_explain_shows_an_example_its_answer_and_what_to_do_instead(rule: Rule) -> None:
    text = explain(rule.code)
    title, *sections = text.split("\n\n")
    assert title == f"{rule.code}: {rule.title}"
    found = {head: body for head, _, body in (section.partition("\n") for section in sections)}
    assert list(found) == ["Why", "Example", "What to do instead"]
    assert rule.title.endswith(".")
    assert rule.why[1:] in found["Why"]
    assert "[" not in found["Why"]
    assert rule.example in found["Example"]
    assert (f"error[{rule.code}]" if rule.refuses else "note:") in found["Example"]
    assert ("Nothing" in found["What to do instead"]) is not rule.refuses


@dataclass(frozen=True)
class MyFlags:
    """Mine"""

    margin: float = flag(0.5, "distance between classes")


def flags_in(text: str) -> set[str]:
    """Return the flags that a help text explains, one per entry."""
    return set(re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", text, re.MULTILINE))


def test_the_short_help_has_the_usual_flags_and_the_long_one_all(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--task", "causal_lm", "--help"]):
        assert main(words) == 0
        usual = flags_in(capsys.readouterr().out)
    main(["--help-all"])
    every = flags_in(capsys.readouterr().out)
    assert 25 <= len(usual) <= 32
    assert {"--task", "--lr", "--save", "--data-dir", "--lora-rank", "--mixed-precision"} < usual < every
    fields = {spelling(f.name) for f in parse([], REGISTRY.options()).fields()}
    assert fields <= every


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
