"""A checkpoint of any engine is exported as its own run would export it, without data and workers."""

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rapidformer_templates import Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.planning.environment import installed_packages
from tests.support.messages import Says
from tests.support.preference_runs import make, words
from tests.support.scored import Scored
from tests.support.selection import by_default, selected
from tests.support.texts import write_jsonl
from tests.support.worker_pool import run_in_workers

FLAGS = "--task causal_lm --train-iters 2 --save-interval 1 --keep-best --eval-interval 2 --micro-batch-size 2"
RUNS = {
    "ddp": "",
    "averaged, fsdp": "--fsdp-memory-optimization --ema-decay 0.5",
    "averaged, tensor": "--tensor-model-parallel-size 2 --ema-decay 0.5",
    "pipeline": "--pipeline-model-parallel-size 2 --pipeline-stages 1,1",
    "adapters": "--lora-rank 2",
    "adapters in stages": "--lora-rank 2 --pipeline-model-parallel-size 2 --pipeline-stages 1,1 --quantize-base int8",
    "adapters of another kind": "--lora-rank 2 --lora-variant dora --fsdp-memory-optimization",
    "mixture": "",
}
SCRATCH = "--model-type gpt2 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 2"
if "fairscale" in installed_packages():
    RUNS |= {"oss": "--oss-memory-optimization"}
if "deepspeed" in installed_packages():
    RUNS |= {
        "averaged, zero-2": "--zero-2-memory-optimization --ema-decay 0.5",
        "zero-3": "--zero-3-memory-optimization --zero-3-param-persistence-threshold 40",
    }
SHORT = ("averaged, tensor", "adapters")
"""All engines write one format of checkpoints. ``tests/run/test_exports.py`` reads those of each engine."""


def train_all(workers: Any, runs: Mapping[str, list[str]]) -> None:
    for folder, flags in runs.items():
        Trainer([*flags, "--save", folder]).fit()


