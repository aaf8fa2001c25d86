"""Distillation: a small model learns the probabilities of a large one. It runs in seconds on a CPU with made models.

    python distill.py
    python distill.py --nproc-per-node 2 --fsdp-memory-optimization --beta 0.5 --save runs/distill-2
    python distill.py --teacher LARGE --pretrained-model-name-or-path SMALL --data-dir FOLDER --seq-length 1024 \
        --lr 2e-5 --micro-batch-size 4 --mixed-precision bf16 --teacher-logits large.safetensors --save runs/my-small

LARGE and SMALL are folders of causal language models with the same tokenizer. FOLDER has texts or chats, as for
--task causal_lm. With --teacher-logits, the teacher computes its most likely words once. Later runs read the file.

It takes every flag: python distill.py --help-all. To see what a run would do: rapidformer plan --user-script distill.py
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput

from rapidformer_templates import Data, RapidformerError, Trainer, flag
from rapidformer_templates.data.collate import IGNORED, PadCollate, shifted_left

Sample = Mapping[str, np.ndarray | Tensor]
WORDS = 50


def made_model(width: int, layers: int, seed: int, spread: float = 0.02) -> nn.Module:
    """Make a tiny language model. A large ``spread`` of its weights makes it sure of its words."""
    sizes = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=width, n_layer=layers, n_head=4, initializer_range=spread,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(sizes)


@torch.no_grad()
def made_samples(teacher: nn.Module, count: int, seed: int) -> list[Sample]:
    """Make prompts of four words, and let the teacher continue them with up to twelve words."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (count, 4), generator=draw)
    while tokens.shape[1] < 16:
        shares = teacher(tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(shares, 1, generator=draw)], 1)
    lengths = torch.randint(6, 17, (count,), generator=draw).tolist()
    rows = [row[:length].numpy() for row, length in zip(tokens, lengths, strict=True)]
    return [{"input_ids": row, "labels": np.where(np.arange(len(row)) < 4, IGNORED, row)} for row in rows]


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of each row (Agarwal et al., 2024, "GKD", equation 1).

    Args:
        student, teacher: log-probabilities, (rows, words).
        beta: 0 is the forward KL divergence, from the teacher to the student. 1 is the reverse one.
    """
    if beta in (0, 1):
        of, other = (teacher, student) if beta == 0 else (student, teacher)
        return kl_div(other, of, reduction="none", log_target=True).sum(-1)
    mixture = torch.logaddexp(teacher + log(beta), student + log(1 - beta))
    parts = [kl_div(mixture, one, reduction="none", log_target=True).sum(-1) for one in (teacher, student)]
    return beta * parts[0] + (1 - beta) * parts[1]


def merged(logits: Tensor, words: Tensor) -> Tensor:
    """Return the log-probabilities of some words of each row, and of all other words together in a last column."""
    logps = logits.log_softmax(-1)
    chosen = logps.gather(-1, words)
    if words.shape[-1] == logits.shape[-1]:
        return chosen
    rest = logps.scatter(-1, words, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, rest], -1)


@dataclass(frozen=True)
class DistillFlags:
    """Distillation"""

    teacher: str | None = flag(None, "folder of the teacher; without it, a tiny one is made")
    beta: float = flag(0.0, "0 is the forward KL divergence, 1 the reverse one, 0.5 JSD", minimum=0, maximum=1)
    temperature: float = flag(1.0, "what the logits of both models are divided by", minimum=0.01)
    teacher_weight: float = flag(0.5, "weight of the divergence; the loss on labels has the rest", minimum=0, maximum=1)
    teacher_logits: str | None = flag(None, "file with the teacher's most likely words, written if it is missing")
    top_k: int = flag(32, "number of words of each token in this file", minimum=1)


class Distill(Trainer):
    """Train a causal language model on the probabilities of another one."""

    Flags = DistillFlags
    teacher: nn.Module | None = None  # not a part of the trained model: it is neither wrapped nor saved

    def build_data(self) -> Data:
        folder, file = self.config.data.data_dir, self.flags.teacher_logits
        if folder is None:
            made = made_model(64, 2, seed=7, spread=0.3)
            collate = PadCollate({"input_ids": 0, "labels": IGNORED})
            data = Data(train=made_samples(made, 256, seed=1), valid=made_samples(made, 128, seed=2), collate=collate)
        else:
            data = super().build_data()
        if file is None:
            self.teacher = self.build_teacher()
            self.words = self.teacher.config.vocab_size
            return data
        valid = {f"valid {name}": samples for name, samples in data.validation_sets().items()}
        sets = {"train": data.train, **valid} | ({"test": data.test} if data.test else {})
        identity = {
            "teacher": str(self.flags.teacher), "temperature": str(self.flags.temperature),
            "top-k": str(self.flags.top_k), **{name: digest(samples) for name, samples in sets.items()},
        }  # fmt: skip
        if not Path(file).exists():
            store(self.build_teacher(), sets, data.collate, self.flags, self.plan.sizes.micro_batch, identity)
        with safe_open(file, "pt") as opened:
            stored = opened.metadata()
        self.words = int(stored.pop("words"))
        if other := [name for name in identity if stored.get(name) != identity[name]]:
            message = f"{file} was made with another {', '.join(other)}"
            hint = "name another file, or delete this one"
            raise RapidformerError(message, where="--teacher-logits", hint=hint)
        logits = load_file(file)
        wrapped = {name: WithTeacher(samples, logits, name) for name, samples in sets.items()}
        named = {name: wrapped[f"valid {name}"] for name in data.validation_sets()}
        collate = partial(collate_with_teacher, data.collate)
        return replace(data, train=wrapped["train"], valid=named, test=wrapped.get("test"), collate=collate)

    def build_teacher(self) -> nn.Module:
        """Return the teacher. Each worker has all of it, also if the engine divides the student."""
        folder = self.flags.teacher
        if folder is None:
            teacher = made_model(64, 2, seed=7, spread=0.3)
        else:
            teacher = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
            if self.tokenizer and AutoTokenizer.from_pretrained(folder).get_vocab() != self.tokenizer.get_vocab():
                hint = "use a teacher with the student's tokenizer, or train on texts that the teacher writes"
                raise RapidformerError("the teacher has another tokenizer", where=f"--teacher {folder}", hint=hint)
        return teacher.eval().requires_grad_(False).to(self.plan.device)

    def build_model(self) -> nn.Module:
        made = self.config.model.pretrained_model_name_or_path is None
        model = made_model(32, 2, self.config.training.seed) if made else super().build_model()
        words = model.config.vocab_size
        # With the same tokenizer, one model may only have more rows that no token uses.
        if words != self.words and not (self.tokenizer and min(words, self.words) >= len(self.tokenizer)):
            hint = "both models need the same tokenizer"
            raise RapidformerError(
                f"the teacher has {self.words} words, the student {words}", where="--teacher", hint=hint
            )
        self.words = min(words, self.words)
        return model

    def count_targets(self, batch: dict[str, Tensor]) -> int:
        return int((batch["labels"][:, 1:] != IGNORED).sum())

    def compute_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        inputs = {name: rows for name, rows in batch.items() if name != "labels" and not name.startswith("teacher")}
        labels = shifted_left(batch["labels"])
        learned = labels != IGNORED
        logits = model(**inputs).logits[learned].float()
        student = logits[:, : self.words] / self.flags.temperature
        if self.teacher is not None:
            with torch.no_grad():
                teacher = self.teacher(**inputs).logits[learned][:, : self.words].float() / self.flags.temperature
            apart = divergence(student.log_softmax(-1), teacher.log_softmax(-1), self.flags.beta)
        else:
            counts = learned.sum(1, keepdim=True)
            filled = torch.arange(batch["teacher_words"].shape[1], device=counts.device) < counts
            student = merged(student, batch["teacher_words"][filled].long())
            apart = divergence(student, batch["teacher_logps"][filled], self.flags.beta)
        weight = self.flags.teacher_weight
        on_labels = cross_entropy(logits, labels[learned], reduction="sum")
        return weight * apart.sum() + (1 - weight) * on_labels, len(logits)

    def read_outputs(self, outputs: CausalLMOutput, batch: dict[str, Tensor]) -> tuple[list[float], list[int]]:
        labels = shifted_left(batch["labels"])
        logits = outputs.logits.float().flatten(0, 1)
        losses = cross_entropy(logits, labels.flatten().to(logits.device), reduction="none").view(labels.shape)
        return losses.sum(1).tolist(), (labels != IGNORED).sum(1).tolist()

    def compute_metrics(self, predictions: Sequence[float], references: Sequence[int]) -> Mapping[str, float]:
        return {"perplexity": exp(sum(predictions) / sum(references))}  # of the labels, and not of the mixed loss


@dataclass(frozen=True)
class WithTeacher:
    """Samples with the teacher's stored log-probabilities, one row for each token of the answer."""

    samples: Sequence[Sample]
    logits: Mapping[str, Tensor]
    name: str

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        begin, end = self.logits[f"{self.name}/ends"][index : index + 2].tolist()
        stored = {f"teacher_{kind}": self.logits[f"{self.name}/{kind}"][begin:end] for kind in ("logps", "words")}
        return {**self.samples[index], **stored}


