"""Files with bad and odd rows, for every task: one error, or left out and counted. Rows are read by their columns."""

import contextlib
import csv
import gzip
import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.data.finetuning.locating import check_input_columns, check_training_columns, columns_of
from rapidformer_templates.data.finetuning.tables import read_dataset, read_part
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.data.text.bad_lines import add_by_reason, describe_skipped
from rapidformer_templates.data.text.files import data_stem, data_suffix
from rapidformer_templates.errors import DataError, RapidformerError
from rapidformer_templates.planning.flags import DataFlags
from rapidformer_templates.run.predictions import samples_as_part
from tests.support.messages import Says
from tests.support.preference_runs import words
from tests.support.texts import Configure, Load, write_jsonl

SAY = {"prompt": "say the cat", "chosen": " a dog", "rejected": " the house"}
TALK = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "the cat"}]


def answered(*answer: str) -> dict[str, list[Any]]:
    return {"text": list(answer), "answer_start": [4] * len(answer)}


GOOD: dict[str, dict[str, Any]] = {
    "classes": {"text": "the cat", "label": "x"},
    "pairs": {"text": "the cat", "other": "a", "label": "x"},
    "several labels": {"text": "a", "label": ["x"]},
    "numbers": {"text": "a", "label": "0.5"},
    "tags": {"tokens": ["the", "cat"], "tags": ["O", "B-x"]},
    "answers": {"question": "who", "context": "the cat", "answers": answered("cat")},
    "texts": {"text": "the cat runs"},
    "chat": {"messages": TALK},
    "instructions": {"instruction": "say", "output": "the cat"},
    "masks": {"text": "the cat runs"},
    "targets": {"source": "the cat", "target": "a dog"},
    "dpo": SAY,
    "kto": {"prompt": "say", "completion": " a", "label": "true"},
    "rewards": SAY,
    "talks": {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [TALK[1] | {"content": "a dog"}]},
    "graded talks": {"prompt": TALK[:1], "completion": TALK[1:], "label": "true"},
}
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    # name: (task, flags, changes of a good row)
    "classes": ("sequence_classification", {}, [{"label": ""}, {"text": " "}, {"text": None}, {"label": "-100"}]),
    "pairs": ("sequence_classification", {"pair_column": "other"}, [{"other": ""}]),
    "several labels": (
        "sequence_classification", {"problem_type": "multi_label_classification"}, [{"label": None}],
    ),
    "numbers": ("sequence_classification", {"problem_type": "regression"}, [{"label": "n/a"}, {"label": None}]),
    "tags": ("token_classification", {}, [{"tags": ["O"]}, {"tokens": [], "tags": []}, {"tags": None}]),
    "answers": ("question_answering", {}, [{"answers": answered("dog")}, {"question": None, "answers": answered()}]),
    "texts": ("causal_lm", {}, [{"text": None}]),
    "chat": ("causal_lm", {}, [{"messages": TALK[:1]}]),
    "instructions": ("causal_lm", {}, [{"output": ""}, {"instruction": ""}]),
    "masks": ("masked_lm", {}, [{"text": None}]),
    "targets": ("seq2seq_lm", {}, [{"target": None}]),
    "dpo": ("preference", {}, [{"chosen": " the house"}]),
    "kto": ("preference", {"preference_loss": "kto"}, [{"label": ""}, {"completion": ""}]),
    "rewards": ("reward", {}, [{"rejected": " a dog"}]),
    "talks": ("preference", {}, [{"rejected": TALK[:1]}]),
    "graded talks": ("preference", {"preference_loss": "kto"}, [{"completion": TALK[:1]}]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_task_reports_or_leaves_out_all_bad_rows(case: str, load: Load, says: Says) -> None:
    (task, flags, changes), good = CASES[case], GOOD[case]
    bad = [good | change for change in changes]
    other = {**good, "label": "y"} if good.get("label") == "x" else good
    valid = [good, bad[0]] if "kto" not in flags.values() else []
    with says(DataError):
        load(task, [good, other, *bad, good, other], valid, **flags, seq_length=24).build_data()
    skipping = load(task, **flags, seq_length=24, skip_bad_lines=True)
    assert len(skipping.build_data().train) == 4  # type: ignore[arg-type]
    says.text("\n".join(skipping.bad.skipped))


@pytest.mark.parametrize("task", ["masked_lm", "causal_lm", "seq2seq_lm"])
def test_a_stream_leaves_out_the_same_rows(task: str, load: Load, says: Says) -> None:
    good, empty = {"text": "the cat runs", "target": "a"}, {"text": "", "target": "a"}
    flags = {"streaming": True, "shuffle_buffer": 4}
    rows = [good, empty, good, {"text": None, "target": "a"}]
    samples: Any = load(task, rows, **flags, skip_bad_lines=True).build_data().train
    assert len([samples[i] for i in range(8)]) == 8
    says.text("\n".join(samples.bookmark["reasons"]))
    with says(DataError):
        load(task, **flags).build_data().train[0]  # type: ignore[index]


def test_many_bad_rows_are_counted_and_five_are_shown(load: Load, tmp_path: Path, says: Says) -> None:
    lines = ["text,label", *(f"the cat,{'xy'[i % 2]}" for i in range(10)), *["a,"] * 6, "b", ",x"]
    (tmp_path / "train.csv").write_text("\n".join(lines), encoding="utf-8")
    with says(DataError):
        load("sequence_classification").build_data()
    task = load("sequence_classification", skip_bad_lines=True)
    task.build_data()
    says.text(describe_skipped(add_by_reason({}, task.bad.skipped)))


def test_rows_are_left_out_before_the_data_are_divided(load: Load) -> None:
    rows = [{"text": "the cat" * (i % 2), "label": "xy"[i // 2 % 2]} for i in range(40)]
    flags = {"skip_bad_lines": True, "validation_fraction": 0.1, "max_train_samples": 15}
    data: Any = load("sequence_classification", rows, **flags).build_data()
    assert (len(data.train), len(data.valid)) == (15, 2)


def test_values_of_another_type_and_unknown_labels(load: Load, says: Says) -> None:
    rows: list[dict[str, Any]] = [{"text": "the cat", "label": i % 2} for i in range(4)]
    with says(DataError):
        load("sequence_classification", [*rows, {"text": "a", "label": "x"}, {"text": 5, "label": 1}]).build_data()
    assert len(load("sequence_classification", skip_bad_lines=True).build_data().train) == 4  # type: ignore[arg-type]
    valid = [{"text": "a", "label": label} for label in (0, 7, 1, 8, 7)]
    with says(DataError):
        load("sequence_classification", valid=valid, skip_bad_lines=True).build_data()


def test_a_part_without_a_usable_row(load: Load, says: Says) -> None:
    for skips in (False, True):
        with says(DataError):
            load("sequence_classification", [{"text": "", "label": "x"}] * 3, skip_bad_lines=skips).build_data()


def test_reasons_that_differ_only_in_numbers_count_as_one() -> None:
    lines = ["a.csv:3: the line has 1 column", "b.parquet, row 12: empty", "a.csv:9: the line has 4 columns", "odd"]
    assert add_by_reason({}, lines) == {lines[0]: 2, lines[1]: 1, lines[3]: 1}
    assert add_by_reason({lines[0]: 2}, ["c.csv:1: the line has 7 columns"]) == {lines[0]: 3}


ROWS = [{"text": "a dog; the cat", "label": "x"}, {"text": "größe, 日本", "label": "y"}]


def delimited(delimiter: str) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, ["text", "label"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue()


BY_LINES = "\n".join(map(json.dumps, ROWS))
FILES: dict[str, bytes] = {
    "semicolons.csv": delimited(";").encode(),
    "utf16.csv": delimited(",").encode("utf-16"),
    "utf16be.csv": b"\xfe\xff" + delimited(",").encode("utf-16-be"),
    "utf16.tsv": delimited("\t").encode("utf-16"),
    "utf32.csv": delimited(";").encode("utf-32"),
    "utf16.jsonl": BY_LINES.encode("utf-16"),
    "utf16.json": json.dumps(ROWS, ensure_ascii=False).encode("utf-16"),
    "PLAIN.TSV.GZ": gzip.compress(delimited("\t").encode()),
    "plain.jsonl.gz": gzip.compress(BY_LINES.encode()),
    "plain.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "utf16.csv.gz": gzip.compress(delimited(";").encode("utf-16")),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_named", [True, False])
def test_forms_of_files(name: str, is_named: bool, configure: Configure, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    place = {"data_dir": str(tmp_path / name) if is_named else str(tmp_path)}
    raw = read_dataset(configure(**place, validation_fraction=0.0))
    assert raw.train.table.to_list() == ROWS
    number = 2 if data_suffix(Path(name)) in (".csv", ".tsv") else 1
    shows_lines = data_suffix(Path(name)) != ".json"
    assert raw.train.where(0) == f"{tmp_path / name}{':' if shows_lines else ', row '}{number}"
    assert data_stem(Path(name)) == name.split(".")[0]


def test_a_file_is_the_training_part(configure: Configure, tmp_path: Path, says: Says) -> None:
    """Only the named file is read, and a share of it is held out."""
    file = write_jsonl(tmp_path / "train.jsonl", [{"text": str(i)} for i in range(20)])
    write_jsonl(tmp_path / "valid.jsonl", [{"text": "other"}])
    raw = read_dataset(configure(data_dir=str(file), validation_fraction=0.1))
    assert (len(raw.train), len(raw.valid or ())) == (18, 2)
    further = configure(data_dir=str(file), eval_data_name=("hard=valid.jsonl",), validation_fraction=0.1)
    assert {name: len(part) for name, part in read_dataset(further).named.items()} == {"hard": 1}
    (tmp_path / "data.xlsx").write_bytes(b"PK")
    for flags in ({"data_dir": str(file), "data_name": "train"}, {"data_dir": str(tmp_path / "data.xlsx")}):
        with says(DataError):
            read_dataset(configure(**flags))


LONG = "the cat " * 200


BERT, GPT, BARE, T5 = ("bert", "bert"), ("gpt2", "gpt"), ("gpt2", "bare"), ("t5", "gpt")
ODD: Mapping[str, tuple[str, tuple[str, str], dict[str, Any], str]] = {
    # name: (task, (architecture, tokenizer), row, which of evaluation and prediction works)
    "no token": ("sequence_classification", GPT, {"text": "", "label": "O"}, ""),
    "an empty text": ("sequence_classification", BERT, {"text": " ", "label": "O"}, "predicts"),
    "an empty list of words": ("token_classification", BERT, {"tokens": [], "tags": []}, "predicts"),
    "a long text": ("sequence_classification", BERT, {"text": LONG, "label": "O"}, "evaluates, predicts"),
    "no label": ("sequence_classification", BERT, {"text": "a", "label": None}, "predicts"),
    "an unknown label": ("sequence_classification", BERT, {"text": "a", "label": "x"}, "predicts"),
    "no text": ("sequence_classification", BERT, {"text": None, "label": "O"}, ""),
    "no word": ("token_classification", BERT, {"tokens": ["a", None], "tags": ["O", "O"]}, ""),
    "a number for words": ("token_classification", BERT, {"tokens": 5, "tags": ["O"]}, ""),
    "a number for tags": ("token_classification", BERT, {"tokens": ["a"], "tags": 3}, "predicts"),
    "no words": ("token_classification", GPT, {"tokens": ["a"], "tags": ["O"]}, "evaluates, predicts"),
    "a word of no token": (
        "token_classification", BERT, {"tokens": ["\u200b", "a"], "tags": ["O", "O"]}, "evaluates, predicts",
    ),
    "an empty line": ("causal_lm", GPT, {"text": ""}, ""),
    "a prompt of no token": ("causal_lm", BARE, {"text": "日本"}, ""),
    "a long prompt": ("causal_lm", GPT, {"text": LONG * 9}, "evaluates"),
    "no message": ("causal_lm", GPT, {"messages": []}, ""),
    "no source": ("seq2seq_lm", T5, {"source": "", "target": "a"}, ""),
    "no target": ("seq2seq_lm", T5, {"source": "a", "target": ""}, "predicts"),
    "a hidden word of none": ("masked_lm", BERT, {"text": ""}, "evaluates"),
    "an empty context": (
        "question_answering", BERT, {"question": "", "context": "", "answers": {"text": [], "answer_start": []}},
        "evaluates, predicts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_rows(case: str, load: Load, bert_folder: Path, gpt_folder: Path, tmp_path: Path, says: Says) -> None:
    kind, (architecture, tokenizer), row, works = ODD[case]
    write_jsonl(tmp_path / "test.jsonl", [row])
    folder = {"gpt": gpt_folder, "bert": bert_folder, "bare": tmp_path / "bare"}[tokenizer]
    if tokenizer == "bare":  # it has no token for unknown characters
        known = Tokenizer(BPE({"<pad>": 0, "a": 1}, []))
        PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>").save_pretrained(folder)
    flags = {"model_type": architecture, "tokenizer_path": str(folder), "seq_length": 24, "max_eval_samples": 1}
    task = load(kind, **flags)
    task.load_label_state({"labels": ["O", "B-x"], "problem": "single_label_classification"})
    for step, name in ((task.build_data, "evaluates"), (partial(inputs, task), "predicts")):
        with contextlib.nullcontext() if name in works else says(DataError):
            step()


def inputs(task: Task) -> Any:
    return task.inputs(read_part(task.config, None).train)


Rows = list[dict[str, Any]]


TEXTS = [words(3 + i % 7, i) for i in range(12)]


VALUES: dict[str, Callable[[int], Any]] = {
    "text": lambda i: TEXTS[i],
    "other": lambda i: f"{TEXTS[-i]}!",
    "class": lambda i: "ab"[i % 2],
    "words": lambda i: TEXTS[i].split(),
    "tags": lambda i: ["O", "B-x", "O"] + ["O"] * (i % 7),
    "hidden": lambda i: f"[MASK] {TEXTS[i]}",
    "talk": lambda i: [{"role": "user", "content": TEXTS[i]}, {"role": "assistant", "content": TEXTS[i - 1]}],
    "worse": lambda i: [{"role": "user", "content": TEXTS[i]}, {"role": "assistant", "content": "x"}],
    "answers": lambda i: {"text": [TEXTS[i].split()[1]], "answer_start": [TEXTS[i].index(" ") + 1]},
    "x": lambda i: "x",
    "xs": lambda i: ["x"],
    "mask": lambda i: "[MASK]",
    "asked": lambda i: [{"role": "user", "content": "x"}],
}
"""How a row gets its values."""
FURTHER: Mapping[str, tuple[str, str, str]] = {
    # name: (task, columns with their values, additional columns that would be found first, or in addition)
    "a text": ("sequence_classification", "sentence=text sentiment=class", "text=x text_pair=x label=x"),
    "a pair": (
        "sequence_classification", "premise=text hypothesis=other label=class", "text=x sentence1=x sentence2=x",
    ),
    "a text alone": ("sequence_classification", "text=text label=class", "text_pair=x"),
    "words": ("token_classification", "words=words labels=tags", "tokens=xs ner_tags=xs"),
    "hidden words": ("masked_lm", "content=hidden", "text=mask"),
    "texts": ("causal_lm", "tweet=text", "messages=talk prompt=x completion=x text=x"),
    "instructions as texts": ("causal_lm", "text=text", "instruction=x output=x"),
    "prompts": ("causal_lm", "prompt=text completion=other", "messages=talk conversations=talk"),
    "older conversations": ("causal_lm", "conversations=talk", "messages=worse"),
    "instructions": ("causal_lm", "instruction=text response=other", "output=x input=x context=x system=x"),
    "texts from texts": ("seq2seq_lm", "article=text highlights=other", "source=x target=x"),
    "texts from instructions": (
        "seq2seq_lm", "instruction=text context=class answer=other", "input=x system=x target=x",
    ),
    "answers in contexts": ("question_answering", "question=mask context=text answers=answers", "text=x"),
    "preferred conversations": ("preference", "chosen=talk rejected=worse", "prompt=asked"),
    "preferred answers": ("reward", "prompt=text chosen=other rejected=class", "text=x completion=x label=class"),
}  # fmt: skip


def rows_of(columns: str) -> Rows:
    makers = [column.split("=") for column in columns.split()]
    return [{name: VALUES[kind](i) for name, kind in makers} for i in range(len(TEXTS))]


@pytest.fixture
def make(load: Load) -> Callable[..., Task]:
    return lambda case, folder, **flags: load(FURTHER[case][0], data_dir=str(folder), seq_length=96, **flags)


@pytest.mark.parametrize("case", FURTHER)
def test_further_columns_change_nothing(case: str, make: Callable[..., Task], tmp_path: Path) -> None:
    rows, further = map(rows_of, FURTHER[case][1:])
    for folder, of in {"learnt": rows, "other": [{**b, **a} for a, b in zip(rows, further, strict=True)]}.items():
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "valid.jsonl", of)
    write_jsonl(tmp_path / "learnt/train.jsonl", rows)
    trained = make(case, tmp_path / "learnt")
    wanted = trained.build_data()
    task = make(case, tmp_path / "other")
    task.load_label_state(json.loads(json.dumps(trained.decisions())))
    for told, expected in zip(task.build_data().valid or (), wanted.valid or (), strict=True):  # type: ignore[call-overload]
        np.testing.assert_equal(told, expected)
    if case == "preferred conversations":
        return  # both are answered already: --text-column selects which to answer
    both = [{**row, **more, **row} for row, more in zip(rows, further, strict=True)]
    pairs = ((trained, rows), (task, both), (trained, both))
    assert len({repr(list(one.inputs(samples_as_part(of)).rows)) for one, of in pairs}) == 1


def test_a_column_that_other_rows_lack(make: Callable[..., Task], tmp_path: Path, says: Says) -> None:
    write_jsonl(tmp_path / "train.jsonl", rows_of(FURTHER["a pair"][1]))
    write_jsonl(tmp_path / "valid.jsonl", [{"text": "a", "label": 1}])
    with says(DataError):
        make("a pair", tmp_path).build_data()
    task = make("a pair", tmp_path, text_column="text")
    task.load_label_state({"columns": {"text_column": "premise", "pair_column": "hypothesis", "label_column": "label"}})
    with says(DataError):
        task.inputs(samples_as_part(["a"], task.text_column))
    chat = make("texts", tmp_path)
    chat.load_label_state({"columns": {"kind": "chat", "text_column": "messages"}})
    assert len(chat.inputs(samples_as_part(["a cat"], chat.text_column)).rows) == 1  # it can continue any text


def test_what_nobody_has_decided_is_found_each_time(make: Callable[..., Task], tmp_path: Path) -> None:
    """This concerns a model from elsewhere, and sets of a mixture with different columns."""
    task = make("a text", tmp_path)
    task.load_label_state({})
    for column in ("text", "review"):
        assert len(task.inputs(samples_as_part([{column: "a"}])).rows) == 1
    for name, column in (("one", "text"), ("same", "text"), ("other", "review")):
        write_jsonl(tmp_path / f"{name}.jsonl", [{column: text, "label": "ab"[i % 2]} for i, text in enumerate(TEXTS)])
    for sets, columns in (
        ("0.5 one 0.5 other", None),
        ("0.5 one 0.5 same", {"text_column": "text", "pair_column": None, "label_column": "label"}),
    ):
        mixture = make("a text", tmp_path, data_name=sets)
        mixture.build_data()
        assert mixture.decisions().get("columns") == columns


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.csv").write_text("text,label\nx,0\n")
    (tmp_path / "b.tsv").write_text("text\tlabel\nx\t0\n")
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\nbroken\n{"label": 0}\n')
    (tmp_path / "d.json").write_text('[{"text": "x", "label": 0}]')
    pq.write_table(pa.table({"text": ["x"], "label": [0]}), tmp_path / "e.parquet")
    return tmp_path


def test_all_formats_name_their_columns(folder: Path) -> None:
    files = sorted(folder.iterdir())
    assert {path.name: columns_of(path) for path in files} == {path.name: ["text", "label"] for path in files}
    (folder / "f.txt").write_text("words")
    (folder / "g.csv").write_text("")
    assert columns_of(folder / "f.txt") is columns_of(folder / "g.csv") is None


def test_training_names_every_missing_column(folder: Path, says: Says) -> None:
    flags = {"data_dir": str(folder), "data_name": "a.csv"}
    for more in ({"text_column": "txt"}, {"text_column": "txt", "label_column": "gold"}):
        with says(RapidformerError):
            check_training_columns(DataFlags(**flags, **more))
    check_training_columns(DataFlags(**flags, text_column="label"))


def test_an_input_lacks_a_column(folder: Path, says: Says) -> None:
    cases: list[tuple[str, dict[str, str], dict[str, str | None]]] = [
        ("sequence_classification", {}, {"text_column": "review", "pair_column": None}),
        ("sequence_classification", {}, {"text_column": "text", "pair_column": "pair"}),
        ("sequence_classification", {"pair_column": "b"}, {}),
        ("question_answering", {}, {}),
        ("causal_lm", {"text_column": "prompt"}, {}),
        ("seq2seq_lm", {}, {"text_column": "source"}),
    ]
    for task, flags, trained in cases:
        with says(RapidformerError):
            check_input_columns(task, DataFlags(**flags), trained, folder / "a.csv")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "trained"),
    [
        ("sequence_classification", {"text_column": "text", "pair_column": None}),
        ("sequence_classification", {}),
        ("causal_lm", {"kind": "chat", "text_column": "messages"}),  # continues any usual column
        ("reward", {}),
        (None, {}),
    ],
)
def test_an_input_has_its_columns(folder: Path, task: str | None, trained: dict[str, str | None]) -> None:
    check_input_columns(task, DataFlags(), trained, folder / "a.csv")
