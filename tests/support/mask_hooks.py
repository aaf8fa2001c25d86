"""Loss hooks that pass their own mask or positions to a transformers model."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from rapidformer_templates import Data, Trainer
from tests.support.architectures import tiny


def _model(name: str) -> transformers.PreTrainedModel:
    if name != "bert":
        factory = transformers.AutoModelForSeq2SeqLM if name == "bart" else transformers.AutoModelForCausalLM
        return tiny(name, factory, may_skip=False)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **sizes, **no_dropout)).eval()


def _batch(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.arange(24).reshape(2, 12) % 29 + 1
    batch = {"input_ids": ids, "labels": ids}
    if kind in ("full mask", "padded"):
        batch["attention_mask"] = torch.ones_like(ids)
    if kind == "named mask":
        batch["mask"] = _second_rows(ids)
    if kind == "padded":
        batch["attention_mask"][0, 9:] = 0
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1).contiguous()
    return batch


def _second_rows(ids: torch.Tensor) -> torch.Tensor:
    """Return a mask that hides the last tokens of every second row."""
    mask = torch.ones_like(ids)
    mask[::2, 7:] = 0
    return mask


def _changed_in_place(model: Any, batch: Any) -> Any:
    batch["attention_mask"][:, 8:] = 0
    return model(**batch).loss


def _twice(model: Any, batch: Any) -> Any:
    """Use the same rows as one document each, and as two."""
    ids = batch["input_ids"]
    return model(ids, labels=ids).loss + model(ids, labels=ids, position_ids=_restarting(ids)).loss


def _restarting(ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.arange(5), torch.arange(ids.shape[1] - 5)]).expand(len(ids), -1).to(ids.device)


HOOKS: dict[str, tuple[str, str, Callable[[Any, Any], Any]]] = {
    "made in the hook": (
        "llama",
        "no mask",
        lambda model, batch: model(**batch, attention_mask=(batch["input_ids"] % 5 != 0).long()).loss,
    ),
    "made in the hook, full in the batch": (
        "bert",
        "full mask",
        lambda model, batch: model(**batch | {"attention_mask": _second_rows(batch["input_ids"])}).loss,
    ),
    "of another name": (
        "gpt2",
        "named mask",
        lambda model, batch: model(batch["input_ids"], attention_mask=batch["mask"], labels=batch["labels"]).loss,
    ),
    "second mask": (
        "bart",
        "full mask",
        lambda model, batch: model(**batch, decoder_attention_mask=_second_rows(batch["labels"])).loss,
    ),
    "second mask full": (
        "bart",
        "padded",
        lambda model, batch: model(**batch, decoder_attention_mask=torch.ones_like(batch["labels"])).loss,
    ),
    "changed in place": ("llama", "full mask", _changed_in_place),
    "own positions": (
        "llama",
        "no mask",
        lambda model, batch: model(**batch, position_ids=_restarting(batch["input_ids"])).loss,
    ),
    "own positions by place": (
        "llama",
        "no mask",
        lambda model, batch: (
            model(batch["input_ids"], None, _restarting(batch["input_ids"]), labels=batch["labels"]).loss
        ),
    ),
    "own positions in a part": (
        "llama",
        "no mask",
        lambda model, batch: (
            model.model(batch["input_ids"], position_ids=_restarting(batch["input_ids"]))
            .last_hidden_state.square()
            .mean()
        ),
    ),
    "with and without positions": ("gpt2", "no mask", _twice),
    "packed": ("llama", "packed", lambda model, batch: model(**batch).loss),
}

FLAGS = "--lr 0.01 --train-iters 3 --micro-batch-size 2 --clip-grad 0 --no-save"


class _Job(Trainer):
    name, kind = "", ""

    def build_model(self) -> transformers.PreTrainedModel:
        return _model(self.name)

    def build_data(self) -> Data:
        batch = _batch(self.kind)
        rows = [{key: value[row] for key, value in batch.items()} for row in range(2)]
        return Data(train=rows * 4)

    def on_step_end(self, step: int, result: Any) -> None:
        self.losses = [*getattr(self, "losses", []), float(result.loss)]


def job_of(hook: str, flags: str = "") -> _Job:
    """Train a job with one of ``HOOKS`` and return it."""
    name, kind, loss = HOOKS[hook]
    members: Any = {"name": name, "kind": kind, "compute_loss": lambda self, model, batch: loss(model, batch)}
    job: _Job = type("Job", (_Job,), members)([*FLAGS.split(), *flags.split()])
    job.fit()
    return job
