"""Damaged files of every kind that commands read: each ends in a result or in a message, soon and in little memory."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, PreTrainedConfig

from rapidformer_templates.commands.convert.cli import converted
from rapidformer_templates.commands.convert.reader import Options
from rapidformer_templates.commands.plan import plan_request
from rapidformer_templates.data.finetuning.tables import read_dataset
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.indexed.writer import read_sums
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.files import documents
from rapidformer_templates.errors import DataError
from rapidformer_templates.models.loading import build_config, build_model
from rapidformer_templates.models.model_files import load_tokenizer
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint.format import problem_of
from rapidformer_templates.run.folder import MetricsFile, RunFolder, read_metrics
from rapidformer_templates.run.saved_model import find_saved
from rapidformer_templates.run.saving import show_changes
from rapidformer_templates.switches.lora.exported import base_of, check_base
from tests.support.indexed_sets import numbered
from tests.support.rotten_input import DEEPSPEED_FILE, Rotten
from tests.support.shelf import Shelf
from tests.support.texts import ARCHITECTURES, ROW_OF, TEXTS, TINY
from tests.support.worker_pool import alone

CONFIGURATIONS = Path(__file__).parents[1] / "support" / "configurations"
FEW, MANY, ALL = 2, 150, 10_000
"""Inputs per reader by default, in the longer tests and in the exhaustive ones."""

FLAGS = {
    "task": "causal_lm", "device": "cpu", "nproc-per-node": 2, "micro-batch-size": 2, "global-batch-size": 8,
    "lr": 3e-5, "save-interval": "30minutes", "train-iters": 10, "fsdp-memory-optimization": True, "seed": 3,
    "report-to": "tensorboard", "lora-rank": 8, "clip-grad": 1.0, "pretrained-model-name-or-path": "m",
}  # fmt: skip
SIZES = {"vocab_size": 500, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPES: Mapping[str, tuple[PreTrainedConfig, str]] = {
    "llama": (LlamaConfig(**SIZES, intermediate_size=64), "LlamaForCausalLM"),
    "gpt2": (GPT2Config(vocab_size=500, n_embd=32, n_layer=4, n_head=4), "GPT2LMHeadModel"),
    "bert": (BertConfig(**SIZES, intermediate_size=64), "BertForMaskedLM"),
}
ROWS = [{"text": text, "label": f"l{i % 2}", "more": {"a": [i, None]}} for i, text in enumerate(TEXTS[:6])]
TASKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, row("the cat")) for name, row in ROW_OF.items()},
    "chat": ("causal_lm", {"messages": [{"role": role, "content": "the cat"} for role in ("user", "assistant")]}),
    "instructions": ("causal_lm", {"instruction": "say", "output": "the cat"}),
}
NAMES = (
    "yaml", "yaml of JSON", "deepspeed", *(f"config.json {name}" for name in SHAPES), "config.json with weights",
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "model.safetensors", "train.jsonl",
    "train.json", "train.csv", "train.tsv", "train.parquet", "README.md", "dataset_dict.json", "state.json of datasets",
    "corpus.jsonl", "corpus.txt", "corpus.parquet", *(f"rows of {name}" for name in TASKS), "set.idx", "set.bin",
    "set.sums.json", "plan.json", "metrics.jsonl", "task.json", "manifest.json", "index.json", "state.json",
    "random-00000.safetensors", "weights-00000-00000.safetensors", "adapter_config.json", "adapter_base.json",
    "axolotl-qlora.yml", "transformers-arguments.json", "megatron-gpt.sh",
)  # fmt: skip


LINES_ARE_SKIPPED = ("README.md", "metrics.jsonl")
"""Files of which only what can be read is used. They have no errors."""


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=marks)
        for count, marks in ((FEW, ()), (MANY, pytest.mark.longer), (ALL, pytest.mark.exhaustive))
        for name in NAMES
    ],
)
def test_damaged_files_end_in_a_result_or_a_message(
    name: str, count: int, readers: Mapping[str, Rotten], tmp_path: Path
) -> None:
    """The valid file must be read without an error. Otherwise the damaged ones would not get far."""
    reader = readers[name]
    folder = tmp_path / "input"
    assert reader.check(folder, reader.files[reader.target]) is None
    messages = 0
    for number in range(count if count == FEW else count // reader.costs):
        content = reader.edited(Random(f"{name}/{number}"))
        try:
            messages += reader.check(folder, content) is not None
        except BaseException as error:
            error.add_note(f"input {number} of {name}: {content[:2000]!r}")
            raise
    assert count != ALL or messages or name in LINES_ARE_SKIPPED, "nothing was damaged"


def test_a_number_that_no_machine_or_model_has_is_refused(readers: Mapping[str, Rotten], tmp_path: Path) -> None:
    many = readers["yaml"].check(tmp_path, b"nproc-per-node: 4294967296\n")
    assert many is not None
    assert many.message == "--nproc-per-node must be at most 1024, not 4294967296"
    reader = readers["config.json llama"]
    content = json.loads(reader.files["config.json"])
    deep = reader.check(tmp_path, in_json({**content, "num_hidden_layers": 10**20}))
    assert deep is not None
    assert deep.message.startswith("num_hidden_layers is 100000000000000000000 in ")
    text = readers["config.json with weights"].check(tmp_path, in_json({**content, "num_hidden_layers": "2"}))
    assert text is not None
    assert "num_hidden_layers' expected int, got str (value: '2')" in text.message


def plan(*words: str) -> Callable[[Path], object]:
    """Return a reader that plans a command. ``{}`` in a word is replaced by the folder."""

    def read(folder: Path) -> None:
        config, environment, _ = plan_request([word.replace("{}", str(folder)) for word in words])
        resolve(config, environment)

    return read


def configured(**values: Any) -> RunConfig:
    return RunConfig().replace("command line", **values)


def read_config(folder: Path) -> None:
    words = ("--pretrained-model-name-or-path", "{}", "--task", "causal_lm", "--device", "cpu")
    plan(*words, "--nproc-per-node", "2", "--pipeline-model-parallel-size", "2")(folder)
    build_config(configured(pretrained_model_name_or_path=str(folder)), "AutoModelForCausalLM")


def read_model(folder: Path) -> None:
    config = configured(pretrained_model_name_or_path=str(folder))
    build_model(config, "AutoModelForCausalLM", load_tokenizer(config))


def read_tokenizer(folder: Path) -> None:
    load_tokenizer(configured(tokenizer_path=str(folder)))("a cat")


def read_vocabulary(folder: Path) -> None:
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    load_tokenizer(configured(tokenizer_type="GPT2BPETokenizer", **files))("a cat")


def read_table(folder: Path) -> None:
    config = configured(data_dir=str(folder))
    with suppress(DataError):  # all of its lines may be bad
        read_dataset(config, BadLines(skip=True))
    read_dataset(config)


def read_documents(folder: Path) -> None:
    bad = BadLines()
    for file in folder.iterdir():
        list(documents(file, "text", bad))
    bad.raise_all()


def read_set(folder: Path) -> None:
    read_sums(folder / "set")
    data = IndexedDataset(folder / "set")
    for number in range(len(data)):
        data[number]


def read_run(folder: Path) -> None:
    run = RunFolder(folder)
    show_changes(run, {"values": {"--lr": {"value": 1, "origin": "x"}}}, alone())
    saved = find_saved(folder)
    saved.config()
    saved.decisions("causal_lm")
    read_metrics(run.metrics)
    MetricsFile(run.metrics, 2).close()


def read_checkpoint(folder: Path) -> None:
    problem = problem_of(folder / "step-3")
    if problem is not None:
        raise DataError(problem)
    reader = checkpoint.Reader(folder / "step-3")
    reader.read("weights", "w", (0,), reader.names("weights")["w"])
    reader.random_state(0)


def read_adapters(folder: Path) -> None:
    base_of(folder)
    check_base(torch.nn.Linear(2, 2), folder, "base")


def in_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def settings_readers() -> Iterator[tuple[str, Rotten]]:
    """Yield the readers of files with settings, by name."""
    planned = plan("--config", "{}/my.yaml")
    yield "yaml", Rotten({"my.yaml": yaml.safe_dump(FLAGS).encode()}, "my.yaml", planned, 4)
    yield "yaml of JSON", Rotten({"my.yaml": in_json(FLAGS)}, "my.yaml", planned, 4)
    words = ("--deepspeed-config", "{}/ds.json", "--task", "causal_lm", "--device", "cpu", "--nproc-per-node", "2")
    yield "deepspeed", Rotten({"ds.json": in_json(DEEPSPEED_FILE)}, "ds.json", plan(*words), 4)
    for name in ("axolotl-qlora.yml", "transformers-arguments.json", "megatron-gpt.sh"):
        options = Options(task="sequence_classification") if name.endswith(".json") else Options()

        def convert(folder: Path, name: str = name, options: Options = options) -> None:
            converted(folder / name, None, options)

        yield name, Rotten({name: (CONFIGURATIONS / name).read_bytes()}, name, convert)


def model_readers(folder: Path, tokenizer: Path) -> Iterator[tuple[str, Rotten]]:
    """Yield the readers of a model's files, by name."""
    for name, (config, head) in SHAPES.items():
        content = in_json({**config.to_dict(), "architectures": [head]})
        files = {"config.json": content, "model.safetensors": b"", **files_in(tokenizer)}
        yield f"config.json {name}", Rotten(files, "config.json", read_config, 10)
    GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=8, n_layer=1, n_head=1)).save_pretrained(folder)
    files = files_in(folder) | files_in(tokenizer)
    yield "config.json with weights", Rotten(files, "config.json", read_model, 20)
    yield "model.safetensors", Rotten(files, "model.safetensors", read_model, 20)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        yield name, Rotten(files_in(tokenizer), name, read_tokenizer, 4)
    for name in ("vocab.json", "merges.txt"):
        yield name, Rotten(files_in(tokenizer), name, read_vocabulary, 4)
    adapters = {
        "adapter_config.json": in_json({"base_model_name_or_path": "base", "r": 8, "peft_type": "LORA"}),
        "adapter_base.json": in_json({"fingerprints": {"other": "abc"}}),
    }
    for name in adapters:
        yield name, Rotten(adapters, name, read_adapters)


