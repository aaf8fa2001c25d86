"""Flash attention: torch's flash kernel, or the package ``flash_attn`` if it is installed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rapidformer_templates.planning.changes import REPLACE, Change
from rapidformer_templates.planning.checks import Given, clash, shown
from rapidformer_templates.planning.environment import AMPERE
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.plan import AttentionKernel
from rapidformer_templates.planning.request import precision
from rapidformer_templates.planning.switch import Finding, Measured, Precedence, Prediction, Request, RuleList, Switch

FUSED = re.compile("flash|efficient|cudnn")
"""Matches the names of operators that compute attention without a matrix of scores."""


@dataclass(frozen=True)
class FlashAttentionFlags:
    """Acceleration"""

    use_flash_attn: bool = flag(
        False, "flash attention in batches without padding, memory-efficient attention elsewhere"
    )


def kernel(request: Request) -> AttentionKernel:
    """Return the kernel for unpadded batches: ``flash_attn`` (the package), ``flash`` or ``efficient`` (torch's)."""
    environment = request.environment
    if environment.device == "cpu":
        return "flash"
    capability = environment.compute_capability
    old = capability is not None and capability < AMPERE
    if old or precision(request.config, environment) == "fp32":
        return "efficient"
    return "flash_attn" if "flash_attn" in environment.packages else "flash"


def _notes(request: Request) -> Sequence[str]:
    of = {
        "flash": "torch's flash kernel",
        "flash_attn": "the flash kernel of the package flash_attn",
        "efficient": "torch's memory-efficient kernel: the flash kernel needs 16 bits and compute capability 8.0",
    }
    where = " for CPUs" if request.environment.device == "cpu" else ""
    packed = request.config.data.pack_sequences or request.config.get("keep_documents_apart")
    chosen = kernel(request)
    without = "; packed documents one by one, without a mask" if packed and chosen != "efficient" else ""
    return (f"flash-attention: {of[chosen]}{where}{without}",)


RULES = RuleList()


@RULES.add("RF013", "[S]", "--use-flash-attn --task sequence_classification", refuses=False)
def _padded_batches(request: Request) -> Iterator[Finding]:
    """Flash attention needs batches without a padding mask; with one, the memory-efficient kernel is used.

    Why: the flash kernels of GPUs do not accept a mask.
    """
    config = request.config
    if config.training.task != "pretraining" and not config.data.pack_sequences:  # else all sequences have one length
        of_cpu = "in batches with padding, the CPU's flash kernel takes the padding as a mask"
        of_gpu = "batches with padding use the memory-efficient kernel"
        message = f"flash-attention: {of_cpu if request.environment.device == 'cpu' else of_gpu}"
        yield Finding(message, request.asked("use_flash_attn"))


@RULES.add("RF081", "[torch]", "--use-flash-attn --dropout 0.1")
def _no_dropout(request: Request) -> list[Finding]:
    """Flash attention on a CPU has no dropout.

    Why: torch's flash kernel for CPUs has none, and falls back to the matrix of scores if there is dropout.
    """
    if request.environment.device != "cpu" or not request.config.model.dropout:
        return []
    rate = Given("dropout", instead=(Change("--dropout 0", REPLACE, {"dropout": 0.0}),))
    return clash(request, "flash-attention", rate, message="flash-attention on a CPU cannot be combined with {1}")


def _acted(measured: Measured) -> str | None:
    """Check that the model calls our functions, and that they call a kernel without the matrix of scores."""
    called = sorted({name for names in measured.all("attention_functions") for name in names})
    kernels = sorted({name for counts in measured.all("attention_kernels") for name in counts})
    if any(name.startswith("rapidformer_") for name in called) and any(FUSED.search(name) for name in kernels):
        return None
    chosen = measured.plan.engine_options.attention_kernel
    return f"the kernel {chosen} was expected; the attention {shown(called)} called {shown(kernels)}"


SWITCHES = (
    Switch(
        name="flash-attention",
        summary="Attention without the matrix of scores (flash kernel).",
        source="[M, S]",
        precedence=Precedence.KERNEL,
        options=FlashAttentionFlags,
        predicts=Prediction({"activations": "no attention scores are kept; on a GPU that is assumed"}),
        notes=_notes,
        engine_options=lambda request, options: dataclasses.replace(options, attention_kernel=kernel(request)),
        transform="rapidformer_templates.switches.flash_attention.kernels:use_flash_attention",
        receipt_hooks="rapidformer_templates.switches.flash_attention.kernels:AttentionKernels",
        receipt=("attention_kernels", "attention_functions"),
        acted=_acted,
        rules=tuple(RULES),
    ),
)
