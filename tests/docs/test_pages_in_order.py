"""The commands of each page run in the page's order, on small files in a scratch folder.

A command is only left out with a reason of :data:`NOT_RUN`. ``tests/docs/test_docs.py`` plans or parses it.
"""

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from rapidformer_templates.commands.main import main
from rapidformer_templates.run import scripts
from tests.support.desk import converted_files, lay_out, save_models
from tests.support.manual import PAGES, RECIPES, ROOT, name, steps
from tests.support.programs import one_thread, run_script

pytestmark = [pytest.mark.docs, pytest.mark.slow]

NOT_RUN = {
    r"pip install|hf download": "needs the network",
    r"python3 -m venv|\. \.venv|eval |case ": "prepares the shell of the reader",
    r"make |\.ci/run|\.venv/bin/": "runs the tests themselves",
    r"python -m benchmarks|python scripts/|rapidformer bench": "measures for minutes: tests/benchmarks",
    r"torchrun --nnodes|torchrun .*HOST": "needs several machines",
    r"rapidformer plan": "tests/docs/test_docs.py",
    r".*--auto-strategy": "searches for seconds: tests/docs/test_docs.py",
    r".*…|rapidformer --task TASK|.* RUN\b|.*export sft --merge": "a form with parts that the reader chooses",
    r"rapidformer doctor": "imports every package: tests/commands/test_doctor.py",
    r"rapidformer demo$": "tests/commands/test_demo.py, with the pretrained model",
    r".*--nproc-per-node [3-8]": "starts more workers than a test of the manual may: tests/engines, tests/switches",
    r"rapidformer data merge": "joins sets that other machines have made: tests/commands/test_data.py",
    r".*_8bit": "needs torchao: tests/switches/optimizer/test_updates.py",
    r".*--fp8-recipe": "needs torchao: tests/switches/fp8",
    rf"python (my_grpo|{'|'.join(RECIPES)}).py": "trains for a minute: tests/recipes",
}
"""Commands that are not run here, by their beginning, with the reason."""

NEEDS_A_RUN = {
    "docs/after-training.md": "the runs of two other pages: tests/commands/test_export.py and its neighbours",
    "docs/how-to/evaluate-and-predict.md": "a run of the reader: tests/commands/test_evaluate.py, test_export.py",
    "docs/how-to/out-of-memory.md": "a GPU: tests/test_gpu.py",
    "docs/how-to/use-the-hub.md": "the hub: tests/run/test_hub.py",
    "CONTRIBUTING.md": "the repository",
}
"""Pages whose commands start from something that the page does not make."""

SMALL = {
    "--train-iters": "4", "--epochs": "1", "--num-layers": "4", "--hidden-size": "32", "--num-attention-heads": "4",
    "--seq-length": "32", "--max-position-embeddings": "64", "--lr-warmup-iters": "1", "--vocab-size": "400",
    "--lora-rank": "2", "--save-interval": "2", "--step": "40", "--moe-ffn-hidden-size": "32", "--num-experts": "4",
    "--tokens-per-batch": "128", "--profile": "1", "--context-parallel-size": "2",
}  # fmt: skip
"""Sizes that replace those of the manual if a command has them."""
SEVERAL = ROOT / "docs/launching.md"
"""The page whose commands start two workers. The commands of other pages start one."""
ALONE = {"--nproc-per-node": "1", "--tensor-model-parallel-size": "1"}

SCRIPTS = {
    "examples/pretrain_gpt.py": "--max-files 4 --num-layers 2 --hidden-size 32 --train-iters 4 --lr-warmup-iters 1",
    "odd_ones.py": "--epochs 1",
    "my_task.py": "--epochs 1",
    "examples/pai_rapidformer/finetune.py": "--epochs 1",
}
"""Flags that make a script short."""


def _reason(command: str) -> str | None:
    return next((reason for start, reason in NOT_RUN.items() if re.match(start, command)), None)


def _runs(page: Path) -> list[tuple[str, str]]:
    return [step for step in steps(page) if step[0] == "python" or _reason(step[1]) is None]


