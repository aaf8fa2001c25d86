"""The catalogue: every switch of the specification, declared once, and the documents made from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rapidformer_templates.commands.catalogue import CompatibilityTable, compatibility
from rapidformer_templates.commands.explain import explain
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.registry import DOCUMENTS, REGISTRY, in_words, sources_of, switch_options
from rapidformer_templates.planning.switch import Rule
from scripts.manual import catalogue as document
from scripts.manual.catalogue import refused_pairs, rule_origin

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


def test_switches_come_by_their_precedence() -> None:
    precedences = [switch.precedence for switch in REGISTRY.switches]
    assert precedences == sorted(precedences)


def test_each_code_is_one_rule() -> None:
    rules = [*REGISTRY.rules, *(rule for switch in REGISTRY.switches for rule in switch.rules)]
    assert len({rule.code for rule in rules}) == len({id(rule) for rule in rules})


@pytest.fixture(scope="module")
def pairs() -> list[list[CompatibilityTable]]:
    return list(compatibility(REGISTRY))


@pytest.mark.slow
def test_generated_documents_are_up_to_date(pairs: list[list[CompatibilityTable]]) -> None:
    page = (ROOT / "docs/parallelism.md").read_text(encoding="utf-8")
    for name, made in (
        *document.pages(REGISTRY, pairs).items(),
        ("parallelism.md", document.filled(page, REGISTRY, pairs)),
    ):
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == made, f"docs/{name}: run make docs"


@pytest.mark.slow
def test_every_pair_that_is_refused_has_a_rule_and_whose_it_is(pairs: list[list[CompatibilityTable]]) -> None:
    refused = [(rules, names) for rules, names in refused_pairs(REGISTRY, pairs)]
    assert sum(len(names) for _, names in refused) == sum(not pair.templates for row in pairs for pair in row)
    reasons = {name: {rule_origin(rule) for rule in rules} for rules, names in refused for name in names}
    assert reasons["tensor-parallel × fsdp"] == {"documented"}
    assert reasons["context-parallel × onnx-runtime"] == {"of a package"}
    assert not any("own" in found for found in reasons.values())
    assert reasons["onnx-runtime × fsdp"] == {"of a package"}


@pytest.mark.parametrize("rule", REGISTRY.all_rules, ids=lambda rule: rule.code)
def test_explain_shows_an_example_its_answer_and_what_to_do_instead(rule: Rule) -> None:
    text = explain(rule.code, REGISTRY)
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


def test_sources_are_words() -> None:
    known = {part for rule in REGISTRY.all_rules for part in sources_of(rule.source)}
    assert known >= DOCUMENTS.keys() - {"B"}
    for part in known:
        assert len(in_words(f"[{part}]")) > 3
    assert in_words("[R, torch]") == "Rapidformer parameter reference, torch"
