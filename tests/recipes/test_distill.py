"""The recipe for distillation: loss as in TRL and torch, stored words, the same steps in every layout."""

import json
import shutil
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch.nn.functional import cross_entropy, kl_div
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from rapidformer_templates import RapidformerError
from tests.support import parity
from tests.support.preference_runs import pretrained
from tests.support.programs import one_thread, run_script
from tests.support.recipes import FOLDER, LAYOUTS, recipe, train, train_in_workers
from tests.support.selection import by_default
from tests.support.texts import DOCUMENTS, write_jsonl

pytestmark = pytest.mark.slow

distill = recipe("distill")
STEPS = 4
FLAGS = f"--task causal_lm --train-iters {STEPS} --lr 1e-3 --adam-epsilon 1e-3 --global-batch-size 8".split()
LOSS = ["--beta", "0.3", "--temperature", "1.7", "--teacher-weight", "0.6"]
ALL = ["--top-k", "50"]
"""The whole vocabulary of the made models."""


def _logits(seed: int, rows: int = 5) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, 11, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_divergences_are_those_of_trl(beta: float) -> None:
    gkd: Any = pytest.importorskip(
        "trl.experimental.gkd.gkd_trainer", reason="TRL is not installed: pip install --no-deps trl"
    )
    student, teacher, labels = _logits(0)[None], _logits(1)[None], torch.tensor([[-100, 3, -100, 2, 2]])
    wanted = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=1.7)
    learned = labels != -100
    found = distill.divergence(*((logits[learned] / 1.7).log_softmax(-1) for logits in (student, teacher)), beta).mean()
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_other_words_are_one_word() -> None:
    """The divergence of the merged distributions, computed from probabilities."""
    student, teacher = _logits(0), _logits(1)
    words = teacher.topk(3).indices
    found = distill.divergence(distill.merged(student, words), distill.merged(teacher, words), 0)
    for row in range(len(student)):
        chosen = words[row].tolist()
        others = [word for word in range(11) if word not in chosen]
        q, p = (
            torch.stack([*logits[row].softmax(-1)[chosen], logits[row].softmax(-1)[others].sum()])
            for logits in (student, teacher)
        )
        torch.testing.assert_close(found[row], kl_div(q.log(), p, reduction="sum"), rtol=1e-10, atol=1e-12)


