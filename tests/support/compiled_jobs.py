"""Jobs for the compiler. All batches have one shape, unless a test is about shapes. Some models are defined here."""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer_templates import Data
from tests.support import parallel_jobs
from tests.support.jobs import OTHERS, VOCABULARY, CausalJob, MaskedJob, _Job, _pad, _sequences
from tests.support.parity import Trained, train


class LlamaJob(_Job):
    """Rotary positions, and two query heads for each key head."""

    shift = 1

    def make(self) -> nn.Module:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, **ends))


def _one_shape(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.full((len(samples), 24), fill) for name, fill in (("input_ids", 0), ("labels", -100))}
    for row, sample in enumerate(samples):
        for name, tensor in batch.items():
            part = torch.from_numpy(sample[name][:24])
            tensor[row, : len(part)] = part
    return batch


class OneShape(_Job):
    """Mixin: every batch has the same shape and no mask, and nothing is evaluated, so that one graph is enough."""

    def build_data(self) -> Data:
        return Data(train=_sequences(), collate=_one_shape)


def _one_length(samples: list[dict[str, Any]], *, classes: bool) -> dict[str, torch.Tensor]:
    return _pad(samples, (len(samples), 40), classes=classes)


class OneLength(_Job):
    """Mixin: every batch is padded to one length and has a mask. Nothing is evaluated, so that one graph is enough."""

    def build_data(self) -> Data:
        return Data(train=_sequences(), collate=partial(_one_length, classes=self.classes))


class EvenCausalJob(OneShape, CausalJob):
    pass


class EvenMaskedJob(OneShape, MaskedJob):
    pass


class EvenLlamaJob(OneShape, LlamaJob):
    pass


class StagesJob(OneShape, parallel_jobs.JOBS["llama-4-tied"]):  # type: ignore[misc]
    """Enough blocks for two stages on each of two workers, and enough heads to divide."""


class StagesGpt2Job(OneShape, parallel_jobs.JOBS["gpt2-4-tied"]):  # type: ignore[misc]
    """Transposed weight matrices, and biases."""


class StagesBertJob(OneShape, parallel_jobs.JOBS["bert-4-tied"]):  # type: ignore[misc]
    """Norms after the residual sums."""


class DropoutStagesJob(StagesBertJob):
    """Every layer has dropout."""

    def make(self) -> nn.Module:
        model = super().make()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        return model


class SeenStatesJob(StagesJob):
    """The loss includes the hidden states between two blocks, which hooks of transformers collect."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        output = model(input_ids=batch["input_ids"], output_hidden_states=True)
        loss = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        return loss + 0.1 * output.hidden_states[-2].square().mean()


class Block(nn.Module):
    """A block of a model that is not from transformers."""

    calls = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.kind = kind

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.linear(hidden).relu()
        if self.kind == "breaking":
            torch._dynamo.graph_break()
        if self.kind == "restless":  # a number that changes with every call
            self.calls += 1
            hidden = hidden + 0 * float(str(self.calls))
        return hidden


class Plain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        if kind == "whole":
            self.body: nn.Module = Block(kind)
        else:
            self.body = nn.Sequential(*(Block(kind) for _ in range(2)))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(input_ids)))


class PlainJob(OneShape):
    kind = ""

    def make(self) -> nn.Module:
        return Plain(self.kind)

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class BreakingJob(PlainJob):
    kind = "breaking"


class RestlessJob(PlainJob):
    kind = "restless"


class WholeJob(PlainJob):
    kind = "whole"


OTHERS |= {
    "llama": LlamaJob, "even-causal": EvenCausalJob, "even-masked": EvenMaskedJob, "even-llama": EvenLlamaJob,
    "stages": StagesJob, "stages-gpt2": StagesGpt2Job, "stages-bert": StagesBertJob, "stages-dropout": DropoutStagesJob,
    "seen-states": SeenStatesJob, "breaking": BreakingJob, "restless": RestlessJob, "whole": WholeJob,
}  # fmt: skip


def train_exactly(workers: Any, job: str, flags: str) -> Trained:
    """Train in fp64. Workers import this module for this function, so they know its jobs."""
    return train(job, True, flags)
