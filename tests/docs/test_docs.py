"""The documentation says what is true: links, flags, commands and their answers."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import _parser as evidence_parser
from rapidformer_templates.commands.bench.cli import _parser as bench_parser
from rapidformer_templates.commands.data import _parser as data_parser
from rapidformer_templates.commands.demo import _parser as demo_parser
from rapidformer_templates.commands.export import build_parser as export_parser
from rapidformer_templates.commands.main import PlanFlags, main
from rapidformer_templates.planning.config import build_parser
from rapidformer_templates.planning.registry import switch_options
from rapidformer_templates.trainer import Trainer

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
OTHERS = {  # flags of other programs, and those that examples declare
    "mlflow": ["--backend-store-uri"],
    "pip": ["--constraint", "--editable", "--no-deps"],
    "rapidformer": ["--build", "--help", "--markdown", "--version"],
    "ruff": ["--check"],
    "tensorboard": ["--logdir"],
    "torchrun": [
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--max-restarts",
        "--master-addr",
        "--master-port",
        "--nnodes",
        "--node-rank",
        "--nproc-per-node",
    ],
    "docs/bench.md": ["--tiny"],
    "docs/white-box.md": ["--temperature"],
}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path, language: str) -> Iterator[str]:
    """The fenced blocks of a language."""
    yield from re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def _commands(page: Path) -> Iterator[str]:
    """The commands of its shell blocks, each on one line."""
    for block in (*_blocks(page, "bash"), *_blocks(page, "console")):
        yield from (line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines())


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _flags(command)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), target
        if anchor:
            assert anchor in _anchors(found), target


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_flags_exist(page: Path) -> None:
    own = build_parser("rapidformer", switch_options().values(), PlanFlags, "")
    known = {
        flag
        for parser in (own, bench_parser(), evidence_parser(), data_parser(), demo_parser(), export_parser())
        for flag in _flags(parser)
    }
    known |= {flag for flags in OTHERS.values() for flag in flags}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", page.read_text(encoding="utf-8")))
    assert named - known == set()


PLANS = [(page, command) for page in PAGES for command in _commands(page) if command.startswith("rapidformer plan")]


@pytest.mark.parametrize(
    ("page", "command"), PLANS, ids=lambda value: _name(value) if isinstance(value, Path) else None
)
def test_plans_succeed(
    page: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err


ANSWERS = [(page, block) for page in PAGES for block in _blocks(page, "text") if block.startswith("$ rapidformer ")]


@pytest.mark.parametrize(
    ("page", "block"), ANSWERS, ids=lambda value: _name(value) if isinstance(value, Path) else None
)
def test_answers_are_those_that_are_shown(page: Path, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, shown = block.partition("\n")
    main(shlex.split(command.removeprefix("$ "))[1:])
    answer = capsys.readouterr()
    assert answer.out + answer.err == shown


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_python_blocks_are_python(page: Path) -> None:
    for block in _blocks(page, "python"):
        ast.parse(block)


def test_readme_shows_plans_and_an_answer() -> None:
    assert any(page.name == "README.md" for page, _ in PLANS)
    assert any(page.name == "README.md" for page, _ in ANSWERS)


def test_every_hook_is_described() -> None:
    text = (ROOT / "docs/white-box.md").read_text(encoding="utf-8")
    hooks = [name for name in vars(Trainer) if name.startswith(("build_", "compute_", "count_", "on_", "read_"))]
    assert len(hooks) >= 14
    assert [name for name in hooks if f"{name}(self" not in text] == []


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for page in PAGES:
        named = {command.split()[1] for command in _commands(page) if command.startswith("make ")}
        assert named <= targets


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["dev"], *extras["deepspeed"], *extras["fairscale"]]
    names = {re.split(r"[<>=!\[ ]", requirement)[0].lower().replace("_", "-") for requirement in needed}
    assert names - pinned == set()
    assert "torch==2.13.0" in lines