WALKS = [
    page for page in PAGES if name(page) not in NEEDS_A_RUN and any(language == "bash" for language, _ in _runs(page))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, gpt_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder, bert_folder, gpt_folder)
    return folder


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("page", WALKS, ids=name)
def test_commands_run_in_order(
    page: Path, models: Path, gpt_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = tmp_path / "desk"
    desk.mkdir()
    monkeypatch.chdir(desk)
    text = page.read_text(encoding="utf-8")
    classifies = "--task sequence_classification" in text and "--task causal_lm" not in text
    lay_out(desk, models, gpt_folder, classifies=classifies)
    converted_files(desk)
    if "rapidformer new examples" not in text:
        shutil.copytree(ROOT / "examples", desk / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in re.findall(r"rapidformer data tokenizer .*--output (\S+)", text):
        shutil.rmtree(desk / folder)  # the page makes it
    if "sentiment.py --config my.yaml" in text:
        own = (ROOT / "examples/sentiment.yaml").read_text(encoding="utf-8").replace("runs/sentiment", "runs/mine")
        own = own if page == SEVERAL else own.replace("nproc-per-node: 2", "nproc-per-node: 1")
        (desk / "my.yaml").write_text(f"{own}pretrained-model-name-or-path: model\n", encoding="utf-8")
    with one_thread():
        for language, step in _runs(page):
            if language == "python":
                _write_or_run(step, text)
            else:
                status = _status(_small(step, {} if page == SEVERAL else ALONE))
                assert status == 0, f"{name(page)}: '{step}' ended with {status}"


def _write_or_run(block: str, page: str) -> None:
    """Write a block that is a script to its file. Run one that writes data, and leave out the fragments."""
    file = re.match(r"# (\w+\.py)\n", block)
    named = re.search(r"^python (\w+\.py)", page, flags=re.M)
    if file:
        Path(file[1]).write_text(block, encoding="utf-8")
    elif ".main()" in block and named:
        Path(named[1]).write_text(block, encoding="utf-8")
    elif ".dequantize(" in block:
        return  # needs a folder of quantized weights: tests/models/test_quantized_folders.py
    elif "open(" in block or "save_pretrained(" in block:
        exec(compile(block, "block of the page", "exec"), {"__name__": "page"})


def _small(command: str, workers: dict[str, str]) -> list[str]:
    """Return the words of a command, with the sizes of :data:`SMALL` and these numbers of workers."""
    words = shlex.split(command.replace("$MODEL", "model"), comments=True)
    if workers and "examples/sentiment.yaml" in words:
        words += ["--nproc-per-node", workers["--nproc-per-node"]]
    if "--model-type" in words and "--num-layers" not in words:
        words += ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"]
    pairs = zip(["", *words], words, strict=False)
    sizes = SMALL | workers
    return [sizes[flag] if flag in sizes and word.isdigit() else word for flag, word in pairs]


def _status(words: list[str]) -> int:
    """Run a command and return its exit status."""
    program, *rest = words
    if program.startswith("MODEL="):
        return 0  # the model and the data of the demo are on the desk
    with mock.patch.object(scripts, "_outcomes", []):  # those of earlier commands, which were other processes
        if program == "python":
            return run_script(Path(rest[0]), *rest[1:], *shlex.split(SCRIPTS.get(rest[0], "")))
        if program == "rapidformer":
            return _command(rest)
    command = [sys.executable, "-m", "torch.distributed.run", *rest] if program == "torchrun" else words
    return subprocess.run(command, check=False).returncode


def _command(words: list[str]) -> int:
    """Run ``rapidformer`` in this process. Its workers start as those of a command."""
    words = [*words, "--device", "cpu"] if words[0].startswith("--") else words
    as_module = [sys.executable, "-m", "rapidformer_templates", *words]
    lines = io.StringIO("a good dog\n")
    with mock.patch.multiple(sys, argv=["rapidformer", *words], orig_argv=as_module, stdin=lines):
        return main(words)


def test_every_command_is_run_or_has_a_reason() -> None:
    assert all(ROOT.joinpath(page).is_file() for page in NEEDS_A_RUN)
    everything = [command for page in PAGES for language, command in steps(page) if language == "bash"]
    unused = [start for start in NOT_RUN if not any(re.match(start, command) for command in everything)]
    assert unused == []
    assert sum(_reason(command) in (None, NOT_RUN["rapidformer plan"]) for command in everything) > len(everything) / 2
