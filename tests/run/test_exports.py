"""Runs with every engine: they start with the same weights, and their files are read without the product."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from rapidformer_templates import Finetuner, Trainer
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.models import weight_files
from rapidformer_templates.planning.plan import PIPELINE_FSDP_ENGINE
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import DDP_ENGINE
from rapidformer_templates.run.export import export_model
from rapidformer_templates.run.fit import fit
from rapidformer_templates.run.run import Run
from tests.support import parity
from tests.support.combinations import Combination, parsed, smallest
from tests.support.engine_layouts import NAMES, accepts, accepts_on, runs_of_layouts
from tests.support.jobs import KEEP_FIRST, CausalJob, DeepJob, FallingMetric
from tests.support.mixtures import MixtralJob
from tests.support.parallel_jobs import JOBS, Tanh, TanhModel
from tests.support.parity import Trained
from tests.support.preference_runs import pairs, words
from tests.support.selection import by_default, few
from tests.support.texts import write_jsonl
from tests.support.worker_pool import run_in_workers

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

STEPS = "--train-iters 3 --eval-interval 1 --lr 1e-2 --log-interval 1 --clip-grad 0.5 --export-model --device cpu"


class FallingJob(FallingMetric, DeepJob):
    """The first of its checkpoints is the best one."""


class OwnJob(Tanh):
    """A module that is not from transformers, with its own loss."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


KINDS: dict[str, tuple[type[Any], str]] = {
    "weights": (JOBS["llama-4-untied"], "--no-keep-best"),
    "tied": (DeepJob, "--no-keep-best"),
    "average": (DeepJob, "--no-keep-best --ema-decay 0.5"),
    "best": (FallingJob, KEEP_FIRST),
    "best average": (FallingJob, f"{KEEP_FIRST} --ema-decay 0.5"),
    "own module": (OwnJob, "--no-keep-best"),
    "mixture": (MixtralJob, "--no-keep-best"),
}
"""The job and flags of each kind."""

FLAGS, WORLDS = runs_of_layouts()
CONVERTED = {name for name, flags in FLAGS.items() if "--num-experts" in flags}
"""Layouts with experts of this library, which transformers cannot read."""
UNDIVIDED = {"own module": {"tensor-parallel", "context-parallel"}, "mixture": {"pipeline-parallel"}}
"""Switches that cannot divide the model of a kind. The rules do not know the model."""
CASES = [
    (kind, layout)
    for kind, (_, flags) in KINDS.items()
    for layout in FLAGS
    if layout not in CONVERTED and accepts(layout, f"{STEPS} {flags}")
    if UNDIVIDED.get(kind, set()).isdisjoint(NAMES.get(layout, ("pipeline-parallel",)))
]


def _train(workers: Any, kind: str, flags: str, folder: str) -> parity.Trained:
    job, own = KINDS[kind]
    return parity.trained(job([*f"{STEPS} {own} {flags}".split(), "--save", folder]))


@cache
def names_alone(kind: str) -> set[str]:
    """The tensors that a single process exports."""
    with tempfile.TemporaryDirectory() as folder:
        _train(None, kind, "--micro-batch-size 8", folder)
        return set(load_file(Path(folder, "export", "model.safetensors")))


def _read(kind: str, export: Path) -> nn.Module:
    if kind != "own module":
        model: nn.Module = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
        return model
    own = TanhModel()
    own.load_state_dict(load_file(export / "model.safetensors"))
    return own


def _loss(kind: str, model: nn.Module) -> float:
    job = KINDS[kind][0]()
    data = job.build_data()
    assert data.valid is not None
    batch = data.collate(list(data.valid))
    with torch.no_grad():
        return float(job.compute_loss(model, batch) if kind == "own module" else model(**batch).loss)


@pytest.mark.parametrize(("kind", "layout"), few([("own module", "interleaved")], CASES))
def test_the_export_is_what_was_evaluated(kind: str, layout: str, tmp_path: Path) -> None:
    run = run_in_workers(WORLDS[layout], _train, kind, FLAGS[layout], str(tmp_path / "run"))[0]
    export = tmp_path / "run" / "export"
    assert set(load_file(export / "model.safetensors")) == names_alone(kind)
    expected = run["evaluations"][0 if kind.startswith("best") else -1]
    assert _loss(kind, _read(kind, export)) == pytest.approx(expected, rel=1e-5)