def data_readers(folder: Path, tokenizers: Mapping[str, Path]) -> Iterator[tuple[str, Rotten]]:
    """Yield the readers of data sets, by name."""
    lines = b"".join(in_json(row) + b"\n" for row in ROWS)
    delimited = ("text,label\n" + "".join(f'"{row["text"]}",{row["label"]}\n' for row in ROWS)).encode()
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    table = (folder / "rows.parquet").read_bytes()
    tables = {
        "train.jsonl": lines, "train.json": in_json(ROWS), "train.csv": delimited, "train.parquet": table,
        "train.tsv": delimited.replace(b"\t", b" ").replace(b'",', b'"\t').replace(b"text,", b"text\t"),
    }  # fmt: skip
    for name, content in tables.items():
        yield name, Rotten({name: content}, name, read_table, 2)
    header = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: a*.jsonl}\n---\n# Rows\n"
    yield "README.md", Rotten({"README.md": header, "a.jsonl": lines}, "README.md", read_table, 2)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(folder / "saved")
    saved = files_in(folder / "saved")
    yield "dataset_dict.json", Rotten(saved, "dataset_dict.json", read_table, 4)
    yield "state.json of datasets", Rotten(saved, "train/state.json", read_table, 4)
    text = "\n\n".join(TEXTS[:6]).encode()
    for name, content in {"corpus.jsonl": lines, "corpus.txt": text, "corpus.parquet": table}.items():
        yield name, Rotten({name: content}, name, read_documents)
    for name, (task, row) in TASKS.items():
        architecture = ARCHITECTURES.get(task, "bert")
        flags = {
            **TINY, "task": task, "model_type": architecture, "seq_length": 24, "validation_fraction": 0.0,
            "tokenizer_path": str(tokenizers["gpt" if architecture == "gpt2" else "bert"]),
        }  # fmt: skip

        def prepare(folder: Path, flags: Mapping[str, Any] = flags) -> None:
            load_task(configured(**flags, data_dir=str(folder))).build_data()

        other = {**row, "label": "z"} if task == "sequence_classification" else row
        lines = b"".join(in_json(one) + b"\n" for one in (row, other) * 2)
        yield f"rows of {name}", Rotten({"train.jsonl": lines}, "train.jsonl", prepare, 20)
    (folder / "indexed").mkdir()
    numbered(folder / "indexed" / "set", [3, 4, 5])
    for name in files_in(folder / "indexed"):
        yield name, Rotten(files_in(folder / "indexed"), name, read_set)


