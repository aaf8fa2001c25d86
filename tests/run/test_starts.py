"""Training starts with the same weights and losses with every engine, for every task and kind of start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from rapidformer_templates import Trainer
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from tests.support import parity
from tests.support.combinations import Combination, parsed, place, smallest
from tests.support.preference_runs import pairs, words
from tests.support.selection import by_default
from tests.support.texts import write_jsonl
from tests.support.worker_pool import run_in_workers

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

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
STEPS = (
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
    flags = [*STEPS.split(), "--task", task, "--data-dir", f"{data}/{task}", "--tokenizer-path", f"{data}/{kind}"]
    flags += ENGINES[engine].flags if engine else ["--micro-batch-size", "8"]
    if start == "scratch":
        return [*flags, "--model-type", kind, *SIZES.split()]
    folder = f"{data}/{'body' if start == 'new head' else 'whole'}-{task}"
    return [*flags, "--pretrained-model-name-or-path", folder, *(["--lora-rank", "2"] if start == "adapters" else [])]


def _is_accepted(task: str, start: str, engine: str) -> bool:
    config = REGISTRY.complete(parsed((*_flags(task, start, engine, "data"), "--no-save")))
    place_of_engine = place(ENGINES[engine].world, "Trainer")
    return not REGISTRY.refusals(build_request(config, place_of_engine, REGISTRY.switches, training=True))


CASES = [
    (task, start, engine)
    for task in ROWS
    for start in STARTS
    for engine in ENGINES
    if (start != "new head" or task in HEADS) and _is_accepted(task, start, engine)
]
SHORT = [
    *(("sequence_classification", "new head", engine) for engine in ("tensor-parallel", "zero-2")),
    *(("causal_lm", "adapters", engine) for engine in ("zero-3", "pipeline-parallel")),
]


LONGER = [
    *((task, "pretrained", engine) for task in ROWS for engine in ("pipeline-parallel", "tensor-parallel", "zero-3")),
    *((task, "new head", "zero-3") for task in HEADS),
    *(("sequence_classification", "new head", engine) for engine in ENGINES),
    ("causal_lm", "scratch", "zero-3"),
]


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


@pytest.mark.parametrize(("task", "start", "engine"), by_default(SHORT, CASES, {*CASES} - {*SHORT, *LONGER}))
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


def test_new_heads_are_new(data: str) -> None:
    """Otherwise the tests above would compare pretrained heads."""
    for task in ("sequence_classification", "reward"):
        whole, new = (_start(None, _flags(task, start, "", data))["weights"] for start in ("pretrained", "new head"))
        assert any(not torch.equal(new[name], weight) for name, weight in whole.items())