def collate_with_teacher(
    collate: Callable[[list[Sample]], dict[str, Tensor]], samples: list[Sample]
) -> dict[str, Tensor]:
    """Collate samples, and pad the rows of the teacher: (samples, tokens of the longest answer, words)."""
    plain = [{name: row for name, row in sample.items() if not name.startswith("teacher")} for sample in samples]
    names = ("teacher_logps", "teacher_words")
    return collate(plain) | {name: pad_sequence([s[name] for s in samples], batch_first=True) for name in names}


def digest(samples: Sequence[Sample]) -> str:
    """Return a digest of all tokens and labels."""
    value = hashlib.sha256()
    for index in range(len(samples)):
        for name, row in sorted(samples[index].items()):
            value.update(name.encode() + np.asarray(row, dtype=np.int64).tobytes())
    return value.hexdigest()[:16]


@torch.no_grad()
def store(
    teacher: nn.Module, sets: Mapping[str, Sequence[Sample]], collate: Callable[[list[Sample]], dict[str, Tensor]],
    flags: DistillFlags, batch_size: int, identity: Mapping[str, str],
) -> None:  # fmt: skip
    """Write the teacher's most likely words of each token. Each worker computes some of the batches."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tensors: dict[str, Tensor] = {}
    for name, samples in sets.items():
        parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for begin in range(rank * batch_size, len(samples), world * batch_size):
            batch = collate([samples[i] for i in range(begin, min(begin + batch_size, len(samples)))])
            batch = {field: rows.to(teacher.device) for field, rows in batch.items()}
            learned = shifted_left(batch.pop("labels")) != IGNORED
            logits = teacher(**batch).logits[learned].float() / flags.temperature
            words = logits.topk(min(flags.top_k, logits.shape[-1])).indices
            parts[begin] = merged(logits, words).cpu(), words.int().cpu(), learned.sum(1).cpu()
        shares: list[dict[int, tuple[Tensor, Tensor, Tensor]] | None] = [parts] * world
        if world > 1:
            dist.gather_object(parts, shares if rank == 0 else None)
        if rank == 0:
            whole = {begin: part for share in shares if share for begin, part in share.items()}
            logps, chosen, counts = (torch.cat(kind) for kind in zip(*(whole[i] for i in sorted(whole)), strict=True))
            ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            tensors |= {f"{name}/logps": logps, f"{name}/words": chosen, f"{name}/ends": ends}
    if rank == 0:
        file = Path(str(flags.teacher_logits))
        file.parent.mkdir(parents=True, exist_ok=True)
        half = file.with_name(f"{file.name}.tmp")  # so that no other run reads half of a file
        save_file(tensors, half, metadata={**identity, "words": str(teacher.config.vocab_size)})
        half.replace(file)
    if world > 1:
        dist.barrier()


if __name__ == "__main__":
    Distill.main(
        task="causal_lm", epochs=20, lr=5e-3, micro_batch_size=16, metric_for_best="perplexity", save="runs/distill"
    )
