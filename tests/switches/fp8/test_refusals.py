"""The switches that refuse fp8, and the notes of its plans. Nothing here needs torchao."""

import pytest

from rapidformer_templates.planning.environment import Environment
from tests.support.messages import Says
from tests.support.requests import CPU, GPUS, codes, on, refusal

FP8 = "--mixed-precision bf16 --fp8-recipe tensorwise"
EMULATED = f"{FP8} --fp8-emulate"
CPUS = on(CPU, packages=GPUS.packages)


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        (FP8, CPUS),
        (FP8, on(GPUS, compute_capability=(8, 6))),
        (FP8, on(GPUS, packages={})),
        ("--mixed-precision fp16 --fp8-recipe rowwise", GPUS),
        ("--fp8-recipe rowwise", GPUS),
        (f"{EMULATED} --zero-1-memory-optimization", GPUS),
        (f"{EMULATED} --onnx-runtime-training", GPUS),
        (f"{EMULATED} --lora-rank 8 --quantize-base int4", GPUS),
        (f"{EMULATED} --context-parallel-size 2", GPUS),
        (f"{EMULATED} --fp8-all-gather", GPUS),
        ("--mixed-precision bf16 --fp8-recipe rowwise --fp8-all-gather --fsdp-memory-optimization", GPUS),
        (f"{FP8} --fp8-filter [", GPUS),
        ("--mixed-precision bf16 --fp8-emulate", GPUS),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.device}-{value.compute_capability}",
)
def test_what_a_refusal_says(flags: str, place: Environment, says: Says) -> None:
    says.text(refusal(flags, place))


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        (FP8, GPUS),
        (FP8, on(GPUS, compute_capability=(8, 9))),
        (FP8, on(GPUS, compute_capability=None)),  # AMD's GPUs have no such number
        (EMULATED, CPUS),
        (f"{FP8} --fsdp-memory-optimization --fp8-all-gather", GPUS),
        (f"{FP8} --zero-2-memory-optimization --pipeline-model-parallel-size 2", GPUS),
        (f"{FP8} --lora-rank 8 --quantize-base half", GPUS),
        (f"{FP8.replace('tensorwise', 'rowwise')} --context-parallel-size 2", GPUS),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.device}-{value.compute_capability}",
)
def test_what_is_accepted(flags: str, place: Environment) -> None:
    assert codes(flags, place) == []
