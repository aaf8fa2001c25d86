"""Refusals and notes of fp8, which need no torchao."""

import pytest

from rapidformer_templates.planning.environment import Environment
from tests.support.messages import Says
from tests.support.requests import CPU, GPUS, on, refusal

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
