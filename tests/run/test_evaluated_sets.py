"""Additional validation sets by name, and the test part: each is exact in every layout, and reported under its name."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM, AutoTokenizer

from rapidformer_templates import Data, Finetuner, Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ConfigError, DataError, RapidformerError, Refused
from rapidformer_templates.run.folder import read_metrics
from tests.support.jobs import CausalJob
from tests.support.lines import FLAGS, Line
from tests.support.messages import Says
from tests.support.parity import observed, reference
from tests.support.selection import by_default
from tests.support.texts import WORDS, write_jsonl
from tests.support.tracked import Tracked

SIZES = {"train": 24, "validation": 9, "test": 7, "hard": 5}
MODEL = "--model-type gpt2 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --dropout 0 --seq-length 24"
TRAINING = "--task causal_lm --train-iters 4 --lr 1e-2 --global-batch-size 4 --eval-interval 2 --evaluate-test"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.default_rng(0)
    for name, count in SIZES.items():
        rows = [{"text": " ".join(generator.choice(WORDS, int(generator.integers(3, 15))))} for _ in range(count)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    (folder / "other").mkdir()
    shutil.copy(folder / "train.jsonl", folder / "other" / "train.jsonl")
    shutil.copy(folder / "hard.jsonl", folder / "other" / "validation.jsonl")
    return folder


def flags_of(texts: Path, tokenizer: Path, save: Path, *more: str) -> list[str]:
    where = ["--data-dir", str(texts), "--tokenizer-path", str(tokenizer), "--save", str(save)]
    return [*MODEL.split(), *TRAINING.split(), *where, "--eval-data-name", "hard.jsonl", "other=other", *more]


def train(workers: Any, flags: list[str]) -> dict[str, Any]:
    return Trainer(flags).fit()


@pytest.fixture(scope="module")
def alone(texts: Path, gpt_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the run folder and the summary of a run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, train(None, flags_of(texts, gpt_folder, folder))


def mean_loss(folder: Path, texts: Path, tokenizer: Path, name: str) -> float:
    """Return the mean loss over all predicted tokens, by the formula, with the exported model and only transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder / "export").eval()
    tokens = AutoTokenizer.from_pretrained(tokenizer)
    total = count = 0.0
    for line in (texts / f"{name}.jsonl").read_text().splitlines():
        row = torch.tensor([[*tokens(json.loads(line)["text"])["input_ids"], tokens.eos_token_id][:24]])
        with torch.no_grad():
            total += float(model(row, labels=row).loss) * (row.shape[1] - 1)
        count += row.shape[1] - 1
    return total / count


def test_each_set_has_the_mean_of_its_targets(
    alone: tuple[Path, dict[str, Any]], texts: Path, gpt_folder: Path
) -> None:
    folder, summary = alone
    metrics = summary["metrics"]
    names = ("loss", "perplexity", "token_accuracy")
    named = [f"{of}/{name}" for of in ("hard.jsonl", "other", "test") for name in names]
    assert list(metrics) == ["eval_loss", *names[1:], *named]
    for name, file in (("eval_loss", "validation"), ("hard.jsonl/loss", "hard"), ("test/loss", "test")):
        assert metrics[name] == pytest.approx(mean_loss(folder, texts, gpt_folder, file), rel=1e-5), name
    assert {n: metrics[f"other/{n}"] for n in names} == {n: metrics[f"hard.jsonl/{n}"] for n in names}
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "hard.jsonl/loss" in line] == [2, 4]
    (of_test,) = [line for line in lines if "test/loss" in line]
    assert of_test == {"step": 4, **{name: value for name, value in metrics.items() if name.startswith("test/")}}