SHARD_BYTES = 6000
IN_SHARDS = [case for case in CASES if not case[0].startswith("best")]


def _export_twice(workers: Any, kind: str, flags: str, folder: str) -> None:
    """Export the trained model in one file, and in shards."""

    def export(run: Run) -> None:
        export_model(run.engine, None, Path(folder, "file"))
        with mock.patch.object(weight_files, "SHARD_BYTES", SHARD_BYTES):
            export_model(run.engine, None, Path(folder, "shards"))

    job, own = KINDS[kind]
    words = f"--train-iters 1 --lr 1e-2 --device cpu --save {folder}/run --no-export-model {own} {flags}"
    fit(job(words.split()), export)


@pytest.mark.parametrize(("kind", "layout"), few([("own module", "fsdp")], IN_SHARDS))
def test_shards_together_are_the_single_file(kind: str, layout: str, tmp_path: Path) -> None:
    run_in_workers(WORLDS[layout], _export_twice, kind, FLAGS[layout], str(tmp_path))
    whole = load_file(tmp_path / "file" / "model.safetensors")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "shards").glob("*.safetensors")}
    assert len(files) > 2
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    # The experts of a layer are one tensor in the model, and stay together.
    limit = max(SHARD_BYTES, *(parameter.nbytes for parameter in KINDS[kind][0]([]).build_model().parameters()))
    assert all(sum(tensor.nbytes for tensor in tensors.values()) <= limit for tensors in files.values())
    together = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    assert together.keys() == whole.keys()
    assert all(torch.equal(together[name], whole[name]) for name in whole)
    if kind != "own module":
        model, expected = (_read(kind, tmp_path / name).state_dict() for name in ("shards", "file"))
        assert all(torch.equal(model[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", by_default(["tied"], ["weights", "tied", "mixture"]))
def test_a_small_model_is_one_file_as_transformers_writes_it(kind: str, tmp_path: Path) -> None:
    template = KINDS[kind][0]([*STEPS.split(), "--no-keep-best", "--save", str(tmp_path / "run")])
    template.fit()
    template.model.save_pretrained(tmp_path / "plain")  # type: ignore[operator]
    (file,) = (tmp_path / "run" / "export").glob("*.safetensors*")
    assert file.read_bytes() == (tmp_path / "plain" / file.name).read_bytes()


def test_loose_settings_of_generation_are_exported_as_they_are(tmp_path: Path) -> None:
    """Transformers itself refuses to save a temperature without sampling, as some pretrained models have."""
    job = CausalJob(["--train-iters", "1", "--lr", "1e-3", "--save", str(tmp_path / "run")])
    model = job.make()
    model.generation_config.temperature = 0.5
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        model.save_pretrained(tmp_path / "plain")
    with mock.patch.object(job, "build_model", return_value=model):
        job.fit()
    for file in (tmp_path / "run").glob("**/generation_config.json"):
        assert json.loads(file.read_text())["temperature"] == 0.5
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").generation_config.temperature == 0.5


WRITTEN = 2
WRITTEN_FLAGS = f"--train-iters {WRITTEN} --lr 1e-2 --log-interval 1 --eval-interval 1 --no-keep-best --device cpu"

ALONE = "one process"
RUNS = {name: smallest(switches) for name, switches in NAMES.items()}
LONGER = {
    *("replicas", "context 2", "hybrid sharding", "tensor 2, zero-2", "pipeline-parallel", "tensor-parallel"),
    *("expert-parallel", "oss", "zero-1", "zero-3", "distributed-optimizer", "fsdp", "tensor 2, pipeline 2"),
    "tensor 2, divided experts",
}
"""For ``make test-longer``. Another run has the same parts of tensors, or other parts of the same engine."""

Tensors = dict[str, torch.Tensor]


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    """Assert that names, shapes and bits are equal."""
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert found[name].shape == weight.shape, name
        assert torch.equal(found[name].double(), weight), name


def read_checkpoint(folder: Path) -> Tensors:
    """Return the weights of a checkpoint by its index, without the product's reader.

    Raises:
        AssertionError: A value is in two boxes, or in none.
    """
    weights: Tensors = {}
    read = cache(load_file)
    for name, entry in json.loads((folder / "index.json").read_text())["weights"].items():
        whole = torch.zeros(entry["shape"], dtype=torch.float32)
        times = torch.zeros(entry["shape"], dtype=torch.int32)
        for file, key, offset, shape in entry["boxes"]:
            part = read(folder / file)[key]
            assert part.dtype == whole.dtype, f"{name} is {part.dtype}"
            place = tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))
            whole[place] = part
            times[place] += 1
        assert bool((times == 1).all()), f"{name}: parts of it are written twice, or not at all"
        weights[name] = whole
    return weights


def _write(workers: Any, folder: str, flags: tuple[str, ...]) -> Trained:
    return parity.trained(DeepJob([*WRITTEN_FLAGS.split(), *flags, "--save", folder, "--export-model"]))


@pytest.mark.parametrize("name", by_default([ALONE, *(run for run in RUNS if run not in LONGER)], [ALONE, *RUNS]))
def test_the_files_have_the_numbers_of_the_run(name: str, tmp_path: Path) -> None:
    """Read the export with safetensors and with transformers, which supports all of these models but mixtures."""
    found, folder = RUNS.get(name), tmp_path / "run"
    if name == ALONE:
        run = _write(None, str(folder), ("--micro-batch-size", "4"))
    elif found is None:
        needed = {REGISTRY[switch].needs_package or "" for switch in NAMES[name]} - {""}
        pytest.skip(f"needs {', '.join(sorted(needed))}")
    else:
        run = run_in_workers(found.world, _write, str(folder), found.flags)[0]
    assert_equal(read_checkpoint(folder / f"checkpoints/step-{WRITTEN}"), run["weights"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == run["lines"]
    assert [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line] == run["curve"]
    assert len(run["curve"]) == len(run["evaluations"]) == WRITTEN
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(run["summary"]))
    assert_equal(load_file(folder / "export" / "model.safetensors"), run["weights"])
    if "expert-parallel" not in NAMES.get(name, ()):
        read = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32).state_dict()
        assert torch.equal(read.pop("lm_head.weight"), read["transformer.wte.weight"])  # they are tied
        assert_equal(read, run["weights"])


def test_every_engine_is_here() -> None:
    plans = {found.plan.engine for found in RUNS.values() if isinstance(found, Combination)}
    missing = {REGISTRY[switch].engine for name, found in RUNS.items() if found is None for switch in NAMES[name]}
    of_switches = {switch.engine for switch in REGISTRY.switches if switch.engine}
    assert plans | missing == of_switches | {DDP_ENGINE, PIPELINE_FSDP_ENGINE}


TEXTS = [words(3 + i % 9, i) for i in range(16)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sequence_classification": [{"text": text, "label": "abc"[i % 3]} for i, text in enumerate(TEXTS)],
    "token_classification": [
        {"tokens": t.split(), "tags": ["x" if "e" in w else "O" for w in t.split()]} for t in TEXTS
    ],
    "question_answering": [
        {"question": "what", "context": t, "answers": {"text": [t.split()[1]], "answer_start": [t.index(" ") + 1]}}
        for t in TEXTS
    ],
    "masked_lm": [{"text": text} for text in TEXTS],
    "causal_lm": [{"text": text} for text in TEXTS],
    "seq2seq_lm": [{"source": text, "target": text[::-1]} for text in TEXTS],
    "preference": pairs(16),
    "reward": pairs(16),
}
ARCHITECTURES = (
    dict.fromkeys(ROWS, "bert") | {"seq2seq_lm": "t5"} | dict.fromkeys(("causal_lm", "preference", "reward"), "gpt2")
)
HEADS = ("sequence_classification", "token_classification", "question_answering", "masked_lm", "reward")
"""Tasks with a new head if the model has none. The head of the other tasks is tied to the embeddings."""
SIZES = "--num-layers 4 --hidden-size 32 --num-attention-heads 2"
ONE_STEP = (
    "--train-iters 1 --lr 0 --weight-decay 0 --dropout 0 --seq-length 32 --no-export-model --validation-fraction 0"
    " --global-batch-size 8 --device cpu"
)
STARTS = ("scratch", "pretrained", "new head", "adapters")
OWNING = [switch.name for switch in REGISTRY.switches if switch.engine]
ENGINES: dict[str, Combination] = {
    name: found for name in OWNING if (found := smallest((name,))) and "mixture-of-experts" not in found.plan.switches
}


def _flags(task: str, start: str, engine: str, data: str) -> list[str]:
    """Return the flags of a run. Without ``engine``, they equal those of one process."""
    kind = ARCHITECTURES[task]
    flags = [*ONE_STEP.split(), "--task", task, "--data-dir", f"{data}/{task}", "--tokenizer-path", f"{data}/{kind}"]
    flags += ENGINES[engine].flags if engine else ["--micro-batch-size", "8"]
    if start == "scratch":
        return [*flags, "--model-type", kind, *SIZES.split()]
    folder = f"{data}/{'body' if start == 'new head' else 'whole'}-{task}"
    return [*flags, "--pretrained-model-name-or-path", folder, *(["--lora-rank", "2"] if start == "adapters" else [])]


STARTED = [
    (task, start, engine)
    for task in ROWS
    for start in STARTS
    for engine in ENGINES
    if (start != "new head" or task in HEADS) and accepts_on(ENGINES[engine].world, _flags(task, start, engine, "data"))
]


def test_t5_generates_in_an_evaluation_under_bf16(data: str) -> None:
    """Its norms are in fp32, so that generating needs autocast, as the loss does."""
    flags = [*_flags("seq2seq_lm", "pretrained", "", data), "--mixed-precision", "bf16", "--eval-interval", "1"]
    job = Finetuner([*flags, "--validation-fraction", "0.25", "--no-save"])
    job.fit()
    assert job.evaluate().keys() >= {"eval_loss", "rouge_l"}
    assert len(job.predict(TEXTS[:3])) == 3


DIVIDING = ("pipeline-parallel", "tensor-parallel", "zero-3")
"""Engines under which a worker reads only its parts of the weights."""
READ = [case for case in STARTED if case[1] in ("pretrained", "new head") and case[2] in DIVIDING]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, gpt_folder: Path) -> str:
    """Create rows, tokenizers, and for each task a complete model and, if it has a separate head, one without it."""
    folder = tmp_path_factory.mktemp("starts")
    for kind, tokenizer in (("bert", bert_folder), ("t5", bert_folder), ("gpt2", gpt_folder)):
        (folder / kind).symlink_to(tokenizer)
    for task, rows in ROWS.items():
        (folder / task).mkdir()
        write_jsonl(folder / task / "train.jsonl", rows)
        made = load_task(REGISTRY.complete(parsed((*_flags(task, "scratch", "", str(folder)), "--no-save"))))
        made.build_data()
        torch.manual_seed(7)
        made.build_model().save_pretrained(folder / f"whole-{task}")
        if task in HEADS:
            AutoModel.from_pretrained(folder / f"whole-{task}").save_pretrained(folder / f"body-{task}")
    return str(folder)


