"""The recipe for embeddings: its loss compared with Sentence Transformers, and the same steps in every layout."""

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from tests.support import parity
from tests.support.programs import one_thread, run_script
from tests.support.recipes import FOLDER, LAYOUTS, recipe, train, train_in_workers
from tests.support.selection import by_default
from tests.support.texts import WORDS, write_jsonl
from tests.support.worker_pool import WorkerError

pytestmark = pytest.mark.slow

embeddings = recipe("embeddings")
STEPS = 4
SHARDED = "--use-distributed-optimizer --data-parallel-sharding-strategy"
FLAGS = f"--train-iters {STEPS} --lr 1e-3 --adam-epsilon 1e-3 --matryoshka 32 8".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path) -> list[str]:
    """Return flags for a tiny saved model, and for 33 pairs of texts of different lengths with hard negatives."""
    folder = tmp_path_factory.mktemp("pairs")
    draw = random.Random(3)
    for part, count in (("train", 33), ("valid", 17)):
        names = ("anchor", "positive", "negative")
        rows = [{name: " ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for name in names} for _ in range(count)]
        write_jsonl(folder / f"{part}.jsonl", rows)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    BertModel(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    ).save_pretrained(folder / "model")  # fmt: skip
    tokenizer.save_pretrained(folder / "model")
    return ["--data-dir", str(folder), "--pretrained-model-name-or-path", str(folder / "model")]


class Recorded(embeddings.Embeddings):  # type: ignore[misc]
    """Records the training batches, the losses and the gradient of the first step."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if torch.is_grad_enabled():
            self.batches = [*getattr(self, "batches", []), batch]
        return super().compute_loss(model, batch)

    def on_step_end(self, step: int, result: Any) -> None:
        self.curve = [*getattr(self, "curve", []), (float(result.loss), float(result.grad_norm))]


@pytest.mark.parametrize("sizes", [(), (16, 5)], ids=["whole", "matryoshka"])
def test_steps_are_those_of_sentence_transformers(sizes: tuple[int, ...], texts: list[str]) -> None:
    """Losses and gradients of four steps, with Sentence Transformers' own model, pooling and losses."""
    library = pytest.importorskip("sentence_transformers", reason="needs pip install sentence-transformers")
    losses: Any = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    parts: Any = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    optimizer_flags = f"--weight-decay 0 --clip-grad 0 --adam-epsilon {1e-3} --lr-decay-style constant".split()
    given = ["--matryoshka", *map(str, sizes)] if sizes else []
    steps = ["--train-iters", str(STEPS), "--lr", "1e-3", "--micro-batch-size", "8", "--no-save", *optimizer_flags]
    job = Recorded([*texts, *steps, *given])
    job.fit()

    word_model = parts.Transformer(texts[-1])
    model = library.SentenceTransformer(modules=[word_model, parts.Pooling(32, "mean")], device="cpu")
    loss: Any = losses.MultipleNegativesRankingLoss(model, scale=20.0)
    if sizes:
        loss = losses.MatryoshkaLoss(model, loss, [32, *sizes])
    trained = [parameter for name, parameter in model.named_parameters() if "pooler" not in name]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-3, weight_decay=0)
    for batch, (own_loss, own_norm) in zip(job.batches, job.curve, strict=True):
        features = [{name: rows[:, i] for name, rows in batch.items()} for i in range(3)]
        value = loss(features, torch.empty(0))
        value.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
        optimizer.step()
        optimizer.zero_grad()
        assert own_loss == pytest.approx(value.item(), rel=1e-6)
        assert own_norm == pytest.approx(float(norm), rel=1e-5)


def test_padding_does_not_change_an_embedding() -> None:
    hidden = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]])
    torch.testing.assert_close(embeddings.mean_pooled(hidden, mask)[0, 1], hidden[1, :2].mean(0))


@pytest.fixture(scope="module")
def whole() -> parity.Trained:
    """Train in one process, with the global batch as one micro batch."""
    return train("embeddings", "Embeddings", [*FLAGS, "--micro-batch-size", "16"])


def layout(name: str) -> list[str]:
    """Return flags with which two workers have the same global batch of 16 pairs."""
    return ["--micro-batch-size", "16" if name == "tensor" else "8", *LAYOUTS[name].split()]