class Recorded(distill.Distill):  # type: ignore[misc]
    """Records the training batches, losses and gradient norms, and the weights at the start."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if torch.is_grad_enabled():
            self.batches = [*getattr(self, "batches", []), batch]
        return super().compute_loss(model, batch)

    def on_train_start(self) -> None:
        self.start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def on_step_end(self, step: int, result: Any) -> None:
        self.curve = [*getattr(self, "curve", []), (float(result.loss), float(result.grad_norm))]


def _plain_divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute the sum of the divergences by torch's ``kl_div`` of probabilities."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    if beta == 0:
        return kl_div(q.log(), p, reduction="sum")
    mixture = (beta * p + (1 - beta) * q).log()
    return beta * kl_div(mixture, p, reduction="sum") + (1 - beta) * kl_div(mixture, q, reduction="sum")


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_steps_are_those_of_a_plain_loop(beta: float) -> None:
    """Losses and gradients of four steps, with a loss over all positions that torch computes from probabilities."""
    more = ["--weight-decay", "0", "--clip-grad", "0", "--lr-decay-style", "constant", "--micro-batch-size", "8"]
    job = Recorded([*FLAGS, *LOSS, "--beta", str(beta), *more, "--no-save"])
    job.fit()
    student, teacher = distill.made_model(32, 2, seed=0), distill.made_model(64, 2, seed=7, spread=0.3)
    student.load_state_dict(job.start)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, eps=1e-3, weight_decay=0)
    for batch, (own_loss, own_norm) in zip(job.batches, job.curve, strict=True):
        ids, labels = batch["input_ids"], batch["labels"]
        with torch.no_grad():
            wanted = teacher(input_ids=ids, attention_mask=batch["attention_mask"]).logits
        logits = student(input_ids=ids, attention_mask=batch["attention_mask"]).logits
        rows = [(row, token) for row in range(len(ids)) for token in range(ids.shape[1]) if labels[row, token] != -100]
        before = torch.tensor([(row, token - 1) for row, token in rows]).unbind(1)
        targets = torch.stack([labels[place] for place in rows])
        apart = _plain_divergence(logits[before] / 1.7, wanted[before] / 1.7, beta)
        loss = (0.6 * apart + 0.4 * cross_entropy(logits[before], targets, reduction="sum")) / len(rows)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in student.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        assert own_loss == pytest.approx(loss.item(), rel=1e-6)
        assert own_norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.fixture(scope="module")
def whole() -> parity.Trained:
    """Train in one process, with the global batch as one micro batch."""
    return train("distill", "Distill", [*FLAGS, *LOSS, "--micro-batch-size", "8"])


@pytest.mark.distributed
@pytest.mark.parametrize("name", by_default(["fsdp", "tensor"], LAYOUTS))
def test_two_workers_make_the_same_steps(name: str, whole: parity.Trained) -> None:
    """With two micro batches per step of each replica. The teacher is not among the weights."""
    flags = [*FLAGS, *LOSS, "--micro-batch-size", "2", *LAYOUTS[name].split()]
    found = train_in_workers(2, "distill", "Distill", {name: flags})[name]
    parity.assert_follows(found, whole, weights=(1e-4, 1e-6))
    perplexities = [[line["perplexity"] for line in run["lines"] if "perplexity" in line] for run in (found, whole)]
    parity.assert_close(*perplexities)


@pytest.mark.distributed
def test_adapters_make_the_same_steps() -> None:
    lora = [*FLAGS, *LOSS, "--lora-rank", "2"]
    whole = train("distill", "Distill", [*lora, "--micro-batch-size", "8"])
    runs = {name: [*lora, "--micro-batch-size", "2", *LAYOUTS[name].split()] for name in ("fsdp", "tensor")}
    for found in train_in_workers(2, "distill", "Distill", runs).values():
        parity.assert_follows(found, whole, weights=(1e-4, 1e-6))


@pytest.mark.longer
@pytest.mark.distributed
def test_a_pipeline_makes_the_same_steps() -> None:
    flags = [*FLAGS, *LOSS]
    whole = train("distill", "Distill", [*flags, "--micro-batch-size", "8"])
    split = ["--micro-batch-size", "2", "--pipeline-model-parallel-size", "2", "--pipeline-stages", "1,1"]
    found = train_in_workers(2, "distill", "Distill", {"pipeline": [*flags, *split]})["pipeline"]
    parity.assert_follows(found, whole, weights=(1e-4, 1e-6))


def test_all_words_stored_are_the_teacher(whole: parity.Trained, tmp_path: Path) -> None:
    """The first run writes the file, and the second one reads it."""
    flags = [*FLAGS, *LOSS, "--micro-batch-size", "8", "--teacher-logits", str(tmp_path / "file"), *ALL]
    for _ in range(2):
        parity.assert_follows(train("distill", "Distill", flags), whole, weights=(1e-4, 1e-6))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.distributed
def test_two_workers_store_and_read_the_same(tmp_path: Path) -> None:
    few = [*FLAGS, *LOSS, "--top-k", "5", "--micro-batch-size", "4"]
    whole = train("distill", "Distill", [*few, "--teacher-logits", str(tmp_path / "one")])
    found = train_in_workers(2, "distill", "Distill", {"two": [*few, "--teacher-logits", str(tmp_path / "two")]})["two"]
    parity.assert_follows(found, whole, weights=(1e-4, 1e-6))
    one, two = (load_file(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor)
    assert one["train/logps"].shape == (len(one["train/words"]), 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path) -> Path:
    """A folder with a student, a teacher of another size, a teacher with other words, and texts."""
    folder = tmp_path_factory.mktemp("distill")
    pretrained(folder / "small", gpt_folder)
    pretrained(folder / "large", gpt_folder, 3)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder / "other")
    GPT2LMHeadModel(GPT2Config(vocab_size=400, n_embd=8, n_layer=1, n_head=1)).save_pretrained(folder / "other")
    for part in ("train", "valid"):
        write_jsonl(folder / f"{part}.jsonl", [{"text": text} for text in DOCUMENTS[:12]])
    return folder


def _real(folder: Path, *more: str) -> list[str]:
    names = ["--data-dir", str(folder), "--pretrained-model-name-or-path", str(folder / "small"), "--seq-length", "16"]
    return [*FLAGS, *names, "--micro-batch-size", "4", *more]


def test_folders_of_a_user(folder: Path, tmp_path: Path) -> None:
    """Once the teacher's words are stored, the teacher's weights are not needed."""
    teacher = shutil.copytree(folder / "large", tmp_path / "large")
    with_teacher = train("distill", "Distill", _real(folder, "--teacher", str(teacher)))
    stored = _real(folder, "--teacher", str(teacher), "--teacher-logits", str(tmp_path / "file"), "--top-k", "100000")
    train("distill", "Distill", stored)
    shutil.rmtree(teacher)
    parity.assert_follows(train("distill", "Distill", stored), with_teacher, weights=(1e-4, 1e-6))


def test_other_parts_are_evaluated_with_stored_words(folder: Path, tmp_path: Path) -> None:
    """Their perplexity is that of transformers. A run without the test part reads the same file."""
    data = shutil.copytree(folder, tmp_path / "data")
    write_jsonl(data / "test.jsonl", [{"text": text} for text in DOCUMENTS[12:20]])
    teacher = ["--teacher", str(folder / "large"), "--evaluate-test", "--eval-data-name", "hard=train.jsonl"]
    flags, logits = _real(data, *teacher, "--save"), ["--teacher-logits", str(tmp_path / "file"), "--top-k", "100000"]
    with_teacher = train("distill", "Distill", [*flags, str(tmp_path / "plain")])["summary"]["metrics"]
    metrics = train("distill", "Distill", [*flags, str(tmp_path / "stored"), *logits])["summary"]["metrics"]
    assert metrics.keys() >= {"test/loss", "test/perplexity", "hard/perplexity"}
    assert metrics == pytest.approx(with_teacher, rel=1e-4)
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "stored/export").eval()
    plain = distill.Distill([*flags, str(tmp_path)]).build_data()
    rows = [plain.collate([sample]) for sample in plain.test]
    counts = [int((row["labels"][:, 1:] != -100).sum()) for row in rows]
    losses = [float(model(**row).loss) * count for row, count in zip(rows, counts, strict=True)]
    assert metrics["test/perplexity"] == pytest.approx(exp(sum(losses) / sum(counts)), rel=1e-4)
    train("distill", "Distill", [*_real(data, *teacher[:2], "--eval-data-name", "hard=train.jsonl"), *logits])


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RapidformerError, match="the teacher has another tokenizer"):
        train("distill", "Distill", _real(folder, "--teacher", str(folder / "other")))
    with pytest.raises(RapidformerError, match=r"the teacher has 50 words, the student \d+"):
        train("distill", "Distill", _real(folder))
    stored = [*FLAGS, "--micro-batch-size", "8", "--teacher-logits", str(tmp_path / "file")]
    train("distill", "Distill", stored)
    with pytest.raises(RapidformerError, match="was made with another temperature, top-k"):
        train("distill", "Distill", [*stored, "--temperature", "2", "--top-k", "4"])


@pytest.mark.longer
def test_the_script_learns_from_the_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs without flags. With the labels alone, the perplexity on other samples is worse."""
    monkeypatch.chdir(tmp_path)
    best = []
    for weight in ("0.5", "0"):
        with one_thread():
            assert (
                run_script(FOLDER / "distill.py", "--device", "cpu", "--teacher-weight", weight, "--save", weight) == 0
            )
        lines = [json.loads(line) for line in Path(weight, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        best.append(min(line["perplexity"] for line in lines if "perplexity" in line))
    assert best[0] < best[1] - 1 < 30
