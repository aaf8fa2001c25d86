"""Processes that start in a tenth of a second: they are forked from one that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext

METHOD = "forkserver"

IMPORTED = (
    "datasets",
    "deepspeed",
    "fairscale.nn.data_parallel",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "rapidformer_templates.run.fit",
    "rapidformer_templates.switches.zero.engine",
    "rapidformer_templates.switches.oss.engine",
    "rapidformer_templates.switches.fsdp.engine",
    "rapidformer_templates.switches.pipeline_parallel.engine",
    "tests.parity.combinations",
    "tests.parity.parallel_jobs",
)
"""What takes seconds to import. What is not installed is left out."""


def warm() -> ForkServerContext:
    """The start method, whose server imports all of this when the first process is started."""
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(list(IMPORTED))
    return context


def take_over(environment: Mapping[str, str]) -> None:
    """Give a process the environment of the one that asked for it; it has that of the server's start."""
    os.environ.clear()
    os.environ.update(environment)
