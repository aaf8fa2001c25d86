"""Commands import only what they use: a mistake is reported before torch is imported."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.run.early_checks import refuse_mistakes_of_script
from tests.support.messages import Says
from tests.support.selection import by_default

HEAVY = (
    "accelerate", "datasets", "deepspeed", "matplotlib", "numpy", "pandas", "peft", "pyarrow", "scipy", "sklearn",
    "tokenizers", "torch", "transformers",
)  # fmt: skip

SCRIPT = """from rapidformer_templates import Finetuner


class Job(Finetuner):
    pass


if __name__ == "__main__":
    Job.main(lr=0.1)
"""

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
    (folder / "tab.yaml").write_text("task: causal_lm\n\tlr: 1e-3\n")
    model = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
    (folder / "half").mkdir()
    (folder / "half" / "config.json").write_text(json.dumps(model))
    (folder / "trained" / "export").mkdir(parents=True)
    (folder / "trained" / "plan.json").write_text('{"values": {}}')
    (folder / "trained" / "export" / "config.json").write_text(json.dumps(model))
    (folder / "trained" / "export" / "model.safetensors").write_text("")
    return folder


RUN = "--task causal_lm --lr 1e-3 --epochs 1 --device cpu --data-dir {0}/data"
RIGHT = RUN + " --model-type gpt2"
PREDICT = "predict {0}/trained --input {0}/data/train.csv --output {0}/out.jsonl"

MISTAKES = (
    "--task causal_lm --micro-batch-sise 3", "--task causal_lm --micro-batch-size three", "--micro-batch-size 0",
    "--config {0}/unknown.yaml", "--config {0}/script.yaml", "--config {0}/none.yaml",
    "--task causal_lm --epochs 1 --no-save --device cpu",
    RIGHT + " --no-save --zero-3-memory-optimization --fsdp-memory-optimization",
    "--task causal_lm --lr 1 --epochs 1 --no-save --device cuda:1",
    "--task causal_lmm --lr 1 --epochs 1 --no-save --device cpu",
    RIGHT + " --save {0}/run", RIGHT + " --save {0}/run --nproc-per-node 2",
    RIGHT + " --save {0}/run --resume --overwrite", RIGHT + " --save {0}/run --overwrite --load {0}/run/plan.json",
    RIGHT + " --save {0}/unknown.yaml", RIGHT + " --no-save --resume", RIGHT + " --no-save --profile 3",
    RIGHT + " --no-save --mask-prob 0.2", RIGHT + " --no-save --split 9,1",
    RIGHT + " --no-save --metric-for-best blue --metric-for-best-mode min",
    RIGHT + " --no-save --data-name nowhere", RIGHT + " --no-save --evaluate-test",
    "evaluate {0}/nowhere", "evaluate {0}/run", "evaluate {0}/run --parrt test", "predict {0}/nowhere",
    "predict {0}/run --temperature -1", "chat {0}/data", "export {0}/nowhere", "convert {0}/none.yaml",
    "convert {0}/script.yaml", "doctr", RIGHT + " --no-save --foo 1 --bar --micro-batch-size 1.5",
    "--config {0}/three.yaml", "--config {0}/twice.yaml", "--config {0}/fault.yaml", RUN + " --no-save",
    RUN + " --no-save --pretrained-model-name-or-path {0}/nowhere",
    RUN + " --no-save --pretrained-model-name-or-path {0}/data",
    RUN + " --no-save --pretrained-model-name-or-path {0}/run/../trained/export --load {0}/no",
    RIGHT + " --no-save --tokenizer-path {0}/nowhere",
    RIGHT + " --no-save --tokenizer-type GPT2BPETokenizer --vocab-file {0}/nowhere",
    RIGHT + " --no-save --tokenizer-path {0}/data --text-column txt",
    "--task pretraining --model-type gpt2 --lr 1 --train-iters 1 --no-save --device cpu",
    "evaluate {0}/trained --data-dir {0}/nowhere --data-name x", "evaluate {0}/trained --mixed-precision bf17 --foo",
    PREDICT + " --text-column words", PREDICT + " --temperature -1 --max-new-tokens 0",
    "chat {0}/trained --temperature inf", "chat {0}/trained", "bench nothing",
    RIGHT + " --no-save --lrr 1 --data-dir nowhere", RIGHT + " --no-save --epochs", RIGHT + " --no-save my words",
    RIGHT + " --no-save --epochs 0 --lr -1", RIGHT + " --no-save --clip-grad inf", "--user-script none.py",
    "--config {0}/tab.yaml", RUN + " --no-save --pretrained-model-name-or-path {0}/half",
    PREDICT + " --micro-batch-size 0",
    # Programs of others, and slips
    RIGHT + " --device gpu", RIGHT + " --device metal", "job.yaml", "train.py", RIGHT + " --cutoff_len 8",
    RIGHT + " --sequence_len 8", RIGHT + " --finetuning_type lora", RIGHT + " --sample_packing true",
    RIGHT + " --beta 0.1", RIGHT + " --hub_model_id me/model", f"plan {RIGHT} --validation-fraction 5",
    f"plan {RIGHT} --lora-rank 2 --lora-alpha -1", "pln --tf32", "train", "fit --task causal_lm --lr 1e-4",
    "plan --tf31", "plan --lr -1e-4 --task causal_lm", "plan --lr -.5 --task causal_lm", "plan --task classification",
    "plan --optimizer sgd", "plan --lr-decay-style step", "explain RF999",
    "switches --json", "doctor --jsn", "doctor --build cpu_adm", "completion ksh", "bench run --turns=0",
    "bench mfu --steps-a-turn=-2", "convert none.yaml --world-size=many",
    "data tokenizer --input none.txt --output folder --vocab-size=1.5", "demo --held-out=0",
)  # fmt: skip


def test_mistakes_are_reported_before_torch_is_imported(folder: Path, says: Says) -> None:
    for line, (status, text, imported) in zip(MISTAKES, _run([line.format(folder) for line in MISTAKES]), strict=True):
        assert (status, imported) == (2, []), (line, text)
        says.text(f"rapidformer {line.format('DESK')}\n{text}", DESK=folder)
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["plan.json"]


def test_a_mistyped_flag_of_a_script_is_reported_before_torch_is_imported(tmp_path: Path, says: Says) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")  # Python finds it before the real one
    for words, status in (("--micro-batch-sise 3", 2), ("", 1)):
        command = [sys.executable, "job.py", *words.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        says.text(done.stderr)


@pytest.mark.parametrize(
    "change",
    [
        ("class Job", "import argparse\n\n\nclass Job"), ("    pass", "    Flags = Mine"), ("(Finetuner)", "(Base)"),
        ("    Job.main(lr=0.1)", "    if ready:\n        Job.main(lr=0.1)"), ("Job.main(lr=0.1)", "Job([]).fit()"),
        ("Job.main(lr=0.1)", "Job.main(lr=0.1"),
    ],
    ids=lambda change: change[1].strip(),
)  # fmt: skip
def test_a_script_that_may_have_other_flags_is_left_alone(change: tuple[str, str], tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    with pytest.raises(ConfigError, match="unknown flag --foo"):
        refuse_mistakes_of_script(str(script), ["--foo"])
    refuse_mistakes_of_script(str(script), ["--foo", "--help"])
    script.write_text(SCRIPT.replace(*change))
    refuse_mistakes_of_script(str(script), ["--foo"])


QUICK = (
    "--help", "--help-all", "plan --help", "doctor --help", "--version", "explain RF006", "switches",
    "plan --task causal_lm --fsdp-memory-optimization --world-size 2",
    "data --help", "evaluate --help", "predict --help", "chat --help", "export --help", "bench --help", "schema",
    "convert --help", "convert {0}/arguments.yaml",
)  # fmt: skip


def test_commands_that_compute_nothing_import_nothing_for_it(folder: Path) -> None:
    for line, (status, text, imported) in zip(QUICK, _run([line.format(folder) for line in QUICK]), strict=True):
        assert (status, imported) == (0, []), (line, text)


UNUSED = {
    "rapidformer_templates.trainer": "datasets deepspeed matplotlib pandas peft seqeval sklearn",
    "rapidformer_templates.data.text.encoding": "torch transformers datasets pyarrow",  # each worker of preprocessing
}


@pytest.mark.slow
@pytest.mark.parametrize("module", by_default(["rapidformer_templates.data.text.encoding"], UNUSED))
def test_a_module_does_not_import_what_few_runs_use(module: str) -> None:
    program = f"import {module}, sys; sys.exit(str(set({UNUSED[module].split()}) & set(sys.modules) or '') or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
