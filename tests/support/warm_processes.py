"""Processes that start in a tenth of a second: they are forked from one that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext

import torch

METHOD = "forkserver"

IMPORTED = (
    "datasets",
    "deepspeed",
    "deepspeed.module_inject",
    "deepspeed.moe.utils",
    "fairscale.nn.data_parallel",
    "networkx",
    "peft",
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
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
    "tests.support.combinations",
    "tests.support.parallel_jobs",
    "tests.support.settled",
)
"""What takes seconds to import. What is not installed is left out."""


def warm() -> ForkServerContext:
    """The start method, whose server imports all of this when the first process is started."""
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(list(IMPORTED))
    return context


def become_worker(rank: int, count: int, port: int, environment: Mapping[str, str]) -> None:
    """Make a process one of ``count`` workers that meet at ``port``.

    Args:
        environment: of the process that asked for it; it has that of the server's start.
    """
    os.environ.clear()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({**environment, **{name: str(value) for name, value in (ranks | meeting).items()}})
    torch.set_num_threads(1)