def run_readers(folder: Path) -> Iterator[tuple[str, Rotten]]:
    """Yield the readers of a run folder's files, by name."""
    values = {"lr": 1e-3, "task": "causal_lm", "seq-length": 16}
    run = {
        "plan.json": in_json({"values": {f"--{name}": {"value": v, "origin": "x"} for name, v in values.items()}}),
        "metrics.jsonl": b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.0, "lr": 0.1}\n',
        "model/task.json": in_json({"hooks": ["build_data"], "decisions": {"columns": {"text_column": "text"}}}),
        "export/config.json": b"{}",
    }
    yield "plan.json", Rotten(run, "plan.json", read_run, 10)
    yield "metrics.jsonl", Rotten(run, "metrics.jsonl", read_run, 10)
    yield "task.json", Rotten(run, "model/task.json", read_run, 10)
    checkpoint.save(folder, 3, Shelf(), {"samples": 4}, alone())
    saved = {name: content for name, content in files_in(folder).items() if name.startswith("step-3/")}
    for name in saved:
        yield Path(name).name, Rotten(saved, name, read_checkpoint)


@pytest.fixture(scope="module")
def readers(
    tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path, bert_folder: Path
) -> Iterator[Mapping[str, Rotten]]:
    def folder() -> Path:
        return tmp_path_factory.mktemp("valid")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        logging.disable()  # libraries warn of what they read
        yield {
            **dict(settings_readers()),
            **dict(model_readers(folder(), gpt_folder)),
            **dict(data_readers(folder(), {"gpt": gpt_folder, "bert": bert_folder})),
            **dict(run_readers(folder())),
        }
        logging.disable(logging.NOTSET)
