"""Multiple choice, compared with transformers' collator and model, and with one process."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForMultipleChoice,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForMultipleChoice,
)

from rapidformer_templates import Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.errors import DataError, RapidformerError
from tests.support.messages import Says
from tests.support.parity import Trained, trained
from tests.support.preference_runs import words
from tests.support.selection import by_default, selected
from tests.support.texts import Load, write_jsonl
from tests.support.worker_pool import run_in_workers

ROWS = [
    {"context": words(3 + i % 5, i), "choices": [words(1 + (i + j) % 6, 100 * j + i) for j in range(4)],
     "label": i * 3 % 4}
    for i in range(16)
]  # fmt: skip


@pytest.fixture
def load(load: Load) -> Load:
    return partial(load, "multiple_choice")


def read(task: Task, count: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return the first samples, and their batch."""
    data: Any = task.build_data()
    samples = [data.train[i] for i in range(count)]
    return samples, data.collate(samples)


def test_batches_losses_and_choices_are_those_of_transformers(load: Load, bert_folder: Path, tmp_path: Path) -> None:
    task = load(ROWS, seq_length=12)
    _, batch = read(task, 16)
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    features = [
        {**tokenizer([row["context"]] * 4, row["choices"], truncation=True, max_length=12), "label": row["label"]}
        for row in ROWS
    ]
    wanted = DataCollatorForMultipleChoice(tokenizer)(features)
    assert batch.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in batch.items())
    task.build_model().save_pretrained(tmp_path / "model")
    model = AutoModelForMultipleChoice.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        outputs = model(**wanted)
        torch.testing.assert_close(task.compute_loss(model, batch), outputs.loss)
    metrics = task.compute_metrics(*task.predict(outputs, batch))
    assert metrics == {"accuracy": float((outputs.logits.argmax(1) == wanted["labels"]).float().mean())}


def test_the_length_of_a_sample_is_that_of_its_longest_row(load: Load) -> None:
    task = load(ROWS)
    lengths: Any = task.build_data().lengths
    assert lengths.tolist() == read(task, 16)[1]["attention_mask"].sum(-1).amax(-1).tolist()


