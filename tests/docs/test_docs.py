"""The documentation is correct: links, flags, commands and their output."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.__main__ import build_parser as evidence_parser
from rapidformer_templates.commands.completion import whole_parser
from rapidformer_templates.commands.main import main
from rapidformer_templates.trainer import Trainer
from tests.support.manual import PAGES, ROOT, blocks, commands, name

START = ROOT / "docs/index.md"
MADE = ("reference/", "switches/")  # generated with the site. tests/docs/test_site.py follows every link there
OTHERS = {  # flags of other programs, and flags that examples declare
    "hf": ["--private"],
    "mlflow": ["--backend-store-uri"],
    "pip": ["--constraint", "--editable", "--index-url", "--no-deps"],
    "pytest": ["--write-messages"],
    "rapidformer": ["--help", "--help-all", "--version"],
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
        "--standalone",
    ],
    "docs/bench.md": ["--tiny"],
    "docs/white-box.md": ["--temperature"],
}


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _flags(command)


def test_relative_links_lead_somewhere() -> None:
    links = [(page, target) for page in PAGES for target in _links(page)]
    assert len(links) > 200
    assert [f"{name(page)}: {target}" for page, target in links if not _leads_somewhere(page, target)] == []


def _links(page: Path) -> Iterator[str]:
    """Yield the link targets that are files of the repository."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target) and not (page == START and target.startswith(MADE)):
            yield target


def _leads_somewhere(page: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    goal = page.parent / file if file else page
    return goal.exists() and (not anchor or anchor in _anchors(goal))


@cache
def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_flags_exist() -> None:
    known = {flag for parser in (whole_parser(), evidence_parser()) for flag in _flags(parser)}
    known |= {flag for flags in OTHERS.values() for flag in flags}
    texts = {name(page): page.read_text(encoding="utf-8") for page in PAGES}
    named = {page: set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", text)) for page, text in texts.items()}
    assert len(set().union(*named.values())) > 140
    assert {page: flags - known for page, flags in named.items() if flags - known} == {}


IN_CODE = {  # flags of other programs that only code and examples name, and beginnings of flags
    "deepspeed": ["--master", "--port", "--worker"],
    "git": ["--name-only"],
    "nvidia-smi": ["--format", "--query-gpu"],
    "pip": ["--no-build-isolation"],
    "slurm": [
        "--cpus-per-task", "--gpus-per-node", "--job-name", "--kill-on-bad-exit", "--nodes", "--ntasks-per-node",
        "--open-mode", "--requeue", "--signal", "--time",
    ],
    "trackers": ["--project", "--name"],
    "examples": ["--words"],
    "beginnings": ["--adam-", "--no-", "--oss", "--zero", "--zero-", "--zero-1-", "--zero-3-"],
    "other spellings": ["--micro_batch_size"],
}  # fmt: skip


def test_flags_in_code_and_examples_exist() -> None:
    known = {flag for parser in (whole_parser(), evidence_parser()) for flag in _flags(parser)}
    known |= {flag for flags in (*OTHERS.values(), *IN_CODE.values()) for flag in flags}
    folders = [ROOT / "src", ROOT / "examples", ROOT / "docs", ROOT / "benchmarks"]
    kinds = (".py", ".toml", ".sh", ".yaml", ".sbatch", ".ipynb", ".md")
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in kinds and file.is_file()]
    files += [ROOT / "CONTRIBUTING.md", ROOT / "README.md", ROOT / "CHANGELOG.md"]
    named = {
        str(file.relative_to(ROOT)): set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", file.read_text(encoding="utf-8")))
        for file in files
    }
    assert {file: flags - known for file, flags in named.items() if flags - known} == {}


PLANS = [
    pytest.param(page, command, marks=pytest.mark.longer if "--auto-strategy" in command else ())
    for page in PAGES
    for command in commands(page)
    if command.startswith("rapidformer plan") and "…" not in command
]


@pytest.mark.parametrize(("page", "command"), PLANS, ids=lambda value: name(value) if isinstance(value, Path) else None)
def test_plans_succeed(
    page: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands read examples of this checkout, but write elsewhere."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err


ANSWERS = [(page, block) for page in PAGES for block in blocks(page, "text") if block.startswith("$ rapidformer ")]


@pytest.mark.parametrize(("page", "block"), ANSWERS, ids=lambda value: name(value) if isinstance(value, Path) else None)
def test_answers_are_those_that_are_shown(page: Path, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, shown = block.partition("\n")
    main(shlex.split(command.removeprefix("$ "))[1:])
    answer = capsys.readouterr()
    assert answer.out + answer.err == shown


def test_python_blocks_are_python() -> None:
    all_blocks = [(page, block) for page in PAGES for block in blocks(page, "python")]
    assert len(all_blocks) > 20
    for page, block in all_blocks:
        ast.parse(block, filename=name(page))


def test_pages_are_short() -> None:
    lines = {name(page): len(page.read_text(encoding="utf-8").splitlines()) for page in PAGES}
    assert lines["README.md"] <= 120
    assert {page: n for page, n in lines.items() if page.startswith("docs/") and n > 400} == {}


def test_readme_shows_plans_and_an_answer() -> None:
    assert any(plan.values[0].name == "README.md" for plan in PLANS)
    assert any(page.name == "README.md" for page, _ in ANSWERS)


def test_every_hook_is_described() -> None:
    text = (ROOT / "docs/white-box.md").read_text(encoding="utf-8")
    hooks = [name for name in vars(Trainer) if name.startswith(("build_", "compute_", "count_", "on_", "read_"))]
    assert len(hooks) >= 14
    assert [name for name in hooks if f"{name}(self" not in text] == []


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for page in PAGES:
        named = {command.split()[1] for command in commands(page) if command.startswith("make ")}
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
