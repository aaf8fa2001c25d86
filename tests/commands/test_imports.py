"""Commands import only what they use: a mistake is reported before torch is imported."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.run.early_checks import refuse_mistakes_of_script
from scripts.mistakes import FILES

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
    (folder / "three.yaml").write_text("micro_batch_sise: 3\nlearning_rate: 1e-3\ntask: causal_lmm\n")
    (folder / "twice.yaml").write_text("lr: 1e-3\ntask: causal_lm\nlr: 1e-4\n")
    (folder / "fault.yaml").write_text("lr: 1e-3\n task: causal_lm\n")
    model = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
    (folder / "trained" / "export").mkdir(parents=True)
    (folder / "trained" / "plan.json").write_text('{"values": {}}')
    (folder / "trained" / "export" / "config.json").write_text(json.dumps(model))
    (folder / "trained" / "export" / "model.safetensors").write_text("")
    return folder


RUN = "--task causal_lm --lr 1e-3 --epochs 1 --device cpu --data-dir {0}/data"
RIGHT = RUN + " --model-type gpt2"
PREDICT = "predict {0}/trained --input {0}/data/train.csv --output {0}/out.jsonl"

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
    RIGHT + " --no-save --foo 1 --bar --micro-batch-size 1.5": "unknown flag --bar",
    "--config {0}/three.yaml": "unknown key 'learning_rate' (three.yaml:2): did you mean lr?",
    "--config {0}/twice.yaml": "'lr' is there twice\n  where  twice.yaml:3\n  help   it is also in twice.yaml:1",
    "--config {0}/fault.yaml": "where  fault.yaml:2",
    RUN + " --no-save": "no model is named",
    RUN + " --no-save --pretrained-model-name-or-path {0}/nowhere": "nowhere\n  where  --pretrained-model-name-or-path",
    RUN + " --no-save --pretrained-model-name-or-path {0}/data": "there is no config.json in",
    RUN + " --no-save --pretrained-model-name-or-path {0}/run/../trained/export --load {0}/no": "no does not exist",
    RIGHT + " --no-save --tokenizer-path {0}/nowhere": "nowhere\n  where  --tokenizer-path",
    RIGHT + " --no-save --tokenizer-type GPT2BPETokenizer --vocab-file {0}/nowhere": "nowhere does not exist",
    RIGHT + " --no-save --tokenizer-path {0}/data --text-column txt": "there is no column 'txt' in",
    "--task pretraining --model-type gpt2 --lr 1 --train-iters 1 --no-save --device cpu": "no corpus is named",
    "evaluate {0}/trained --data-dir {0}/nowhere --data-name x": "nowhere does not exist",
    "evaluate {0}/trained --mixed-precision bf17 --foo": "unknown flag --foo",
    PREDICT + " --text-column words": "there is no column 'words' in",
    PREDICT + " --temperature -1 --max-new-tokens 0": "--temperature must be at least 0, not -1.0",
    "chat {0}/trained --temperature inf": "--temperature must be a finite number, not inf",
    "chat {0}/trained": "a model for sequence_classification does not chat",
    "bench nothing": "run, mfu, calibrate, and no nothing",
}
"""Command lines, each with a part of its error message."""


def test_mistakes_are_reported_before_torch_is_imported(folder: Path) -> None:
    for line, (status, text, imported) in zip(MISTAKES, _run([line.format(folder) for line in MISTAKES]), strict=True):
        assert status == 2, (line, text)
        assert MISTAKES[line] in text, (line, text)
        assert imported == [], line
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["plan.json"]


def test_a_mistyped_flag_of_a_script_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(FILES["plain.py"])
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")  # Python finds it before the real one
    for words, message in (
        (
            "--micro-batch-sise 3",
            "unknown flag --micro-batch-sise\n  where  command line\n  help   did you mean --micr",
        ),
        ("--lr -1", "--lr must be at least 0"),
    ):
        command = [sys.executable, "job.py", *words.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(f"error: {message}")
    done = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == "torch is imported\n"


@pytest.mark.parametrize(
    "change",
    [
        ("class Job", "import argparse\n\n\nclass Job"),
        ("    pass", "    Flags = Mine"),
        ("(Finetuner)", "(Base)"),
        ("    Job.main(lr=0.1)", "    if ready:\n        Job.main(lr=0.1)"),
        ("Job.main(lr=0.1)", "Job([]).fit()"),
        ("Job.main(lr=0.1)", "Job.main(lr=0.1"),
    ],
    ids=lambda change: change[1].strip(),
)
def test_a_script_that_may_have_other_flags_is_left_alone(change: tuple[str, str], tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(FILES["plain.py"])
    with pytest.raises(ConfigError, match="unknown flag --foo"):
        refuse_mistakes_of_script(str(script), ["--foo"])
    refuse_mistakes_of_script(str(script), ["--foo", "--help"])
    script.write_text(FILES["plain.py"].replace(*change))
    refuse_mistakes_of_script(str(script), ["--foo"])


QUICK = (
    "--help", "--help-all", "plan --help", "doctor --help", "--version", "explain RF006",
    "plan --task causal_lm --fsdp-memory-optimization --world-size 2",
    "data --help", "evaluate --help", "predict --help", "chat --help", "export --help", "bench --help", "schema",
    "convert --help", "convert {0}/arguments.yaml",
)  # fmt: skip


def test_commands_that_compute_nothing_import_nothing_for_it(folder: Path) -> None:
    for line, (status, text, imported) in zip(QUICK, _run([line.format(folder) for line in QUICK]), strict=True):
        assert (status, imported) == (0, []), (line, text)


UNUSED = ("datasets", "deepspeed", "matplotlib", "pandas", "peft", "seqeval", "sklearn")


@pytest.mark.slow
def test_a_run_without_tables_and_evaluations_imports_nothing_for_them() -> None:
    program = f"import rapidformer_templates.trainer, sys; sys.exit(str(set({UNUSED}) & set(sys.modules) or '') or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
