"""The worker of ``benchmarks setup-memory``: builds a model under an engine and reports how much memory that needed."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, LlamaForCausalLM

from rapidformer_templates.data.types import Data
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.models.loading import build_model
from rapidformer_templates.run.building import build_data, build_engine, choose_allocation
from rapidformer_templates.run.run import begin_run
from rapidformer_templates.system.workers import join
from rapidformer_templates.trainer import Trainer


class Job(Trainer):
    """Builds the llama of a folder, with its weights or with random ones."""

    pretrained = False
    folder = ""

    def build_data(self) -> Data:
        tokens = torch.arange(32).repeat(8, 1)
        return Data(train=[{"input_ids": row, "labels": row} for row in tokens])

    def build_model(self) -> Any:
        if self.pretrained:
            return build_model(self.config, "AutoModelForCausalLM")
        return LlamaForCausalLM(AutoConfig.from_pretrained(self.folder))


def measure(folder: str, flags: list[str], *, pretrained: bool, divided: bool) -> dict[str, float]:
    """Build the model of a folder in this process, which is one of the workers.

    Args:
        flags: the engine's.
        pretrained: whether to load the weights of the folder.
        divided: whether the engine may divide the model while it is built.

    Returns:
        ``share``: bytes of the parameters that the worker holds in the end. ``peak``: by how many bytes the process
        grew at most, with the parts of mapped files that it read. ``seconds``: time of building.
    """
    Job.pretrained, Job.folder = pretrained, folder
    own = ["--device", "cpu", "--train-iters", "1", "--lr", "1e-4", "--template", "Trainer", "--no-save"]
    own += ["--pretrained-model-name-or-path", folder] if pretrained else []
    job = Job([*own, *flags])
    choose_allocation(job.plan)
    with join("cpu", job.plan.sizes) as workers:
        run = begin_run(job, workers)
        build_data(run)
        whole = patch.object(SingleEngine, "construction", lambda engine: nullcontext())
        began = time.perf_counter()
        with nullcontext() if divided else whole:
            build_engine(run)
        seconds = time.perf_counter() - began
        parameters = run.engine.local_tensors()["parameters"]
        stored = [local_part(parameter).untyped_storage() for parameter in parameters]
        storages = {storage.data_ptr(): storage.nbytes() for storage in stored}
        return {"share": sum(storages.values()), "peak": run.setup_peak.host, "seconds": seconds}


def main() -> None:
    """``python -m … CASE FOLDER``: one process of a group."""
    case, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    result = measure(**case)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
