"""Every command in the manual is planned or parsed here, or a table shows which test runs it or what it needs."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from rapidformer_templates.commands.bench.cli import build_parser as bench_parser
from rapidformer_templates.commands.convert.cli import build_parser as convert_parser
from rapidformer_templates.commands.data import build_parser as data_parser
from rapidformer_templates.commands.demo import build_parser as demo_parser
from rapidformer_templates.commands.demo import new_parser
from rapidformer_templates.commands.export import build_parser as export_parser
from rapidformer_templates.commands.plan import plan_request
from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES
from rapidformer_templates.planning.resolve import resolve
from tests.support.manual import PAGES, ROOT, commands, name

ELSEWHERE = {
    r"pip install": "needs the network; tests/docs/test_docs.py holds the extras",
    r"hf (download|upload)|python -c 'import datasets": "needs the network; tests/run/test_hub.py",
    r"(\.venv/bin/)?python -m pytest": "the tests themselves",
    r"cat |head |rm -r |python3 -m venv|\. \.venv/bin/activate|case \$\?|eval ": "the shell's",
    r"make |\.ci/run": "what runs the tests; tests/docs/test_docs.py holds the targets",
    r"python -m benchmarks": "tests/benchmarks",
    r"(\.venv/bin/)?python -m tests\.support\.covering": "tests/switches/test_pairs.py reads what it writes",
    r"python scripts/gpu_check": "needs a GPU; tests/scripts/test_gpu_check.py",
    r"python scripts/compare_older": "needs an older checkout; tests/scripts/test_compare_older.py",
    r"python scripts/resume_older": "needs the history; tests/scripts/test_resume_older.py",
    r"(torchrun --nproc-per-node 2 |python )examples/": "tests/docs/test_examples.py",
    r"python smoothed.py": "the flags of the black box, tests/docs/test_examples.py",
    r"python (focal|slow_embeddings|odd_ones).py": "tests/docs/test_examples.py",
    r"python my_task.py": "tests/commands/test_new.py",
    r"rapidformer evaluate ": "tests/commands/test_evaluate.py",
    r"rapidformer predict ": "tests/commands/test_predict.py",
    r"rapidformer chat ": "tests/commands/test_chat.py",
    r"rapidformer plan --auto-strategy --device-file": "tests/switches/auto_strategy/test_device_file.py",
    r"rapidformer doctor": "tests/commands/test_doctor.py",
    r"rapidformer --task TASK": "a form, not a command",
}
"""Commands that are not tested here, by their beginning, with the test that runs them or what they need."""

PARSERS = {
    "bench": bench_parser, "convert": convert_parser, "data": data_parser, "demo": demo_parser, "export": export_parser,
    "new": new_parser,
}  # fmt: skip
TRAINING = r"(?:\w+=\S+ )*(?:rapidformer (?:plan )?(?=-|…)|torchrun .*? -m rapidformer_templates )"
COMMANDS = sorted({(command.strip(), name(page)) for page in PAGES for command in commands(page)})
WORKERS = re.compile(r"--nnodes (\d+).*--nproc-per-node (\d+)")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with the files that the commands name."""
    for folder in ("FOLDER", "gpt2", "bert-base-uncased", "Qwen/Qwen2.5-0.5B-Instruct"):
        (tmp_path / folder).mkdir(parents=True)
        sizes = {"model_type": "gpt2", "n_layer": 8, "n_head": 8, "n_embd": 64, "architectures": ["GPT2LMHeadModel"]}
        (tmp_path / folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    for file in ("my.yaml", "pretrain.yaml"):
        (tmp_path / file).write_text("task: pretraining\nmodel_type: gpt2\nsave: runs/mine\n", encoding="utf-8")
    (tmp_path / "ours.yaml").write_text("task: causal_lm\nmixed-precision: bf16\nsave: runs/ours\n", encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _handler(command: str) -> Callable[[str], None] | None:
    if any(re.match(start, command) for start in ELSEWHERE):
        return _elsewhere
    if re.match(TRAINING, command):
        return _planned
    if re.match(rf"(\w+=\$\()?rapidformer ({'|'.join(PARSERS)})\b", command):
        return _parsed
    return None


@pytest.mark.parametrize(("command", "page"), COMMANDS)
def test_each_command_is_tried_or_says_who_does(command: str, page: str, desk: Path) -> None:
    handler = _handler(command)
    assert handler, f"{page}: say in ELSEWHERE of this test who runs '{command}', or what it needs"
    handler(command)


def _elsewhere(command: str) -> None:
    """Do nothing: the table shows what tests this command."""


def _planned(command: str) -> None:
    """Assert that all rules accept its flags if all packages are installed.

    The tests of auto-strategy (tests/switches/auto_strategy) search for layouts.
    """
    words = shlex.split(re.sub(TRAINING, "", command).replace("$MODEL", "FOLDER").replace("…", ""), comments=True)
    workers = WORKERS.search(command)
    if workers and command.startswith("torchrun"):
        words += ["--world-size", str(int(workers[1]) * int(workers[2])), "--local-world-size", workers[2]]
    config, machine, _ = plan_request(words)
    machine = dataclasses.replace(machine, packages=dict.fromkeys(OPTIONAL_PACKAGES, "999.0"))
    assert resolve(config, machine)


def _parsed(command: str) -> None:
    _, program, *words = shlex.split(re.sub(r"^\w+=\$\((.*)\)$", r"\1", command).replace("…", ""), comments=True)
    _, unknown = PARSERS[program]().parse_known_args(words)
    assert not unknown or words[0] in ("run", "mfu")  # flags of the measured training command
