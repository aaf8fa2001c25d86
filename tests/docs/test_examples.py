"""The examples are short and complete, do the same job in every way of use, and the notebook shows what it says."""

import ast
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from rapidformer_templates.commands.main import main
from tests.support.manual import PAGES, blocks, commands, name
from tests.support.programs import one_thread, run_script

pytestmark = pytest.mark.docs

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = {
    "negative": ["bad", "awful", "late", "lost", "broken", "never", "worst"],
    "neutral": ["today", "flight", "gate", "phone", "at", "from", "is"],
    "positive": ["great", "love", "thanks", "best", "happy", "nice", "cool"],
}
RATES = {"samples_per_second", "tokens_per_second", "step_ms", "peak_memory_mb"}


@pytest.fixture(scope="module")
def tweets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny BERT with its tokenizer in ``model/``, and tweets of artificial words next to it."""
    folder = tmp_path_factory.mktemp("tweets")
    draw = random.Random(5)
    for part, count in (("train", 44), ("valid", 14)):
        rows = ["text,label"]
        for i in range(count):
            label = list(WORDS)[i % 3]
            words = draw.choices(WORDS[label] + WORDS["neutral"], k=draw.randint(2, 12))
            rows.append(f"{' '.join(words)},{label}")
        (folder / f"tweets-{part}.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        [" ".join(words) for words in WORDS.values()], trainers.WordPieceTrainer(vocab_size=120, special_tokens=special)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{token[1:-1].lower()}_token": token for token in special}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3,
        max_position_embeddings=32,
    )  # fmt: skip
    BertForSequenceClassification(config).bert.save_pretrained(folder / "model")
    return folder


def _run_process(script: Path, *words: str) -> int:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.returncode


def _metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` without fields that depend on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name not in RATES} for line in lines]


SCRIPTS = [
    (page, block)
    for page in PAGES
    for block in blocks(page, "python")
    if re.match(r"# (?!before|after)\w+\.py\n", block)  # these two name their model: tests/docs/test_pages_in_order.py
]


@pytest.mark.parametrize(("page", "script"), SCRIPTS, ids=[name(page) for page, _ in SCRIPTS])
def test_scripts_of_the_manual_train(
    page: Path, script: str, tweets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of Python that begins with the name of a file is a complete script. The page has the command for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = script.partition("\n")[0].removeprefix("# ")
    (tmp_path / file).write_text(script, encoding="utf-8")
    command = next(command for command in commands(page) if command.startswith(f"python {file}"))
    words = shlex.split(command.replace("$MODEL", str(tweets / "model")).replace("runs/demo-data", str(tweets)))[2:]
    with one_thread():
        assert run_script(tmp_path / file, *words, "--epochs", "1", "--device", "cpu", "--seq-length", "32") == 0
    assert list(tmp_path.glob("runs/*/summary.json"))


def test_one_job_in_three_ways_has_identical_losses(
    tweets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Black box, Finetuner subclass and Trainer subclass give bit-identical losses, with dropout.

    The Finetuner runs in a separate process, as it does for users. The others run in this process.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # To use another template, change one base class (and its import).
    source = (EXAMPLES / "sentiment.py").read_text(encoding="utf-8")
    assert source.count("Finetuner") == 2
    (tmp_path / "as_trainer.py").write_text(source.replace("Finetuner", "Trainer"), encoding="utf-8")
    ways: dict[str, Callable[..., int]] = {
        "black-box": lambda *words: main(words),
        "finetuner": partial(_run_process, EXAMPLES / "sentiment.py"),
        "trainer": partial(run_script, tmp_path / "as_trainer.py"),
    }
    job = f"--config {EXAMPLES / 'sentiment.yaml'} --pretrained-model-name-or-path {tweets / 'model'} --device cpu"
    small = f"--data-dir {tweets} --seq-length 32 --epochs 2 --micro-batch-size 4 --log-interval 1 --nproc-per-node 1"
    found = {}
    for way, run in ways.items():
        with one_thread():
            assert run(*job.split(), *small.split(), "--save", str(tmp_path / way)) == 0
        found[way] = _metrics(tmp_path / way)
    losses = [line["loss"] for line in found["black-box"] if "loss" in line]
    evaluations = [line for line in found["black-box"] if "eval_loss" in line]
    assert len(losses) == 22
    assert len(evaluations) == 2
    assert set(evaluations[0]) >= {"eval_loss", "accuracy", "f1", "matthews"}
    assert found["finetuner"] == found["black-box"]
    assert found["trainer"] == found["black-box"]
    plans = {way: json.loads((tmp_path / way / "plan.json").read_text(encoding="utf-8"))["template"] for way in ways}
    assert plans == {"black-box": "Finetuner", "finetuner": "Finetuner", "trainer": "Trainer"}
    assert (tmp_path / "finetuner/curves.png").read_bytes().startswith(b"\x89PNG")


def test_own_flag_acts(tweets: Path, tmp_path: Path) -> None:
    job = f"--task sequence_classification --pretrained-model-name-or-path {tweets / 'model'} --device cpu --lr 1e-3"
    small = f"--data-dir {tweets} --data-name tweets --train-iters 2 --micro-batch-size 4 --log-interval 1"
    losses = {}
    for temperature in ("1", "0.5"):
        run = tmp_path / temperature
        words = [*job.split(), *small.split(), "--temperature", temperature, "--save", str(run)]
        assert main(["--user-script", str(EXAMPLES / "sentiment.py"), *words]) == 0
        losses[temperature] = [line["loss"] for line in _metrics(run) if "loss" in line]
    assert losses["1"] != losses["0.5"]


def test_pretraining_loss_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--max-files 8 --num-layers 2 --hidden-size 64 --seq-length 64 --train-iters 40 --lr-warmup-iters 4"
    assert run_script(EXAMPLES / "pretrain_gpt.py", *flags.split(), "--device", "cpu", "--save", "run") == 0
    losses = [line["loss"] for line in _metrics(tmp_path / "run") if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "run/export/tokenizer.json").is_file()


def said(cell: Any, name: str) -> str:
    """Return the printed output of a cell, or its value (``value``)."""
    if name == "value":
        values = [output["data"] for output in cell.outputs if output.output_type == "execute_result"]
        return "".join(value["text/plain"] for value in values)
    return "".join(output["text"] for output in cell.outputs if output.get("name") == name)


@pytest.mark.distributed
def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel runs it from the first cell to the last, and the output matches the saved output."""
    nbformat: Any = pytest.importorskip("nbformat", reason="needs nbformat: pip install nbformat")
    nbclient: Any = pytest.importorskip("nbclient", reason="needs nbclient: pip install nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH", "")]))
    kept = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
    place = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    cells = {kind: [cell for cell in read.cells if cell.cell_type == "code"]
             for kind, read in (("run", notebook), ("kept", kept))}  # fmt: skip
    for kind in ("run", "kept"):
        _, _, alone, predicted, evaluated, together, one, mistake = cells[kind]
        for cell, workers in ((alone, 1), (together, 2)):
            assert f"{workers} × cpu, fp32" in said(cell, "stderr")
            assert "step 80/80  eval_loss" in said(cell, "stderr")
            assert "results" in said(cell, "stdout")
            first, last = re.findall(r"80 steps, loss (\S+) to (\S+)", said(cell, "stdout"))[0]
            assert float(last) < float(first) / 2
        assert [record["label"] for record in ast.literal_eval(said(predicted, "value"))] == ["bad", "good"]
        assert said(evaluated, "stdout") == "BertForSequenceClassification\n"
        assert ast.literal_eval(said(evaluated, "value"))["accuracy"] == 1.0
        assert ast.literal_eval(said(one, "value"))["label"] == "bad"
        (error,) = mistake.outputs
        lines = ["error: unknown flag 'epoch'", "  where  In[9]:1", "  help   did you mean epochs?"]
        assert error["traceback"] == lines
    assert [path.name for path in tmp_path.iterdir()] == ["notebook-data"]