def _start(workers: Any, flags: list[str]) -> parity.Trained:
    """Train one step. A learning rate of 0 does not change the weights."""
    return parity.trained(Trainer([*flags, "--no-save"]))


@pytest.mark.parametrize(("task", "start", "engine"), [*few([], READ), *few([], STARTED)])
def test_every_engine_starts_with_the_weights_of_one_process(task: str, start: str, engine: str, data: str) -> None:
    """Weights are bit-identical. So the first loss and the norm of its gradient are the same, too."""
    expected = _start(None, _flags(task, start, "", data))
    found = run_in_workers(ENGINES[engine].world, _start, _flags(task, start, engine, data))[0]
    assert found["weights"].keys() == expected["weights"].keys()
    assert len(expected["weights"]) > 10
    same = {name: torch.equal(found["weights"][name], weight) for name, weight in expected["weights"].items()}
    assert all(same.values()), same
    for number in ("loss", "grad_norm"):
        assert found["lines"][0][number] == pytest.approx(expected["lines"][0][number], rel=1e-5), number


@pytest.mark.longer
def test_new_heads_are_new(data: str) -> None:
    """Otherwise the tests above would compare pretrained heads."""
    for task in ("sequence_classification", "reward"):
        whole, new = (_start(None, _flags(task, start, "", data))["weights"] for start in ("pretrained", "new head"))
        assert any(not torch.equal(new[name], weight) for name, weight in whole.items())
