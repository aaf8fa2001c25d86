"""The documents that switches and rules come from. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OWN = "rapidformer_templates"
"""Source of a rule that is neither documented nor due to another package."""


@dataclass(frozen=True)
class Document:
    """A document that declarations name by a letter.

    Attributes:
        name: what messages and pages call it.
        title: its title.
        link: its address, if there is one.
    """

    name: str
    title: str
    link: str = ""


DOCUMENTS: Mapping[str, Document] = {
    "R": Document(
        "Rapidformer parameter reference",
        "Parameter settings, in the manual of PAI-Rapidformer",
        "https://www.alibabacloud.com/help/en/pai/user-guide/parameter-settings",
    ),
    "B": Document("Rapidformer benchmarks", "Training performance, in the manual of PAI-Rapidformer"),
    "M": Document("Megatron best practice", "LLM on DLC: Megatron best practice"),
    "S": Document(
        "single-GPU guide of Transformers",
        "Methods and tools for efficient training on a single GPU, in the manual of Transformers 4.37",
        "https://huggingface.co/docs/transformers/v4.37.2/perf_train_gpu_one",
    ),
    "D": Document(
        "DeepSpeed guide of Transformers",
        "DeepSpeed integration, in the manual of Transformers 4.37",
        "https://huggingface.co/docs/transformers/v4.37.2/main_classes/deepspeed",
    ),
}
"""Documents by their letter. All other sources are names of packages, papers, or this library."""


def sources_of(source: str) -> Sequence[str]:
    """Return the parts of a source: ``[R, torch]`` is ``R`` and ``torch``."""
    return source.strip("[]").split(", ")


def in_words(source: str) -> str:
    """Return a source as a reader sees it: ``[R, torch]`` is ``Rapidformer parameter reference, torch``."""
    words = {letter: document.name for letter, document in DOCUMENTS.items()}
    words |= dict.fromkeys((OWN, "environment"), "this library")
    return ", ".join(words.get(part, part) for part in sources_of(source))
