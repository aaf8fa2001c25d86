"""The worker of ``benchmarks setup-memory``: builds a model under an engine and reports how much memory that needed."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import peft  # noqa: F401 - a worker must not grow by its imports
import torch
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rapidformer_templates.data.types import Data
from rapidformer_templates.engines.contract import StepResult
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.models.loading import build_model
from rapidformer_templates.run.building import build_data, build_engine, choose_allocation
from rapidformer_templates.run.run import begin_run
from rapidformer_templates.system.workers import join
from rapidformer_templates.trainer import Trainer


@dataclass(frozen=True)
class Case:
    """A model that a group of workers builds.

    Attributes:
        folder: contains the model and its tokenizer.
        flags: the engine's.
        pretrained: whether to load the weights of the folder.
        divided: whether the engine may divide the model while it is built.
        trains: whether to train one step as well.
    """

    folder: str
    flags: tuple[str, ...]
    pretrained: bool
    divided: bool
    trains: bool


@dataclass(frozen=True)
class Result:
    """Measurements of a worker.

    Attributes:
        share: bytes of the parameters that the worker holds in the end.
        peak: by how many bytes the process grew at most, with the parts of mapped files that it read.
        seconds: time of building, or until the end of the first step.
    """

    share: int
    peak: int
    seconds: float


class Job(Trainer):
    """Builds the model of a folder, with its weights or with random ones."""

    case: Case
    first_step_ended = 0.0

    def build_data(self) -> Data:
        tokens = torch.arange(32).repeat(8, 1)
        return Data(train=[{"input_ids": row, "labels": row} for row in tokens])

    def build_model(self) -> nn.Module:
        if self.case.pretrained:
            return build_model(self.config, "AutoModelForCausalLM")
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.case.folder), dtype=torch.float32)

    def on_step_end(self, step: int, result: StepResult) -> None:
        self.first_step_ended = time.perf_counter()


def measure(case: Case) -> Result:
    """Build the model of a folder in this process, which is one of the workers."""
    own = ["--device", "cpu", "--train-iters", "1", "--lr", "1e-4", "--template", "Trainer", "--no-save"]
    if case.pretrained:
        own += ["--pretrained-model-name-or-path", case.folder]
    elif AutoConfig.from_pretrained(case.folder).model_type == "mixtral":
        own += ["--model-type", "mixtral"]  # experts are divided only if the flags name a mixture
    job = Job([*own, *case.flags])
    job.case = case
    whole = patch.object(SingleEngine, "construction", lambda engine: nullcontext())
    with nullcontext() if case.divided else whole, Path(os.devnull).open("w") as hidden, redirect_stdout(hidden):
        return _first_step(job) if case.trains else _build(job)


def _build(job: Job) -> Result:
    choose_allocation(job.plan)
    with join("cpu", job.plan.sizes) as workers:
        run = begin_run(job, workers)
        build_data(run)
        began = time.perf_counter()
        build_engine(run)
        seconds = time.perf_counter() - began
        stored = [local_part(parameter).untyped_storage() for parameter in run.engine.local_tensors()["parameters"]]
        storages = {storage.data_ptr(): storage.nbytes() for storage in stored}
        return Result(sum(storages.values()), run.setup_peak.host, seconds)


def _first_step(job: Job) -> Result:
    began = time.perf_counter()
    receipts = job.fit()["receipts"]
    peak = max(of_rank["host"] for of_rank in receipts["setup_peak_bytes_by_rank"])
    return Result(receipts["parameter_bytes"], peak, job.first_step_ended - began)


def work(case: tuple[Case, dict[str, str]]) -> Result:
    """Measure a case in this process, which becomes the worker that the environment variables describe."""
    of_group, environment = case
    os.environ.update(environment)
    torch.set_num_threads(1)
    return measure(of_group)
