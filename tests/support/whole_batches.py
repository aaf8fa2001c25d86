"""Jobs whose every step sees all samples, and the plain loop of torch that they must follow under every engine.

The order of the samples does not matter, so the loop needs nothing of this library but the job's model and loss.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import get_total_norm
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Data, Trainer
from rapidformer_templates.errors import RapidformerError
from tests.support.parity import ENGINES, trained

WORDS, WIDTH, STEPS, RATE = 31, 16, 3, 1e-2
FLAGS = (
    f"--train-iters {STEPS} --global-batch-size 8 --micro-batch-size 2 --lr {RATE} --lr-decay-style constant "
    "--clip-grad 0 --log-interval 1 --no-export-model"
)
Batch = dict[str, torch.Tensor]


def _samples() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, WORDS, (length,), generator=draw) for length in (9, 4, 6, 3, 8, 5, 7, 9)]


def collate(samples: list[torch.Tensor]) -> Batch:
    """Pad the samples. Each word of an even number must be predicted."""
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    counts = (ids % 2 == 0) & (ids > 0)
    counts[:, 0] = False
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(~counts, -100)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.down(self.up(hidden).tanh())
        return out


class Net(nn.Module):
    """A model that is not from transformers. Subclasses add parameters, and what they do to the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.add()
        self.head = nn.Linear(WIDTH, WORDS)

    def add(self) -> None:
        pass

    def change(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.change(hidden))
        return logits


class WholeBatchJob(Trainer):
    """Trains :class:`Net`. A worker that computes in fp64 must follow the plain loop to rounding."""

    double = True
    net: type[nn.Module] = Net

    def __init__(self, argv: Any = None, **flags: Any) -> None:
        super().__init__(argv, **{"no_save": True, **flags})

    def build_data(self) -> Data:
        return Data(train=_samples(), collate=collate)

    def make(self) -> nn.Module:
        return self.net()

    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        model = self.make()
        return model.double() if self.double else model

    def count_targets(self, batch: Batch) -> float:
        return int((batch["labels"] != -100).sum())

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return getattr(out, "logits", out)

    def loss_of(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the sum of the losses of the words that count, each predicted from the words before it."""
        return F.cross_entropy(logits[:, :-1].flatten(0, -2), batch["labels"][:, 1:].flatten(), reduction="sum")

    def compute_loss(self, model: Any, batch: Batch) -> Any:
        return self.loss_of(self.logits(model, batch), batch), self.count_targets(batch)

    def on_step_end(self, step: int, result: Any) -> None:
        self.curve = [*getattr(self, "curve", []), (float(result.loss), float(result.grad_norm))]


class TransformerJob(WholeBatchJob):
    """Trains a transformer, which tensor, pipeline and context parallelism divide."""

    def make(self) -> nn.Module:
        sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": WIDTH, "n_layer": 4, "n_head": 2}
        special = {"bos_token_id": 1, "eos_token_id": 2}
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(**sizes, **special, **dropouts, attn_implementation="eager"))


def in_plain_torch(kind: type[WholeBatchJob], *, double: bool = True) -> dict[str, Any]:
    """Train the model of a job with its loss in a plain loop, and call its callbacks.

    Returns:
        ``curve`` and ``weights`` as :func:`tests.support.parity.trained` does.
    """
    job: Any = object.__new__(type(kind.__name__, (kind,), {"double": double}))
    job.model = model = job.build_model()
    model.zero_grad()
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=RATE,
    )
    batch = collate(_samples())
    job.on_train_start()
    curve = []
    for step in range(1, STEPS + 1):
        total, count = job.compute_loss(model, batch)
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        norm = get_total_norm([p.grad for _, p in named if p.grad is not None])
        optimizer.step()
        curve.append((float(loss.detach()), float(norm)))
        job.on_step_end(step, type("Result", (), {"loss": loss.detach(), "grad_norm": norm}))
    return {"curve": curve, "weights": {name: p.detach().clone() for name, p in model.named_parameters()}}


def under_engines(workers: Any, cases: list[tuple[type[WholeBatchJob], str]], more: str = "") -> list[Any]:
    """Train each job under an engine in this worker. Returns what was trained, or the text of the error."""
    found: list[Any] = []
    for job, engine in cases:
        kind = type(job.__name__, (job,), {"double": job.double and not engine.startswith("zero")})
        try:
            found.append(trained(kind([*FLAGS.split(), *ENGINES[engine].split(), *more.split()])))
        except RapidformerError as error:
            found.append(error.render())
    return found


def assert_follows(found: Any, kind: type[WholeBatchJob], engine: str) -> None:
    """Check that a run computed what the plain loop does: to rounding in fp64, or closely where ZeRO needs fp32."""
    assert not isinstance(found, str), found
    exact = kind.double and not engine.startswith("zero")
    wanted = in_plain_torch(kind, double=exact)
    close = {"rtol": 1e-9, "atol": 1e-9} if exact else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(wanted["curve"]), **close)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, weight in wanted["weights"].items():
        # Adam divides by the gradient, so fp32 turns a tiny one into a part of a step.
        apart = {"rtol": 1e-7, "atol": 1e-7} if exact else {"rtol": 1e-3, "atol": 2e-3}
        wide = torch.complex128 if weight.is_complex() else torch.float64
        torch.testing.assert_close(found["weights"][name].to(wide), weight.to(wide), **apart, msg=name)