class Scaled(Trainer):
    """Trains on another loss than that of the task."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = 5 * model(**batch).loss
        return loss


def test_another_loss_has_no_perplexity(texts: Path, gpt_folder: Path, tmp_path: Path, says: Says) -> None:
    flags = flags_of(texts, gpt_folder, tmp_path, "--no-export-model")
    metrics = Scaled(flags).fit()["metrics"]
    assert [name for name in metrics if "perplexity" in name] == []
    assert metrics["token_accuracy"] > 0
    with says(ConfigError):
        Scaled([*flags, "--overwrite", "--metric-for-best", "perplexity"]).fit()


def test_the_exported_weights_are_tested(texts: Path, gpt_folder: Path, tmp_path: Path) -> None:
    """The best by one of the sets is not the last. The test line has its step, and another end of the run adds none."""
    flags = flags_of(texts, gpt_folder, tmp_path, "--metric-for-best", "other/loss", "--metric-for-best-mode", "max")
    for more in ([], ["--resume"]):
        summary = train(None, [*flags, *more])
        assert (summary["best"]["metric"], summary["best"]["step"], summary["steps"]) == ("other/loss", 2, 4)
        loss = mean_loss(tmp_path, texts, gpt_folder, "test")
        assert summary["metrics"]["test/loss"] == pytest.approx(loss, rel=1e-5)
        (line,) = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "test/loss" in line]
        assert (line["step"], line["test/loss"]) == (2, pytest.approx(loss, rel=1e-5))


def test_a_script_gives_its_sets_by_name(tmp_path: Path) -> None:
    """The first of them determines the best checkpoint."""
    job = Tracked(["--lr", "0.1", "--train-iters", "6", "--eval-interval", "2", "--keep-best", "--save", str(tmp_path)])
    summary = job.fit()
    assert summary["best"]["metric"] == "near/loss"
    weight, bias = (parameter.detach().numpy().item() for parameter in job.model.parameters())
    for name, samples in job.data.valid.items():
        wanted = np.mean([(weight * s["x"] + bias - s["y"]) ** 2 for s in samples])
        assert summary["metrics"][f"{name}/loss"] == pytest.approx(float(wanted), rel=1e-4)
    assert summary["metrics"]["near/samples@1"] == 5
    assert summary["metrics"]["far/samples@1"] == 7
    assert "test/loss" not in summary["metrics"]


def test_an_answer_is_looked_up_in_its_own_set(bert_folder: Path, tmp_path: Path) -> None:
    """Question answering finds the true answers by their indices, which differ between the sets."""
    for name, count in (("train", 8), ("validation", 3), ("test", 5), ("far", 4)):
        rows: list[dict[str, Any]] = []
        for i, word in enumerate(WORDS[:count]):
            context = f"number {i} the cat sees {word} today"
            answers = {"text": [word], "answer_start": [context.index("sees ") + 5]}
            rows.append({"question": "what", "context": context, "answers": answers})
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    seen: dict[str, list[list[str]]] = {}

    class Spy(Finetuner):
        def compute_metrics(self, predictions: Any, references: Any) -> Any:
            task: Any = self.task
            seen[str(len(seen))] = [[text for text, _ in example.answers] for example in task.examples]
            assert len(predictions) == len(task.features)
            return super().compute_metrics(predictions, references)

    flags = f"--task question_answering {MODEL.replace('gpt2', 'bert')} --no-save --train-iters 1 --lr 1e-3".split()
    flags += ["--data-dir", str(tmp_path), "--tokenizer-path", str(bert_folder), "--eval-data-name", "far"]
    spy = Spy([*flags, "--evaluate-test"])
    metrics = spy.fit()["metrics"]
    assert {"f1", "far/f1", "test/f1"} <= metrics.keys()
    assert list(seen.values()) == [[[word] for word in WORDS[:count]] for count in (3, 4, 5)]
    # Then evaluate its test part, rows whose answers are its predictions, and samples without known answers.
    seen.clear()
    assert spy.evaluate(spy.data.test)["f1"] == metrics["test/f1"]
    rows = rows[::-1]
    told = [answer["answer"] for answer in spy.predict(rows)]
    for row, text in zip(rows, told, strict=True):
        row["answers"] = {"text": [text], "answer_start": [row["context"].index(text)]}
    assert spy.evaluate(rows)["exact_match"] == 100
    assert list(seen.values()) == [[[word] for word in WORDS[:5]], [[text] for text in told]]
    with pytest.raises(DataError, match="the metrics of these samples are unknown"):
        spy.evaluate(Subset(spy.data.test, range(5)))


def test_rows_are_evaluated_whatever_the_run_learnt_from(texts: Path, gpt_folder: Path, tmp_path: Path) -> None:
    """A run of a mixture does not have a single file, and a corpus does not have rows."""
    for name in ("one", "two"):
        shutil.copytree(texts / "other", tmp_path / name)
    given = f"{MODEL} --task causal_lm --no-save --lr 1e-2 --train-iters 1 --tokenizer-path".split()
    mixture, alone = (
        Finetuner([*given, str(gpt_folder), "--data-dir", str(tmp_path), "--data-name", name])
        for name in ("0.5 one 0.5 two", "one")
    )
    rows = [{"text": f"{WORDS[0]} {WORDS[1]} {WORDS[2]}"}]
    assert mixture.evaluate(rows) == alone.evaluate(rows)
    assert mixture.evaluate(rows)["eval_loss"] != mixture.evaluate()["eval_loss"]


REFUSED = (
    "--data-name hard", "--eval-data-name x=harb", "--eval-data-name test", "--eval-data-name a=hard a=other",
    "--eval-data-name =hard", "--metric-for-best hart.jsonl/loss",
)  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_refused_before_a_worker_starts(words: str, texts: Path, gpt_folder: Path, tmp_path: Path, says: Says) -> None:
    with says(RapidformerError, TEXTS=texts):
        Trainer([*flags_of(texts, gpt_folder, tmp_path, *words.split()), "--nproc-per-node", "64"]).fit()


def test_a_metric_of_other_labels_is_refused_at_the_start(bert_folder: Path, tmp_path: Path, says: Says) -> None:
    """Only the data determine which metrics exist."""
    write_jsonl(tmp_path / "train.jsonl", [{"text": WORDS[i], "label": "ab"[i % 2]} for i in range(8)])
    given = f"--task sequence_classification --model-type bert --tokenizer-path {bert_folder} --data-dir {tmp_path}"
    given += " --num-layers 1 --hidden-size 16 --num-attention-heads 2 --lr 1e-3 --train-iters 1 --save"
    with says(ConfigError):
        Trainer([*given.split(), str(tmp_path / "run"), "--metric-for-best", "mse"]).fit()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_refused_of_a_script(says: Says) -> None:
    for data in (Data([{"x": 1}]), Data([{"x": 1}], valid={"a b": [1]}), Data([{"x": 1}], valid={"a": 3})):  # type: ignore[dict-item]
        with says(RapidformerError):
            own = type("Own", (Tracked,), {"build_data": lambda self, data=data: data})
            own(["--lr", "0.1", "--train-iters", "1", "--no-save", "--evaluate-test"]).fit()


def test_a_corpus_has_a_test_part_by_its_shares(flags: dict[str, Any], says: Says) -> None:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if name != "data_path"]
    given += ["--data-path", *flags["data_path"], "--no-save", "--train-iters", "1", "--lr", "1e-3", "--evaluate-test"]
    summary = Trainer([*given, "--split", "70,15,15"]).fit()
    assert summary["metrics"].keys() >= {"eval_loss", "test/loss", "test/perplexity", "test/token_accuracy"}
    with says(DataError):
        Trainer([*given, "--split", "80,20,0"]).fit()
    with says(Refused):
        Trainer([*given, "--streaming"]).fit()


def losses_of(texts: Path, tokenizer: Path, tmp_path: Path, *more: str) -> dict[str, float]:
    """Return the losses of an untrained model on each set. A learning rate of zero leaves the model unchanged."""
    flags = flags_of(texts, tokenizer, tmp_path, *more, "--lr", "0", "--keep-best", "--export-model")
    return {name: value for name, value in train(None, flags)["metrics"].items() if name.endswith("loss")}


@pytest.mark.longer
@pytest.mark.slow
def test_streams_and_mixtures_have_the_same_sets(texts: Path, gpt_folder: Path, tmp_path: Path) -> None:
    """In a mixture of a set with a copy of itself, all parts exist twice, but each named set only once."""
    wanted = losses_of(texts, gpt_folder, tmp_path / "whole")
    assert losses_of(texts, gpt_folder, tmp_path / "stream", "--streaming") == pytest.approx(wanted, rel=1e-6)
    for name in ("a", "b"):
        for part in ("train", "validation", "test"):
            shutil.copy(texts / f"{part}.jsonl", texts / f"{name}-{part}.jsonl")
    mixed = losses_of(texts, gpt_folder, tmp_path / "mixed", "--data-name", "0.5 a 0.5 b")
    assert mixed == pytest.approx(wanted, rel=1e-6)


def test_the_reference_is_computed_once_for_each_set(gpt_folder: Path, tmp_path: Path) -> None:
    """Preferences with a frozen copy and with precomputed references give the same result on every set."""
    for name, count in (("train", 6), ("validation", 3), ("test", 2), ("far", 2)):
        rows = [{"prompt": WORDS[i], "chosen": WORDS[i + 1], "rejected": WORDS[i + 3]} for i in range(count)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    flags = f"--task preference {MODEL} --no-save --train-iters 2 --lr 1e-2 --evaluate-test".split()
    flags += ["--eval-data-name", "far"]
    flags += ["--data-dir", str(tmp_path), "--tokenizer-path", str(gpt_folder)]
    computed, beside = (Trainer([*flags, *more]).fit()["metrics"] for more in (["--precompute-reference"], []))
    assert {"far/loss", "test/rewards/margins"} <= computed.keys()
    assert computed == pytest.approx(beside, rel=1e-5)


EVALUATED = {
    "at once": "--micro-batch-size 4",
    "accumulated": "--micro-batch-size 1",
    "replicas": "--micro-batch-size 2",
    "tensor": "--micro-batch-size 4 --tensor-model-parallel-size 2",
    "context": "--micro-batch-size 4 --context-parallel-size 2",
}


EVALUATED_CASES = [(layout, *numbers) for layout in EVALUATED for numbers in ((2, 8), (4, 13))]
EVALUATED_SHORT = [("accumulated", 4, 13), ("replicas", 4, 13)]


def _mean_over_targets(weights: dict[str, torch.Tensor], count: int) -> float:
    """Return the mean loss over all targets of the first validation samples, with only torch and transformers."""
    model, data = CausalJob().make().double().eval(), CausalJob().build_data()
    model.load_state_dict(weights, strict=False)
    batch = data.collate([data.valid[i] for i in range(count)])
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()))


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "iterations", "samples"), by_default(EVALUATED_SHORT, EVALUATED_CASES))
def test_eval_iters_counts_global_batches(layout: str, iterations: int, samples: int) -> None:
    """The fourth batch has the last of 13 samples. No layout changes which samples count, or how often."""
    flags = f"--train-iters 1 --global-batch-size 4 --eval-iters {iterations} {EVALUATED[layout]}"
    is_alone = layout in ("at once", "accumulated")
    run = reference("causal", True, flags) if is_alone else observed(2, "causal", True, flags)[0]
    assert run["evaluations"] == [pytest.approx(_mean_over_targets(run["weights"], samples), rel=1e-9)]


def test_an_evaluation_afterwards_has_the_same_samples(tmp_path: Path, gpt_folder: Path, texts: Path) -> None:
    """Also in another process, with another micro batch."""
    flags = flags_of(texts, gpt_folder, tmp_path / "run", "--eval-iters", "1", "--micro-batch-size", "2")
    job = Trainer([flag for flag in flags if flag not in ("--eval-data-name", "hard.jsonl", "other=other")])
    metrics = job.fit()["metrics"]
    wanted = {name: value for name, value in metrics.items() if not name.startswith("test")}
    assert job.evaluate() == pytest.approx(wanted, rel=1e-5)
    with mock.patch("rapidformer_templates.commands.evaluate._show") as show:
        assert main(["evaluate", str(tmp_path / "run"), "--micro-batch-size", "3"]) == 0
    assert show.call_args.args[1] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("everywhere", [False, True])
def test_only_training_samples_are_augmented_unless_the_data_say_so(everywhere: bool) -> None:
    seen = set()

    class Augmented(Line):
        def build_data(self) -> Data:
            samples = super().build_data().train

            def augment(sample: Any, generator: np.random.Generator) -> Any:
                seen.add(sample["part"])
                return sample

            train, valid = ([{**sample, "part": part} for sample in samples] for part in ("train", "valid"))  # type: ignore[union-attr]
            return Data(train, valid, augment=augment, augments_evaluation=everywhere)

    Augmented([*FLAGS, "--train-iters", "2", "--no-save"]).fit()
    assert seen == ({"train", "valid"} if everywhere else {"train"})
