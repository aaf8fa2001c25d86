"""Files that people expect in a project (workflow, Dockerfiles, citation …), and the promises of SECURITY.md."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import rapidformer_templates
from tests.support.manual import ROOT

SOURCE = ROOT / "src/rapidformer_templates"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.M))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _steps(workflow: Any) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    workflow = _yaml(path)
    commands = [step["run"] for step in _steps(workflow) if "run" in step]
    made = [command.split()[1] for command in commands if command.startswith("make ")]
    assert made
    assert set(made) <= TARGETS
    assert [command for command in commands if not command.startswith(("make ", "sudo apt-get "))] == []
    actions = [step["uses"] for step in _steps(workflow) if "uses" in step]
    assert [action for action in actions if not re.fullmatch(r"actions/[a-z-]+@v\d+", action)] == []
    assert workflow["permissions"] == {"contents": "read"}


def test_the_citation_is_that_of_this_version() -> None:
    assert _yaml(ROOT / "CITATION.cff")["version"] == PROJECT["version"] == rapidformer_templates.__version__


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_what_exists(path: Path) -> None:
    copied = [word for line in re.findall(r"^COPY (.+)$", path.read_text("utf-8"), re.M) for word in line.split()[:-1]]
    assert copied
    assert [source for source in copied if not (ROOT / source).exists()] == []


def _tested_versions() -> list[list[str]]:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    table = page.partition("\n### Versions that were tested together\n")[2].partition("\n#")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    return rows[1:]


def test_the_table_of_tested_versions_is_that_of_the_constraints() -> None:
    rows = {name: (cpu, gpu) for name, cpu, gpu in _tested_versions()}
    assert len(rows) > 10
    assert {name: cpu for name, (cpu, _) in rows.items() if name != "Python"} == {
        name: PINNED[name] for name in rows if name != "Python"
    }
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    measured = re.search(r"One NVIDIA H200, torch ([\d.]+\d), transformers ([\d.]+\d)", page)
    assert measured is not None
    assert {name: gpu for name, (_, gpu) in rows.items() if gpu} == {"torch": measured[1], "transformers": measured[2]}


def _calls() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield (module, function, keyword arguments) of every call in the package."""
    for path in sorted(SOURCE.rglob("*.py")):
        if path.is_relative_to(SOURCE / "commands/examples"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg}
                yield str(path.relative_to(SOURCE)), ast.unparse(node.func), keywords


@pytest.mark.slow
def test_the_package_keeps_the_promises_of_security_md() -> None:
    calls = list(_calls())
    assert len(calls) > 5000
    loads = [(module, keywords) for module, name, keywords in calls if name == "torch.load"]
    assert loads
    assert [module for module, keywords in loads if keywords.get("weights_only") != "True"] == []
    unpickled = {module for module, name, _ in calls if re.fullmatch(r"(?:cloud)?pickle\.loads?", name)}
    assert len(unpickled) == 1, "only templates that a notebook sends to its own workers are pickles"
    assert [module for module, name, _ in calls if re.fullmatch(r"yaml\.(?:load|load_all|unsafe_load)", name)] == []
    assert [module for module, name, keywords in calls if keywords.get("trust_remote_code") == "True"] == []
    downloads = r"(?:.*\.)?(?:urlopen|urlretrieve|hf_hub_download|snapshot_download|load_dataset|upload_folder)"
    places = {(module, name.rpartition(".")[2]) for module, name, _ in calls if re.fullmatch(downloads, name)}
    assert places == {
        ("planning/hub.py", "snapshot_download"),
        ("data/finetuning/hub_cache.py", "load_dataset"),
        ("run/push_to_hub.py", "upload_folder"),
    }


def test_flags_that_run_code_are_not_read_from_files() -> None:
    from rapidformer_templates.planning.flags import LaunchFlags, ModelFlags

    metadata = {
        name: field.metadata
        for flags in (LaunchFlags, ModelFlags)
        for name, field in flags.__dataclass_fields__.items()
    }
    assert metadata["user_script"]["in_files"] is False
    assert metadata["trust_remote_code"]["in_files"] is False


def test_tests_compute_on_one_thread() -> None:
    """With more, small models are many times slower, and runs are not repeatable bit by bit."""
    assert torch.get_num_threads() == 1
