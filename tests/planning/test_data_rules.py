"""The rules about streams, mixtures and the data-parallel size."""

from __future__ import annotations

import shlex

import pytest

from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import switch_options
from tests.support.requests import CPU, codes, on, refusal

STREAM = "--task causal_lm --streaming --train-iters 10"
CORPUS = "--task pretraining --streaming --train-iters 10"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (STREAM, []),
        (CORPUS, []),
        (f"{STREAM} --shuffle-buffer 0 --pack-sequences --global-batch-size 8", []),
        (f"{STREAM} --eval-interval 5 --early-stopping-patience 3", []),
        (f"{CORPUS} --keep-documents-apart --text-unit line --no-keep-best", []),
        ("--task causal_lm --shuffle-buffer 10", ["RF034"]),
        ("--task causal_lm --streaming --epochs 2", ["RF151"]),
        ("--task question_answering --streaming --train-iters 10", ["RF152"]),
        (f"{STREAM} --no-group-by-length", []),
        (f"{STREAM} --group-by-length", ["RF153"]),
        (f"{STREAM} --max-train-samples 5 --validation-fraction 0.2", ["RF153", "RF153"]),
        (f"{STREAM} --validation-fraction 0", []),
        (f"{CORPUS} --split 1", ["RF153"]),
        (f"{CORPUS} --eval-interval 5", ["RF153"]),
        (f"{CORPUS} --metric-for-best eval_loss --metric-for-best-mode min", ["RF153"]),
        (f"{CORPUS} --template Pretrainer --data-iterator dynamic-shape", ["RF007", "RF039"]),
        ("--task causal_lm --data-name '0.7 a 0.3 b' --pack-sequences", []),
        (f"{STREAM} --data-name '0.7 a 0.3 b'", ["RF154"]),
        ("--task question_answering --data-name '1 a 2 b'", ["RF154"]),
    ],
)
def test_combinations(flags: str, expected: list[str]) -> None:
    assert codes(parse(shlex.split(flags), switch_options())) == expected


@pytest.mark.parametrize(("size", "tensor", "workers"), [(2, 1, 2), (4, 2, 8), (1, 1, 1)])
def test_a_data_parallel_size_is_that_of_the_workers(size: int, tensor: int, workers: int) -> None:
    flags = f"--tensor-model-parallel-size {tensor} --template Trainer --data-parallel-size"
    place = on(CPU, world_size=workers, local_world_size=workers)
    assert "RF150" not in codes(f"{flags} {size}", place)
    for other in {size + 1, size * 2, max(1, size // 2)} - {size}:
        assert "RF150" in codes(f"{flags} {other}", place)


def test_what_works_instead() -> None:
    text = refusal("--task causal_lm --streaming --epochs 2", CPU)
    assert "a stream has no length, so an epoch has no number of steps" in text
    assert "--train-iters N" in text