ARC = {"text": ["runs", "eats"], "label": [1, 2]}
KNOWN: dict[str, dict[str, Any]] = {
    "swag": {"sent1": "the cat", "sent2": "it", "ending0": "runs", "ending1": "eats", "label": "1"},
    "race": {"article": "the cat", "question": "it", "options": ["runs", "eats"], "answer": "B"},
    "arc": {"context": "the cat", "question": "it", "choices": ARC, "label": "2"},
    "hellaswag": {"ctx": "the cat", "endings": ["it runs", "it eats"], "label": 1.0},
    "own columns": {"passage": "the cat", "pick": ["it runs", "it eats"], "gold": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_columns_of_known_data_sets(load: Load, bert_folder: Path, name: str) -> None:
    flags = {"pair_column": "pick", "label_column": "gold"} if name == "own columns" else {}
    samples, _ = read(load([KNOWN[name]] * 2, **flags), 1)
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    wanted = tokenizer(["the cat"] * 2, ["it runs", "it eats"])["input_ids"]
    assert [ids.tolist() for ids in samples[0]["input_ids"]] == wanted
    assert samples[0]["labels"] == 1


NUMBERED: dict[str, tuple[dict[str, Any], str, list[Any], list[int]]] = {
    "winogrande": (
        {"sentence": "the cat", "option1": "runs", "option2": "eats"}, "answer", ["1", "2", "2", "1"], [0, 1, 1, 0],
    ),
    "a list from one": ({"context": "the cat", "choices": ["a", "dog", "it"]}, "label", [3, 1, 2, 1], [2, 0, 1, 0]),
    "copa": ({"premise": "the cat", "choice1": "runs", "choice2": "eats"}, "label", [1, 0, 0, 1], [1, 0, 0, 1]),
    "a list from zero": ({"context": "the cat", "choices": ["a", "dog", "it"]}, "label", [1, 1, 2, 1], [1, 1, 2, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERED)
@pytest.mark.parametrize("skips", [False, True])
def test_numbers_of_choices_begin_at_zero_or_one(load: Load, name: str, skips: bool) -> None:
    row, column, labels, wanted = NUMBERED[name]
    rows = [row | {column: label} for label in labels]
    data: Any = load(rows, rows[:1], skip_bad_lines=skips).build_data()  # the training part decides
    assert [sample["labels"] for sample in data.train] == wanted
    assert data.valid[0]["labels"] == wanted[0]


def test_a_named_label_comes_before_an_index(load: Load) -> None:
    """ARC names the choices of some rows 1 to 4."""
    choices = {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}
    samples, _ = read(load([{"question": "the cat", "choices": choices, "answerKey": "1"}] * 2), 2)
    assert [sample["labels"] for sample in samples] == [0, 0]


BAD: dict[str, dict[str, Any]] = {
    "three choices": {"choices": ["a", "b", "c"]},
    "a large label": {"label": 4},
    "a negative label": {"label": -1},
    "no label": {"label": None},
    "an empty choice": {"choices": ["a", "b", "", "d"]},
    "one choice": {"choices": ["a"]},
    "no choices": {"choices": None},
    "no context": {"context": " "},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(load: Load, name: str, says: Says) -> None:
    rows = [ROWS[0], ROWS[1], {**ROWS[2], **BAD[name]}, *ROWS[3:]]
    with says(DataError):
        load(rows).build_data()
    task = load(rows, skip_bad_lines=True)
    task.build_data()
    assert len(task.bad.skipped) == 1


def test_mixtures_have_one_number_of_choices(load: Load, tmp_path: Path, says: Says) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_jsonl(tmp_path / "b.jsonl", [{**row, "choices": row["choices"][:3], "label": 0} for row in ROWS])
    with says(DataError):
        load(data_name="0.5 a 0.5 b").build_data()
    load(ROWS, data_name="0.5 a 0.5 train").build_data()
    with says(DataError):
        load([{"context": "the cat", "label": 0}]).build_data()


@pytest.mark.parametrize(
    "flags",
    ["--data-iterator dynamic-shape", "--pack-sequences", "--neftune-alpha 5", "--streaming", "--mask-prob 0.2"],
)
def test_combinations_without_a_meaning_are_refused(tmp_path: Path, flags: str, says: Says) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    base = f"--task multiple_choice --model-type bert --data-dir {tmp_path} --seq-length 16 --train-iters 2 --no-save"
    with says(RapidformerError):
        Trainer([*base.split(), "--lr", "1e-3", *flags.split()]).fit()


# Runs

FLAGS = (
    "--task multiple_choice --seq-length 16 --global-batch-size 4 --micro-batch-size 4 --train-iters 3 --dropout 0"
    " --lr 0.5 --adam-epsilon 0.1 --eval-interval 3"
)
LAYOUTS = {
    "accumulated": "--micro-batch-size 1",
    "ddp": "--micro-batch-size 2",
    "fsdp": "--micro-batch-size 2 --fsdp-memory-optimization",
    "tensor": "--micro-batch-size 2 --tensor-model-parallel-size 2",
    "pipeline": "--micro-batch-size 1 --pipeline-model-parallel-size 2",
    "context": "--micro-batch-size 2 --context-parallel-size 2",
    "checkpointed": "--micro-batch-size 2 --checkpoint-activations",
    "lora": "--micro-batch-size 2 --lora-rank 2",
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path) -> Path:
    """Return the folder of a classifier with three labels and large weights, whose head cannot be used."""
    folder, tokenizer = tmp_path_factory.mktemp("start"), AutoTokenizer.from_pretrained(bert_folder)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, num_labels=3, initializer_range=0.5, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def flags_of(folder: Path, start: Path) -> list[str]:
    for part in ("train", "valid"):
        write_jsonl(folder / f"{part}.jsonl", ROWS)
    return [*FLAGS.split(), "--data-dir", str(folder), "--pretrained-model-name-or-path", str(start)]


def _train_all(workers: object, common: list[str], layouts: dict[str, str]) -> dict[str, Trained]:
    return {name: trained(Trainer([*common, "--no-save", *flags.split()])) for name, flags in layouts.items()}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Path
) -> tuple[dict[str, Trained], dict[str, Trained]]:
    """The runs of one process, and the layouts of two workers."""
    common = flags_of(tmp_path_factory.mktemp("rows"), start)
    layouts = {layout: LAYOUTS[layout] for layout in selected(request, "layout")}
    references = {"": ""} | ({"lora": "--lora-rank 2"} if "lora" in layouts else {})
    alone = _train_all(None, common, references)
    return alone, run_in_workers(2, _train_all, common, layouts)[0]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default(["tensor"], LAYOUTS))
def test_every_layout_trains_as_one_process_does(layout: str, runs: Any) -> None:
    alone, together = runs
    expected, result = alone[layout if layout in alone else ""], together[layout]
    torch.testing.assert_close(result["curve"], expected["curve"], rtol=1e-4, atol=1e-5)
    assert result["evaluations"] == pytest.approx(expected["evaluations"], rel=1e-4)
    for weight, value in expected["weights"].items():
        torch.testing.assert_close(result["weights"][weight], value, rtol=1e-3, atol=1e-4, msg=weight)


@pytest.mark.slow
def test_experts_do_not_count_padding(tmp_path: Path, bert_folder: Path) -> None:
    """The balance loss is a mean over the tokens of all choices, no matter how batches are padded."""
    sizes = "--model-type bert --num-layers 2 --hidden-size 32 --num-attention-heads 2"
    sizes += " --num-experts 2 --moe-loss-coeff 1"
    common = [*flags_of(tmp_path, bert_folder)[:-2], "--tokenizer-path", str(bert_folder), *sizes.split()]
    whole, apart = _train_all(None, common, {"whole": "", "apart": "--micro-batch-size 1"}).values()
    torch.testing.assert_close(apart["curve"], whole["curve"], rtol=1e-4, atol=1e-5)
    balance = [[line["balance_loss"] for line in run["lines"] if "balance_loss" in line] for run in (whole, apart)]
    assert balance[0] == pytest.approx(balance[1], rel=1e-4)


@pytest.mark.slow
def test_commands_train_evaluate_predict_and_export(tmp_path: Path, start: Path) -> None:
    run = tmp_path / "run"
    assert main([*flags_of(tmp_path, start), "--save", str(run)]) == 0
    # Predictions need no labels, and their rows may have any number of choices.
    rows = [{"context": row["context"], "choices": row["choices"][: 2 + i % 3]} for i, row in enumerate(ROWS)]
    source, output = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    assert main(["predict", str(run), "--input", str(source), "--output", str(output)]) == 0
    model = AutoModelForMultipleChoice.from_pretrained(run / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    for row, line in zip(rows, output.read_text().splitlines(), strict=True):
        pairs = [row["context"]] * len(row["choices"]), row["choices"]
        inputs = tokenizer(*pairs, padding=True, truncation=True, max_length=16, return_tensors="pt")
        with torch.no_grad():
            shares = model(**{name: tensor[None] for name, tensor in inputs.items()}).logits[0].softmax(-1)
        prediction = json.loads(line)["prediction"]
        assert prediction["label"] == int(shares.argmax())
        assert prediction["scores"] == pytest.approx(shares.tolist(), rel=1e-3, abs=1e-4)
    # Other data may have another number of choices.
    write_jsonl(tmp_path / "other.jsonl", [{**row, "choices": row["choices"][:3], "label": 0} for row in ROWS])
    for saved in (run, run / "export"):
        assert main(["evaluate", str(saved), "--data-dir", str(tmp_path), "--data-name", "other.jsonl"]) == 0
