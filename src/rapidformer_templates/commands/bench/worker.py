"""The parts that all runs of a table share: the job, the connection to the benchmark, the model and its data."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import TYPE_CHECKING, NotRequired, TypedDict, Unpack

from rapidformer_templates.commands.bench.tables import TABLES, BenchScale
from rapidformer_templates.errors import RapidformerError

if TYPE_CHECKING:
    from torch import Tensor, nn

LR, WEIGHT_DECAY, CLIP, SEED = 1e-4, 0.01, 1.0, 1234


@dataclass(frozen=True)
class BenchJob:
    """The work of one run.

    Attributes:
        table: a key of ``TABLES``, or ``run`` for the flags in ``words``.
        solution: a key of the table's solutions.
        peer: a key of ``PEERS``, or None for this library.
        scale: a key of the table's scales.
        workers: number of worker processes.
        turns: number of turns of optimizer steps, including the warm-up.
        steps: optimizer steps per turn.
        device: ``cpu``, or torch's name of the accelerator.
        precision: ``fp32``, or the 16-bit type of the computation.
        address: address of the benchmark's socket.
        nvme: folder for offloading to a disk.
        words: flags of the training command, if ``table`` is ``run``.
    """

    table: str
    solution: str
    peer: str | None
    scale: str
    workers: int
    turns: int
    steps: int
    device: str
    precision: str
    address: str
    nvme: str
    words: tuple[str, ...] = ()

    @property
    def sizes(self) -> BenchScale:
        return TABLES[self.table].scales[self.scale]

    @property
    def data(self) -> int:
        """Number of copies of the model."""
        return self.workers // TABLES[self.table].solutions[self.solution].divides

    @property
    def accumulation(self) -> int:
        """Micro batches that each copy of the model accumulates per step."""
        sizes = self.sizes
        return sizes.global_batch // (self.data * sizes.micro_batch) if sizes.global_batch else sizes.accumulation

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.data * self.sizes.micro_batch * self.accumulation

    @property
    def total_steps(self) -> int:
        return self.turns * self.steps


class PeerUnavailable(RapidformerError):
    """The peer does not offer this here. The table reports it as a fact, not as a failure."""


class StateReceipt(TypedDict):
    """The bytes that a worker of this library held, from the receipts of its run."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    bucket_bytes: NotRequired[int]


class RunFacts(TypedDict, total=False):
    """Facts of a run with the user's flags."""

    flops: float
    global_batch: int
    parameters: int
    precision: str
    switches: list[str]


class Figures(RunFacts):
    """The figures that a worker reports after the last step.

    Attributes:
        loss: loss of the last step.
        peak_mb: peak memory.
        before_mb, setup_mb: memory without a model, and the peak before the first step.
        states: the receipts of all workers, by rank. None for a peer.
    """

    loss: float
    peak_mb: float
    before_mb: float
    setup_mb: float
    states: list[StateReceipt] | None


class Message(TypedDict, total=False):
    """A message of a worker to the benchmark: who it is, a turn, its figures, or why the peer is unavailable."""

    rank: int
    pid: int
    seconds: float
    figures: Figures
    absent: str


class BenchConnection:
    """A worker's connection to the benchmark. It also measures the time of each turn.

    The time begins when the benchmark starts the turn, and ends with the turn's last step.

    Attributes:
        before_mb: memory of the process before it has a model, for the interpreter and its libraries, in MB.
        setup_mb: peak memory before the first step, in MB.
    """

    def __init__(self, job: BenchJob) -> None:
        self._job = job
        self._connection = Client(job.address)
        self._send({"rank": int(os.environ["RANK"]), "pid": os.getpid()})
        self._mark = 0.0
        self._steps_left = job.total_steps
        self.before_mb = self.setup_mb = 0.0

    def before_model(self) -> None:
        """Record the memory without a model. Call it before the model is built."""
        from transformers import GPT2LMHeadModel  # noqa: F401  (a library, and not part of the model's memory)

        from rapidformer_templates.system.process_state import resident_bytes

        self.before_mb = resident_bytes("VmRSS") / 1e6 if self._job.device == "cpu" else 0.0

    def training_starts(self) -> None:
        self.setup_mb = peak_mb(self._job.device)
        self._wait()

    def step_ends(self) -> None:
        self._steps_left -= 1
        if self._steps_left % self._job.steps:
            return
        if self._job.device != "cpu":
            import torch

            torch.accelerator.synchronize()
        self._send({"seconds": (time.perf_counter() - self._mark) / self._job.steps})
        if self._steps_left:
            self._wait()

    def end(self, loss: float, states: list[StateReceipt] | None = None, **facts: Unpack[RunFacts]) -> None:
        """Report the figures of the worker."""
        figures: Figures = {
            "loss": loss,
            "peak_mb": peak_mb(self._job.device),
            "before_mb": self.before_mb,
            "setup_mb": self.setup_mb,
            "states": states,
            **facts,
        }
        self._send({"figures": figures})

    def absent(self, why: str) -> None:
        self._send({"absent": why})

    def _send(self, message: Message) -> None:
        self._connection.send(message)

    def _wait(self) -> None:
        self._connection.recv()  # raises EOFError, which ends this worker, if the benchmark is gone
        self._mark = time.perf_counter()


def peak_mb(device: str) -> float:
    """Return the peak memory so far in MB (10^6 bytes): allocated on the accelerator, or resident on a CPU."""
    allocated = None
    if device != "cpu":
        import torch

        from rapidformer_templates.system import accelerator

        allocated = accelerator.peak_bytes(torch.device(device, torch.accelerator.current_device_index()))
    if allocated is not None:
        return allocated / 1e6
    from rapidformer_templates.system.process_state import resident_bytes

    return resident_bytes("VmHWM") / 1e6


def build_model(scale: BenchScale, dropout: float = 0.0) -> nn.Module:
    """Build a GPT-2 or a BERT, by default without dropout, so that the losses of all solutions can be compared."""
    from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel

    if scale.kind == "bert":
        settings = BertConfig(
            vocab_size=scale.vocabulary,
            hidden_size=scale.hidden,
            num_hidden_layers=scale.layers,
            num_attention_heads=scale.heads,
            intermediate_size=4 * scale.hidden,
            max_position_embeddings=scale.length,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        return BertForPreTraining(settings)
    config = GPT2Config(
        vocab_size=scale.vocabulary,
        n_positions=scale.length,
        n_embd=scale.hidden,
        n_layer=scale.layers,
        n_head=scale.heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # otherwise transformers warns that it guesses this
    return model


class RandomTokens:
    """Random samples that are drawn on access. An index always gives the same sample."""

    def __init__(self, job: BenchJob) -> None:
        self._sizes = job.sizes
        self._count = job.total_steps * job.global_batch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        import torch

        if not 0 <= index < self._count:
            raise IndexError(index)
        draw = torch.Generator().manual_seed(SEED + index)
        tokens = torch.randint(self._sizes.vocabulary, (self._sizes.length,), generator=draw)
        if self._sizes.kind == "gpt":
            return {"input_ids": tokens, "labels": tokens}
        # Every sample has the same number of targets, so the mean over a batch does not depend on how it is divided.
        labels = torch.where(torch.arange(self._sizes.length) % 7 == 0, tokens, -100)
        return {"input_ids": tokens, "labels": labels, "next_sentence_label": tokens[0] % 2}
