"""The exact errors of --torch-compile and --use-flash-attn when they cannot act, and the notes of the plan."""

from __future__ import annotations

import pytest
import torch._dynamo

from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import switch_options
from rapidformer_templates.planning.resolve import resolve
from tests.support.requests import CPU, GPUS, exactly, on, refusal

BACKENDS = ", ".join(torch._dynamo.list_backends(exclude_tags=()))


def test_an_unknown_backend_names_those_that_there_are() -> None:
    assert "aot_eager" in BACKENDS
    assert refusal("--torch-compile inductr", CPU) == exactly(
        f"""
        error[RF082]: torch has no compiler backend 'inductr'; it has: {BACKENDS}
          why    torch looks backends up by name, and would fail in the first step (torch)
          asked  --torch-compile inductr (command line)
          works  --torch-compile inductor
          more   rapidformer explain RF082
        """
    )


def test_inductor_without_a_compiler_says_what_to_install() -> None:
    assert refusal("--torch-compile", on(CPU, cxx=None)) == exactly(
        """
        error[RF083]: the backend inductor needs a C++ compiler, and there is none: apt install g++, \
or name yours in CXX
          why    a graph that cannot be compiled would end the run in its first step (torch)
          asked  --torch-compile inductor (command line)
          works  --torch-compile aot_eager  whole graphs, but nothing in them is made faster
          more   rapidformer explain RF083
        """
    )


@pytest.mark.parametrize(
    ("backend", "place", "missing"),
    [
        ("tvm", CPU, "tvm, which is not installed: pip install apache-tvm"),
        ("openxla", CPU, "torch_xla, which is not installed: pip install torch_xla"),
        ("cudagraphs", CPU, "a GPU"),
        ("inductor", on(GPUS, packages={}), "triton, which is not installed: pip install triton"),
    ],
)
def test_a_backend_names_what_it_needs(backend: str, place: Environment, missing: str) -> None:
    first = refusal(f"--torch-compile {backend}", place).split("\n")[0]
    assert first == f"error[RF083]: the backend {backend} needs {missing}"


def test_flash_attention_on_a_cpu_has_no_dropout() -> None:
    assert refusal("--use-flash-attn --dropout 0.1", CPU) == exactly(
        """
        error[RF081]: flash-attention on a CPU cannot be combined with --dropout 0.1
          why    torch's flash kernel for CPUs has none, and falls back to the matrix of scores if there is \
dropout (torch)
          asked  --use-flash-attn (command line), --dropout 0.1 (command line)
          works  --dropout 0
          more   rapidformer explain RF081
        """
    )


@pytest.mark.parametrize(
    ("flags", "place", "notes"),
    [
        ("--task pretraining", CPU, ["flash-attention: torch's flash kernel for CPUs"]),
        (
            "--task pretraining --keep-documents-apart",
            CPU,
            ["flash-attention: torch's flash kernel for CPUs; packed documents one by one, without a mask"],
        ),
        (
            "--task masked_lm",
            CPU,
            [
                "flash-attention: torch's flash kernel for CPUs",
                "flash-attention: in batches with padding, the CPU's flash kernel takes the padding as a mask",
            ],
        ),
        (
            "--task masked_lm --mixed-precision bf16",
            GPUS,
            [
                "flash-attention: the flash kernel of the package flash_attn",
                "flash-attention: batches with padding use the memory-efficient kernel",
            ],
        ),
        (
            "--task pretraining --mixed-precision bf16",
            on(GPUS, packages={}),
            ["flash-attention: torch's flash kernel"],
        ),
        (
            "--task pretraining",
            GPUS,
            [
                "flash-attention: torch's memory-efficient kernel: the flash kernel needs 16 bits and compute "
                "capability 8.0"
            ],
        ),
        (
            "--task pretraining --mixed-precision fp16",
            on(GPUS, compute_capability=(7, 0)),
            [
                "flash-attention: torch's memory-efficient kernel: the flash kernel needs 16 bits and compute "
                "capability 8.0"
            ],
        ),
    ],
)
def test_the_plan_says_which_kernel_will_run(flags: str, place: Environment, notes: list[str]) -> None:
    plan = resolve(parse(f"--use-flash-attn {flags}".split(), switch_options()), place)
    assert [note for note in plan.notes if note.startswith("flash-attention")] == notes


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--torch-compile", "torch-compile: inductor, block by block; shapes that vary share a graph"),
        (
            "--torch-compile eager --template Pretrainer --data-iterator dynamic-shape --max-shapes 5",
            "torch-compile: eager, block by block; a graph for each of at most 5 shapes",
        ),
    ],
)
def test_the_plan_says_how_many_graphs_there_will_be(flags: str, note: str) -> None:
    place = on(CPU, template="Pretrainer", template_origin="command line")
    assert note in resolve(parse(flags.split(), switch_options()), place).notes
