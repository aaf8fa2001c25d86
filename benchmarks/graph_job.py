"""A run of ``bench graph`` in its process: BERT classifies random tokens, and waits for its turns."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.graph import SEED, WARMUP, Scale
from rapidformer_templates.data.types import Data
from rapidformer_templates.run.meter import peak_memory_mb
from rapidformer_templates.switches.onnx_runtime.receipt import seconds_in_graphs
from rapidformer_templates.trainer import Trainer


class Job(Trainer):
    """Fine-tuning on samples of one length."""

    scale: Scale
    pipe: Connection
    total = 0
    left, began = WARMUP, 0.0
    in_graphs, of_all, before = 0.0, 0.0, 0.0  # seconds: of the turns; in graphs until this one
    loss = float("nan")

    def build_model(self) -> nn.Module:
        scale = self.scale
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=scale.vocabulary,
                hidden_size=scale.hidden,
                num_hidden_layers=scale.layers,
                num_attention_heads=scale.heads,
                intermediate_size=4 * scale.hidden,
            )
        )

    def build_data(self) -> Data:
        draw = np.random.default_rng(SEED)
        ids = torch.from_numpy(draw.integers(0, self.scale.vocabulary, (64, self.scale.length)))
        samples = [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]
        return Data(train=samples, collate=_collate)

    def model_was_built(self, model: nn.Module) -> None:
        super().model_was_built(model)
        self.model = model

    def on_step_end(self, step: int, result: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.loss = float(result.loss)  # waits for the device
            seconds = time.perf_counter() - self.began
            if step > WARMUP:
                self.of_all += seconds
                self.in_graphs += seconds_in_graphs(self.model) - self.before
            self.pipe.send(seconds if step > WARMUP else "ready")
            if step < self.total:
                self.left = self.pipe.recv()
                self.before = seconds_in_graphs(self.model)
                self.began = time.perf_counter()


def _collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([sample["input_ids"] for sample in samples])
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def train(flags: str, scale: Scale, total: int, device: str, pipe: Connection) -> None:
    """Train ``total`` steps with ``flags``, and tell through ``pipe`` how each turn and the end went.

    Raises:
        RapidformerError: the flags are refused, or cannot be followed.
    """
    sizes = f"--micro-batch-size {scale.batch} --train-iters {total} --device {device} --no-save"
    job = Job(f"{sizes} --lr 1e-5 --log-interval {total} --seed {SEED} {flags}".split())
    job.scale, job.pipe, job.total = scale, pipe, total
    summary = job.fit()
    peak = peak_memory_mb(torch.device(device))
    receipt = summary["receipts"].get("onnx_runtime")
    share = round(job.in_graphs / job.of_all, 4)
    pipe.send({"peak_mb": peak, "loss": job.loss, "share_in_graphs": share, "onnx_runtime": receipt})