@pytest.mark.distributed
@pytest.mark.parametrize("name", by_default(["ddp", "fsdp", "tensor"], LAYOUTS))
def test_two_workers_make_the_same_steps(name: str, whole: parity.Trained) -> None:
    found = train_in_workers(2, "embeddings", "Embeddings", {name: [*FLAGS, *layout(name)]})[name]
    parity.assert_follows(found, whole, weights=(1e-4, 1e-6))
    recalls = [{key: value for key, value in line.items() if "recall" in key} for line in whole["lines"]]
    assert [{key: value for key, value in line.items() if "recall" in key} for line in found["lines"]] == recalls
    assert set(recalls[-1]) == {"recall", "recall_32", "recall_8"}


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize("switches", ["", f"{SHARDED} optim_grads_params"], ids=["copies", "shards"])
def test_workers_of_a_replica_count_once(switches: str, whole: parity.Trained) -> None:
    """Four workers: two replicas, each on two workers."""
    flags = [*FLAGS, "--micro-batch-size", "8", "--tensor-model-parallel-size", "2", *switches.split()]
    found = train_in_workers(4, "embeddings", "Embeddings", {"both": flags})["both"]
    parity.assert_follows(found, whole, weights=(1e-4, 1e-6))


@pytest.mark.distributed
def test_adapters_make_the_same_steps() -> None:
    lora = [*FLAGS, "--lora-rank", "2"]
    whole = train("embeddings", "Embeddings", [*lora, "--micro-batch-size", "16"])
    runs = {name: [*lora, *layout(name)] for name in ("fsdp", "tensor")}
    for found in train_in_workers(2, "embeddings", "Embeddings", runs).values():
        parity.assert_follows(found, whole, weights=(1e-4, 1e-6))


@pytest.mark.distributed
@pytest.mark.parametrize("name", by_default(["fsdp"], ("ddp", "fsdp", "zero-1", "zero-3", "distributed optimizer")))
def test_a_worker_without_samples_adds_no_negatives(name: str, texts: list[str]) -> None:
    """The third step of an epoch has one pair, and so has the last batch of the evaluation."""
    flags = [*texts, "--epochs", "1", "--lr", "1e-3", "--adam-epsilon", "1e-3", "--global-batch-size", "16"]
    whole = train("embeddings", "Embeddings", [*flags, "--micro-batch-size", "16"])
    found = train_in_workers(2, "embeddings", "Embeddings", {name: [*flags, *layout(name)]})[name]
    assert len(whole["curve"]) == 3
    parity.assert_follows(found, whole, weights=(1e-4, 1e-6))


def test_a_folder_with_bf16_is_trained_in_fp32(texts: list[str], tmp_path: Path) -> None:
    """The steps are those of a folder with the same weights in fp32."""
    folder = texts[-1]
    runs = []
    for dtype in (torch.bfloat16, torch.float32):
        copy = shutil.copytree(folder, tmp_path / str(dtype))
        AutoModel.from_pretrained(folder, dtype=torch.bfloat16).to(dtype).save_pretrained(copy)
        flags = [*texts[:-1], str(copy), "--train-iters", "3", "--lr", "1e-3", "--micro-batch-size", "16"]
        runs.append(train("embeddings", "Embeddings", flags)["curve"])
    assert runs[0] == runs[1]


@pytest.mark.longer
@pytest.mark.distributed
def test_context_parallelism_is_refused() -> None:
    flags = [*FLAGS, "--micro-batch-size", "16", "--context-parallel-size", "2"]
    with pytest.raises(WorkerError, match="rows of workers that share each sequence cannot be gathered"):
        train_in_workers(2, "embeddings", "Embeddings", {"context": flags})


def test_micro_batches_mean_fewer_negatives(whole: parity.Trained, capsys: pytest.CaptureFixture[str]) -> None:
    found = train("embeddings", "Embeddings", [*FLAGS, "--micro-batch-size", "8", "--global-batch-size", "16"])
    assert "an anchor sees 8 pairs and not 16" in capsys.readouterr().out
    assert found["curve"][0][0] < whole["curve"][0][0] - 0.1


@pytest.mark.longer
def test_the_script_learns_to_find_translations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs without flags."""
    monkeypatch.chdir(tmp_path)
    with one_thread():
        assert run_script(FOLDER / "embeddings.py", "--device", "cpu") == 0
    lines: Sequence[Mapping[str, float]] = [
        json.loads(line) for line in Path("runs/embeddings/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    recalls = [line["recall"] for line in lines if "recall" in line]
    assert recalls[-1] > 0.97
    untrained = embeddings.Embeddings(no_save=True, device="cpu").evaluate()
    assert untrained["recall"] < 0.2