def same(folder: Path, other: Path) -> None:
    """Assert that two folders have the same files, byte by byte. But peft stores layer names as an unordered set.

    The card of a run that has not ended has no metrics.
    """
    names = sorted(path.name for path in other.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names, other
    for name in names:
        told, wanted = ((of / name).read_bytes() for of in (folder, other))
        if name == "adapter_config.json":
            told, wanted = (b"".join(sorted(content.replace(b",", b"").split())) for content in (told, wanted))
        if name == "README.md":
            told, wanted = (content.partition(b"## Training data")[2] for content in (told, wanted))
        assert told == wanted, f"{other}: {name}"


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path) -> Path:
    """Return the folder of all runs. Their data are gone."""
    folder = tmp_path_factory.mktemp("runs")
    given = [*FLAGS.split(), *make(folder / "data", gpt_folder, [])]
    given.remove("--no-export-model")
    for part in ("train", "valid"):
        write_jsonl(folder / "data" / f"{part}.jsonl", [{"text": words(3 + i % 9, i)} for i in range(12)])
    flags = {name: [*given, *RUNS[name].split()] for name in selected(request, "name")}
    if "mixture" in flags:
        flags["mixture"] = [*given[:-2], *SCRATCH.split(), "--tokenizer-path", str(gpt_folder)]
    run_in_workers(2, train_all, {str(folder / name): of_run for name, of_run in flags.items()})
    for part in ("train", "valid"):
        (folder / "data" / f"{part}.jsonl").unlink()
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("name", by_default(SHORT, RUNS))
def test_every_engine_of_a_checkpoint(name: str, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained / name
    best = json.loads((run / "summary.json").read_text())["best"]["step"]
    assert main(["export", str(run), "--step", str(best)]) == 0
    _, serve, served = capsys.readouterr().out.partition("serve it with vLLM: ")
    output = str(run / f"export-step-{best}")
    if name == "mixture":  # of a kind that vLLM does not know
        assert not serve
    elif name.startswith("adapters"):
        base = str(trained / "data/model")
        assert shlex.split(served) == ["vllm", "serve", base, "--enable-lora", "--lora-modules", f"adapters={output}"]
    else:
        assert shlex.split(served) == ["vllm", "serve", output]
    same(run / f"export-step-{best}", run / "export")
    (run / "export").rename(run / "kept")  # as after an interruption
    assert main(["export", str(run)]) == 0
    same(run / "export", run / "kept")
    if name == "adapters":
        base = json.loads((run / "export/adapter_config.json").read_text())["base_model_name_or_path"]
        for lost in (base, str(Path(base).parent)):
            assert main(["export", str(run), "--merge", *_over(Path(lost)).split()]) == 2
        assert (Path(base) / "config.json").is_file()
        assert main(["export", str(run), "--merge"]) == 0
        assert main(["export", str(run), "--merge", "--step", str(best)]) == 0
        same(run / f"merged-step-{best}", run / "merged")
        card = (run / "merged/README.md").read_text()
        assert "library_name: transformers" in card
        code = card.split("```python\n")[1].split("```")[0]
        names: dict[str, Any] = {}
        exec(code.replace("EXPORT", str(run / "merged")), names)
        merged = AutoModelForCausalLM.from_pretrained(run / "merged").state_dict()
        assert all(tensor.equal(merged[name]) for name, tensor in names["model"].state_dict().items())


LOST = ("run", "run/checkpoints", "run/checkpoints/step-2", "")
"""Folders that --overwrite must never replace."""


def _over(output: Path) -> str:
    return f"--output {output} --overwrite"


@pytest.mark.slow
def test_labels_are_known_without_the_data(tmp_path: Path, bert_folder: Path, says: Says) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": words(3 + i % 9, i), "label": "abc"[i % 3]} for i in range(12)])
    run, out = tmp_path / "run", tmp_path / "out"
    model = "--model-type bert --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16"
    given = f"--task sequence_classification {model} --data-dir {tmp_path} --tokenizer-path {bert_folder}"
    steps = "--train-iters 4 --save-interval 2 --keep-checkpoints 4 --no-keep-best --no-export-model --lr 1e-3"
    Trainer(f"{given} {steps} --save {run}".split()).fit()
    (tmp_path / "train.jsonl").unlink()
    assert main(["export", str(run), "--step", "2", "--output", str(out)]) == 0
    config = AutoModelForSequenceClassification.from_pretrained(out).config
    assert config.id2label == {0: "a", 1: "b", 2: "c"}
    says.command(f"export {run}", status=0)
    for more in (
        "", "--step 3", "--step 2 --merge", f"--step 2 --output {out}", f"--step 2 {_over(run / 'model')}",
        *(f"--step 2 {_over(tmp_path / lost)}" for lost in LOST),
    ):  # fmt: skip
        says.command(f"export {run} {more}")
    notes = out / "notes.md"
    notes.write_text("mine")
    says.command(f"export {run} --step 2 {_over(out)}")
    notes.unlink()
    assert main(["export", str(run), "--step", "2", *_over(out).split()]) == 0
    assert main(["export", str(run), "--output", str(tmp_path / "elsewhere")]) == 0
    same(tmp_path / "elsewhere", run / "export")
    weights = next((run / "checkpoints/step-2").glob("weights-*"))
    weights.write_bytes(weights.read_bytes()[:-1])
    says.command(f"export {run} --step 2")
    shutil.rmtree(run / "model")
    says.command(f"export {run} --step 4")


@pytest.mark.slow
def test_models_of_a_script(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = type("Job", (Scored,), {"scores": [1.0]})
    job(["--train-iters", "2", "--lr", "0.1", "--save", str(run)]).fit()
    assert main(["export", str(run), "--step", "2"]) == 0
    told, wanted = (load_file(run / name / "model.safetensors") for name in ("export-step-2", "export"))
    assert told.keys() == wanted.keys() == dict(nn.Linear(1, 1).named_parameters()).keys()
    assert all(torch.equal(told[name], wanted[name]) for name in wanted)


FILES = [
    "source.spm", "target.spm", "spm.model", "spiece.model", "sentencepiece.bpe.model", "bpe.codes", "qwen.tiktoken",
    "vocab-src.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "configuration_own.py", "modeling_own.py", "tokenization_own.py", "image_processing_own.py",
]  # fmt: skip
"""Names that tokenizers, processors and remote code of transformers have in a folder of a model."""


def test_all_files_of_an_export_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    job = type("Job", (Scored,), {"scores": [1.0]})
    job(["--train-iters", "2", "--lr", "0.1", "--save", str(run)]).fit()
    for name in FILES:
        (run / "export" / name).write_text("")
    assert main(["export", str(run), "--overwrite"]) == 0
    assert not any((run / "export" / name).exists() for name in FILES)
    for name in ("train.py", "mine.model"):
        (run / "export" / name).write_text("")
    assert main(["export", str(run), "--overwrite"]) == 2
    assert "would be lost: mine.model, train.py" in " ".join(capsys.readouterr().err.split())
