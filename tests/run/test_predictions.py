"""Predictions of a saved model, task by task, compared with transformers' own pipelines and forwards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    GPT2Config,
    PreTrainedModel,
    T5Config,
    pipeline,
)

from rapidformer_templates import Finetuner
from rapidformer_templates.data.generation import Generation
from rapidformer_templates.errors import ConfigError, DataError, Refused
from rapidformer_templates.run.predictions import predict_samples
from tests.support.messages import Says
from tests.support.saved_models import OpenedModel, open_saved
from tests.support.texts import WORDS, write_jsonl

TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, 2 + i * 3 % 11)) for i in range(4)]
LABELS = {"id2label": {0: "bad", 1: "good", 2: "odd"}, "label2id": {"bad": 0, "good": 1, "odd": 2}}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
Make = Callable[..., Path]


@pytest.fixture
def bert(tmp_path: Path, bert_folder: Path) -> Make:
    """Return a function that saves a model with some head by ``save_pretrained``. Its outputs are far from uniform."""

    def make(head: str, **config: Any) -> Path:
        tokenizer = AutoTokenizer.from_pretrained(bert_folder)
        sizes = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 48, "initializer_range": 0.3}
        return saved(tmp_path / head, getattr(transformers, head)(BertConfig(**sizes, **config)), tokenizer)

    return make


def saved(folder: Path, model: PreTrainedModel, tokenizer: Any) -> Path:
    torch.manual_seed(7)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def records(opened: OpenedModel, samples: list[Any], **generation: Any) -> list[dict[str, Any]]:
    """Predict in batches of three, so that rows are grouped and then restored to their order."""
    return predict_samples(opened.task, opened.model, samples, 3, Generation(**generation))


def close(told: float, wanted: float) -> bool:
    return told == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def test_one_label(bert: Make) -> None:
    """Also of pairs of texts."""
    folder = bert("BertForSequenceClassification", **LABELS)
    opened, tell = open_saved(folder), pipeline("text-classification", str(folder), top_k=None)
    told = records(opened, list(TEXTS))
    for record, wanted in zip(told, tell(TEXTS), strict=True):
        assert (record["label"], record["score"]) == (wanted[0]["label"], record["scores"][wanted[0]["label"]])
        assert all(close(record["scores"][of["label"]], of["score"]) for of in wanted)
    pairs = [{"premise": a, "hypothesis": b} for a, b in zip(TEXTS, reversed(TEXTS), strict=True)]
    best = tell([{"text": p["premise"], "text_pair": p["hypothesis"]} for p in pairs])
    assert [record["label"] for record in records(opened, pairs)] == [one[0]["label"] for one in best]
    assert records(opened, pairs) != told


def test_several_labels_and_numbers(bert: Make) -> None:
    folder = bert("BertForSequenceClassification", **LABELS, problem_type="multi_label_classification")
    tell = pipeline("text-classification", str(folder), top_k=None)
    for record, wanted in zip(records(open_saved(folder), list(TEXTS)), tell(TEXTS), strict=True):
        assert all(close(record["scores"][of["label"]], of["score"]) for of in wanted)
        assert sorted(record["labels"]) == sorted(of["label"] for of in wanted if of["score"] > 0.5)
    folder = bert("BertForSequenceClassification", num_labels=1, problem_type="regression")
    wanted = pipeline("text-classification", str(folder), function_to_apply="none")(TEXTS)
    told = records(open_saved(folder), list(TEXTS))
    assert all(close(one["value"], other["score"]) for one, other in zip(told, wanted, strict=True))
    scored = records(open_saved(folder, "reward"), [{"prompt": "the cat", "completion": " sees a tree"}])
    whole = pipeline("text-classification", str(folder), function_to_apply="none")("the cat sees a tree")
    assert close(scored[0]["score"], whole[0]["score"])


def test_a_template_needs_flags_of_training_only_to_train(bert: Make, tmp_path: Path) -> None:
    folder = bert("BertForSequenceClassification", **LABELS)
    flags: dict[str, Any] = {"task": "sequence_classification", "pretrained_model_name_or_path": str(folder)}
    task = Finetuner(**flags, device="cpu")
    for record, wanted in zip(task.predict(TEXTS), pipeline("text-classification", str(folder))(TEXTS), strict=True):
        assert record["label"] == wanted["label"]
        assert close(record["score"], wanted["score"])
    rows = [{"text": text, "label": ("bad", "good", "odd")[i % 3]} for i, text in enumerate(TEXTS)]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer, classes = AutoTokenizer.from_pretrained(folder), torch.arange(len(rows)) % 3
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS])
    wanted_loss = float(torch.nn.functional.cross_entropy(logits, classes))
    metrics = task.evaluate(rows)
    assert metrics["eval_loss"] == pytest.approx(wanted_loss, rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(float((logits.argmax(1) == classes).float().mean()))
    with pytest.raises(DataError, match="there is no data to evaluate on"):
        task.evaluate()
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "valid.jsonl", rows)
    named = Finetuner(**flags, device="cpu", data_dir=str(tmp_path))
    assert named.evaluate()["eval_loss"] == pytest.approx(wanted_loss, rel=1e-5)
    for untrained in (task, named):
        with pytest.raises(Refused) as refused:
            untrained.fit()
        assert [found.rule for found in refused.value.diagnostics] == ["RF015", "RF031", "RF100"]
    absent = "cuda" if not torch.cuda.is_available() else "xpu"
    with pytest.raises(ConfigError, match="but torch can use none here"):
        Finetuner(**flags, device=absent).predict(TEXTS)


def recall(pairs: Sequence[tuple[str, str]], name: str) -> float:
    return float(np.mean([told == true for told, true in pairs if true == name]))


class RecallByName(Finetuner):
    """Reports the recall of each class under its name."""

    def compute_metrics(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        names = self.task.labels
        pairs = [(names[told], names[true]) for told, true in zip(predictions, references, strict=True)]
        return {f"recall/{name}": recall(pairs, name) for name in names}


@pytest.mark.longer
def test_own_metrics_have_the_names_of_classes(bert: Make, tmp_path: Path) -> None:
    folder = bert("BertForSequenceClassification", **LABELS)
    names = [("odd", "good", "bad")[i % 3] for i in range(len(TEXTS))]  # not in the order of their numbers
    rows = [{"text": text, "label": name} for text, name in zip(TEXTS, names, strict=True)]
    for part in ("train", "valid"):
        write_jsonl(tmp_path / f"{part}.jsonl", rows)
    told = [one["label"] for one in pipeline("text-classification", str(folder))(TEXTS)]
    wanted = {f"recall/{name}": recall(list(zip(told, names, strict=True)), name) for name in LABELS["label2id"]}
    flags = {"task": "sequence_classification", "pretrained_model_name_or_path": str(folder), "device": "cpu"}
    assert RecallByName(**flags).evaluate(rows).items() >= wanted.items()
    job = RecallByName(**flags, data_dir=str(tmp_path), train_iters=1, lr=0.0, no_save=True, keep_best=False)
    assert job.fit()["metrics"].items() >= wanted.items()


def test_tags_of_words(bert: Make) -> None:
    folder = bert("BertForTokenClassification", **LABELS)
    told = records(open_saved(folder), [{"tokens": text.split()} for text in TEXTS])
    assert told == records(open_saved(folder), list(TEXTS))
    for record, text in zip(told, TEXTS, strict=True):
        found = pipeline("token-classification", str(folder), ignore_labels=[])(text)
        starts = np.cumsum([0, *(len(word) + 1 for word in text.split())])[:-1]
        assert record["tags"] == [next(f["entity"] for f in found if f["start"] == start) for start in starts]
    long = records(open_saved(folder), [" ".join(WORDS * 3)])[0]["tags"]
    assert len(long) == 3 * len(WORDS)
    assert (long[0], long[-1]) != (None, None)
    assert long[-1] is None  # truncated to the 48 tokens that the model accepts


def test_hidden_words(bert: Make, says: Says) -> None:
    folder = bert("BertForMaskedLM")
    texts = ["the [MASK] sees a tree", "[MASK] cat runs", "a big [MASK] never [MASK] under it"]
    told, fill = records(open_saved(folder), texts), pipeline("fill-mask", str(folder))
    for text, record in zip(texts, told, strict=True):
        wanted = fill(text)
        for mask, best in zip(record["masks"], wanted if "MASK] never" in text else [wanted], strict=True):
            assert [c["token"] for c in mask] == [c["token_str"] for c in best]
            assert all(close(one["score"], other["score"]) for one, other in zip(mask, best, strict=True))
    assert told[0]["text"] == fill(texts[0])[0]["sequence"]
    with says(DataError):
        records(open_saved(folder), [*texts, "no mask"])


def test_answers_in_a_context(bert: Make) -> None:
    folder = bert("BertForQuestionAnswering")
    opened = open_saved(folder)
    contexts = [" ".join(WORDS[i : i + 9]) for i in (0, 7, 20)]
    rows = [{"question": "the cat", "context": context} for context in contexts]
    told = records(opened, rows)
    for context, record in zip(contexts, told, strict=True):
        encoded = opened.tokenizer("the cat", context, return_tensors="pt", return_offsets_mapping=True)
        offsets, inside = encoded.pop("offset_mapping")[0], [i == 1 for i in encoded.encodings[0].sequence_ids]
        with torch.no_grad():
            out = opened.model(**encoded)
        spans = [(i, j) for i in range(len(inside)) for j in range(i, len(inside)) if inside[i] and inside[j]]
        i, j = max(spans, key=lambda span: float(out.start_logits[0, span[0]] + out.end_logits[0, span[1]]))
        assert record["answer"] == context[offsets[i][0] : offsets[j][1]]
    long = {"question": "the cat", "context": " ".join(WORDS * 4)}  # several windows, next to rows of one
    assert records(opened, [rows[0], long, rows[1]])[::2] == [told[0], told[1]]


@pytest.fixture
def gpt(tmp_path: Path, gpt_folder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(gpt_folder)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return saved(tmp_path / "gpt", transformers.GPT2LMHeadModel(config), tokenizer)


def test_texts_that_go_on(gpt: Path) -> None:
    opened = open_saved(gpt)
    told = records(opened, list(TEXTS), max_new_tokens=8)
    for text, record in zip(TEXTS, told, strict=True):
        ids = opened.tokenizer(text, return_tensors="pt").input_ids
        alone = opened.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert record == {"text": opened.tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)}
    rows = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    answered = [{"messages": [*row["messages"], {"role": "assistant", "content": "yes"}]} for row in rows]
    answers = records(opened, rows, max_new_tokens=4)
    assert answers == records(opened, answered, max_new_tokens=4)
    asked = opened.tokenizer.apply_chat_template(rows[0]["messages"], add_generation_prompt=True, tokenize=False)
    assert asked.endswith("assistant:\n")
    assert answers[0] == records(opened, [asked], max_new_tokens=4)[0]
    assert records(opened, [{"instruction": TEXTS[0]}], max_new_tokens=4) == answers[:1]


@pytest.mark.longer
def test_draws_follow_the_seed(gpt: Path, says: Says) -> None:
    opened = open_saved(gpt)
    before = torch.random.get_rng_state()
    drawn = [records(opened, list(TEXTS), max_new_tokens=8, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(before, torch.random.get_rng_state())
    for rows in (["the", "the" + " the" * 79], [{"name": "the"}], [["a", "b"]]):
        with says(DataError):
            records(opened, rows)


def test_texts_from_texts(tmp_path: Path, bert_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0,
        eos_token_id=3, decoder_start_token_id=0,
    )  # fmt: skip
    folder = saved(tmp_path / "t5", transformers.T5ForConditionalGeneration(config), tokenizer)
    opened = open_saved(folder)
    for text, record in zip(TEXTS, records(opened, list(TEXTS), max_new_tokens=6), strict=True):
        alone = opened.model.generate(tokenizer(text, return_tensors="pt").input_ids, max_new_tokens=6, do_sample=False)
        assert record == {"text": tokenizer.decode(alone[0], skip_special_tokens=True)}


def test_folders_that_say_nothing(tmp_path: Path, bert: Make, says: Says) -> None:
    for folder in (bert("BertModel"), tmp_path, tmp_path / "nowhere"):
        with says(ConfigError):
            open_saved(folder)
