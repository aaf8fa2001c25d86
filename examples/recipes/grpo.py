"""GRPO: a language model learns from rewards. It runs in a minute on a CPU: a tiny GPT learns to add two digits.

    python grpo.py
    python grpo.py --nproc-per-node 2 --fsdp-memory-optimization
    python grpo.py --policy FOLDER --lora-rank 16 --lr 1e-5 --new-tokens 256 --mixed-precision bf16

The loss is that of DeepSeekMath (arXiv 2402.03300, equation 3), as a mean over the tokens of all completions (DAPO,
arXiv 2503.14476, section 3.3). For your own task, change `build_prompts` and `reward`. A stopped run resumes.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rapidformer_templates import Trainer, flag
from rapidformer_templates.run.session import Session

Row = dict[str, Tensor]
NUMBERS = 7  # the prompts add numbers from 0 to 6


@dataclass(frozen=True)
class GRPOFlags:
    """GRPO"""

    policy: str = flag("", "folder of the pretrained model and its tokenizer (default: a tiny GPT)")
    rounds: int = flag(150, "how often completions are sampled", minimum=1)
    group_size: int = flag(8, "completions of a prompt. A round has --global-batch-size completions", minimum=2)
    updates: int = flag(4, "optimizer steps with the completions of a round", minimum=1)
    new_tokens: int = flag(3, "tokens of the longest completion", minimum=1)
    temperature: float = flag(1.0, "what the logits are divided by, in sampling and in the loss")
    clip_range: float = flag(0.2, "how far the ratio of new to old probabilities may be from 1", minimum=0)
    kl_weight: float = flag(0.01, "weight of the divergence from the initial policy", minimum=0)
    every: int = flag(10, "rounds between two checkpoints; the output shows their mean", minimum=1)
    folder: str = flag("runs/grpo", "folder of the checkpoints and of the export")


def build_prompts() -> list[str]:
    return [f"{a}+{b}=" for a in range(NUMBERS) for b in range(NUMBERS)]


def reward(prompt: str, completion: str) -> float:
    """Return 1 for the right sum and 0 for anything else."""
    a, b = map(int, re.findall(r"\d+", prompt))
    return float(completion == str(a + b))


def load(folder: str) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load the policy and its tokenizer. Without a folder, make a tiny GPT that has read sums with mistakes."""
    if folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")  # also if the folder has bf16
        return model, AutoTokenizer.from_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<pad>", "<end>", *"0123456789+="])}))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        a, b = torch.randint(NUMBERS, (2, 64))
        sums = (a + b + torch.randint(-4, 5, (64,))).clamp(min=0)  # one in nine is right
        texts = [f"{x}+{y}={z}<end>" for x, y, z in torch.stack([a, b, sums], 1).tolist()]
        ids = tokenizer(texts, return_tensors="pt", padding=True)["input_ids"]
        model(input_ids=ids, labels=ids.masked_fill(ids == tokenizer.pad_token_id, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


class Sampler(LogitsProcessor):
    """Adds noise so that the largest logit is a sample (Gumbel-max). The seed of a row determines its noise."""

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = [torch.empty(scores.shape[1:], device=scores.device).exponential_(generator=g) for g in self.generators]
        return scores.float() / self.temperature - torch.stack(noise).log()


def advantages(rewards: Tensor) -> Tensor:
    """Return by how many standard deviations each reward is above the mean of its group (a row)."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


class GRPO(Trainer):
    """Train a language model on rewards."""

    Flags = GRPOFlags

    def build_model(self) -> nn.Module:
        return load(self.flags.policy)[0]

    def log_probabilities(self, model: Any, batch: Row) -> Tensor:
        """Return the log-probability of each token given those before it, and 0 for the first one."""
        ids = batch["input_ids"]  # padded on the right, where no token of the sample sees it
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float()
        known = (logits / self.flags.temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])
        return pad(known.squeeze(-1), (1, 0))

    def count_targets(self, batch: Row) -> int:
        return int(batch["is_completion"].sum())

    def compute_loss(self, model: Any, batch: Row) -> tuple[Tensor, int]:
        new = self.log_probabilities(model, batch)[batch["is_completion"]]
        old, initial, advantage = (batch[name][batch["is_completion"]] for name in ("old", "initial", "advantage"))
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - self.flags.clip_range, 1 + self.flags.clip_range)
        divergence = (initial - new).exp() - (initial - new) - 1  # unbiased and never negative (equation 4)
        losses = self.flags.kl_weight * divergence - torch.min(ratio * advantage, clipped * advantage)
        return losses.sum(), self.count_targets(batch)

    def sample(self, session: Session, number: int) -> tuple[list[Row], list[float]]:
        """Sample this worker's completions in a round. Return them with their rewards."""
        size, workers, end = self.flags.group_size, session.workers, self.tokenizer.eos_token_id
        count = session.plan.sizes.global_batch // size
        assert count % workers.data == 0, f"{workers.data} workers cannot share {count} prompts equally"
        mine = range(number * count, (number + 1) * count)[workers.data_rank :: workers.data]
        texts = [self.prompts[i % len(self.prompts)] for i in mine for _ in range(size)]
        keys = [np.random.SeedSequence([self.config.training.seed, i, k]) for i in mine for k in range(size)]
        sampler = Sampler([int(key.generate_state(1)[0]) for key in keys], self.flags.temperature, workers.device)
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(workers.device)
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        sampled = session.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=self.flags.new_tokens, do_sample=False,
            logits_processor=[sampler], eos_token_id=end, pad_token_id=self.tokenizer.pad_token_id,
        )[:, ids.shape[1] :]  # fmt: skip
        rows, rewards = [], []
        for i, text in enumerate(texts):
            ends = (sampled[i] == end).nonzero().flatten().tolist()
            parts = ids[i, mask[i]], sampled[i, : ends[0] + 1 if ends else None]
            is_completion = torch.cat([torch.full_like(part, k) for k, part in enumerate(parts)]).bool()
            rows.append({"input_ids": torch.cat(parts), "is_completion": is_completion})
            rewards.append(reward(text, self.tokenizer.decode(parts[1], skip_special_tokens=True)))
        for row, advantage in zip(rows, advantages(torch.tensor(rewards).view(-1, size)).flatten(), strict=True):
            row["advantage"] = torch.full(row["input_ids"].shape, float(advantage), device=workers.device)
        return rows, rewards

    @torch.no_grad()
    def batches_of(self, rows: list[Row], session: Session) -> list[Row]:
        """Return micro batches, with log-probabilities by the policy before the updates and by the initial one."""
        size = session.plan.sizes.micro_batch
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        batches = [{name: pad_sequence([row[name] for row in part], True) for name in part[0]} for part in parts]
        for batch in batches:
            batch["old"] = self.log_probabilities(session.forward, batch)
            with session.precision():
                batch["initial"] = self.log_probabilities(self.initial, batch)
        return batches

    def train(self) -> list[list[float]]:
        """Train, and return the mean reward and the loss of the last update for each round."""
        history: list[list[float]] = []
        with self.compose() as session:
            workers, folder = session.workers, self.flags.folder
            self.prompts, (initial, self.tokenizer) = build_prompts(), load(self.flags.policy)
            self.initial = initial.to(workers.device).eval()
            if Path(folder, "checkpoints/latest").exists():
                history = session.load(folder)["history"]
            for number in range(len(history), self.flags.rounds):
                rows, rewards = self.sample(session, number)
                batches = self.batches_of(rows, session)
                loss = [float(session.step(batches).loss) for _ in range(self.flags.updates)][-1]
                total, count = workers.sum(sum(rewards), len(rewards))
                history.append([total / count, loss])
                since = (len(history) - 1) % self.flags.every + 1
                if since == self.flags.every or len(history) == self.flags.rounds:
                    session.save(folder, {"history": history})
                    mean, loss = np.mean(history[-since:], axis=0)
                    if workers.is_main:
                        print(f"round {len(history)}: reward {mean:.3f}, loss {loss:.4f}", flush=True)
            session.export(Path(folder, "export"), self.tokenizer)
        return history


if __name__ == "__main__":
    GRPO(sys.argv[1:], lr=5e-4, micro_batch_size=64, global_batch_size=256).train()
