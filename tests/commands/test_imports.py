"""Commands import only what they use: a mistake is reported before torch is imported."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "accelerate", "datasets", "deepspeed", "matplotlib", "numpy", "pandas", "peft", "pyarrow", "scipy", "sklearn",
    "tokenizers", "torch", "transformers",
)  # fmt: skip

PROGRAM = """
import contextlib, io, json, sys
from rapidformer_templates.commands.main import main

heavy, told = json.loads(sys.argv[1]), []
for words in json.loads(sys.argv[2]):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code or 0
    told.append((status, text.getvalue(), sorted(set(heavy) & set(sys.modules))))
print(json.dumps(told))
"""
"""Run command lines one after the other and print the status, the output and the imported packages of each."""


def _run(lines: list[str], heavy: tuple[str, ...] = HEAVY) -> list[tuple[int, str, list[str]]]:
    """Return (status, text, imported packages) of each command line. All run in one new process."""
    words = json.dumps([shlex.split(line) for line in lines])
    command = [sys.executable, "-c", PROGRAM, json.dumps(heavy), words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(status, text, imported) for status, text, imported in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run, its data, and files with mistakes."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "run").mkdir()
    (folder / "run" / "plan.json").write_text("{}")
    (folder / "data").mkdir()
    (folder / "data" / "train.csv").write_text("text\na b\n")
    (folder / "unknown.yaml").write_text("task: causal_lm\nmicro_batch_sise: 3\n")
    (folder / "arguments.yaml").write_text("output_dir: out\nlearning_rate: 1e-4\n")
    (folder / "script.yaml").write_text("user_script: train.py\n")
    return folder


RIGHT = "--task causal_lm --model-type gpt2 --lr 1e-3 --epochs 1 --device cpu --data-dir {0}/data"

MISTAKES = {
    "--task causal_lm --micro-batch-sise 3": "did you mean --micro-batch-size?",
    "--task causal_lm --micro-batch-size three": "--micro-batch-size needs",
    "--micro-batch-size 0": "--micro-batch-size must be at least 1, not 0",
    "--config {0}/unknown.yaml": "did you mean micro_batch_size?",
    "--config {0}/script.yaml": "a file cannot set user_script",
    "--config {0}/none.yaml": "none.yaml",
    "--task causal_lm --epochs 1 --no-save --device cpu": "--lr",
    RIGHT + " --no-save --zero-3-memory-optimization --fsdp-memory-optimization": "error[RF",
    "--task causal_lm --lr 1 --epochs 1 --no-save --device cuda:1": "'cuda:1' is a single device",
    "--task causal_lmm --lr 1 --epochs 1 --no-save --device cpu": "--task cannot be 'causal_lmm'",
    RIGHT + " --save {0}/run": "already holds a run (plan.json)",
    RIGHT + " --save {0}/run --nproc-per-node 2": "already holds a run (plan.json)",
    RIGHT + " --save {0}/run --resume --overwrite": "--resume continues the run that --overwrite deletes",
    RIGHT + " --save {0}/run --overwrite --load {0}/run/plan.json": "--overwrite would delete what --load reads",
    RIGHT + " --save {0}/unknown.yaml": "is a file",
    RIGHT + " --no-save --resume": "--resume has no effect without --save",
    RIGHT + " --no-save --profile 3": "--profile needs --save",
    RIGHT + " --no-save --mask-prob 0.2": "the task causal_lm does not use --mask-prob",
    RIGHT + " --no-save --split 9,1": "the task causal_lm does not use --split",
    RIGHT + " --no-save --metric-for-best blue --metric-for-best-mode min": "causal_lm has no metric 'blue'",
    RIGHT + " --no-save --data-name nowhere": "nowhere",
    RIGHT + " --no-save --evaluate-test": "the data set has no test part",
    "evaluate {0}/nowhere": "nowhere does not exist",
    "evaluate {0}/run": "holds no exported model",
    "evaluate {0}/run --parrt test": "--parrt",
    "predict {0}/nowhere": "nowhere does not exist",
    "predict {0}/run --temperature -1": "holds no exported model",
    "chat {0}/data": "is neither a run folder nor a model",
    "export {0}/nowhere": "nowhere",
    "convert {0}/none.yaml": "none.yaml does not exist",
    "convert {0}/script.yaml": "are not those of a training configuration",
    "doctr": "did you mean doctor?",
}
"""Command lines, each with a part of its error message."""


def test_mistakes_are_reported_before_torch_is_imported(folder: Path) -> None:
    for line, (status, text, imported) in zip(MISTAKES, _run([line.format(folder) for line in MISTAKES]), strict=True):
        assert status == 2, (line, text)
        assert MISTAKES[line] in text, (line, text)
        assert imported == [], line
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["plan.json"]


QUICK = (
    "--help", "--version", "explain RF006", "plan --task causal_lm --fsdp-memory-optimization --world-size 2",
    "data --help", "evaluate --help", "predict --help", "chat --help", "export --help", "bench --help", "schema",
    "convert --help", "convert {0}/arguments.yaml",
)  # fmt: skip


def test_commands_that_compute_nothing_import_nothing_for_it(folder: Path) -> None:
    for line, (status, text, imported) in zip(QUICK, _run([line.format(folder) for line in QUICK]), strict=True):
        assert (status, imported) == (0, []), (line, text)


UNUSED = ("datasets", "deepspeed", "matplotlib", "pandas", "peft", "seqeval", "sklearn")


def test_a_run_without_tables_and_evaluations_imports_nothing_for_them() -> None:
    program = f"import rapidformer_templates.trainer, sys; sys.exit(str(set({UNUSED}) & set(sys.modules) or '') or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
