"""Your own training loop: thirty lines, and every switch.

    python examples/own_loop.py
    python examples/own_loop.py --nproc-per-node 2 --zero-3-memory-optimization
    python examples/own_loop.py --nproc-per-node 2 --tensor-model-parallel-size 2 --mixed-precision bf16

If you stop it, the next start resumes from the newest checkpoint in runs/own-loop. The number of workers may be
different then. After the last step, delete the folder to train again.
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import compose

STEPS, BATCH = 12, 8
DRAW = torch.Generator().manual_seed(0)
TOKENS = torch.randint(64, (STEPS * BATCH, 24), generator=DRAW)
LENGTHS = torch.randint(4, 25, (STEPS * BATCH, 1), generator=DRAW)


def build_model() -> torch.nn.Module:
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=24, n_embd=32, n_layer=4, n_head=4, **without_dropout))


def collate(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    labels = TOKENS[rows].masked_fill(torch.arange(24) >= LENGTHS[rows], -100)
    return {"input_ids": TOKENS[rows], "labels": labels}


def train(argv: list[str], folder: str = "runs/own-loop") -> list[float]:
    losses: list[float] = []
    flags = {"lr": 3e-3, "micro_batch_size": 2, "global_batch_size": BATCH}
    with compose(build_model, torch.optim.AdamW, argv=argv, example=collate(torch.arange(1)), **flags) as session:
        workers, micro = session.workers, session.plan.sizes.micro_batch
        if Path(folder, "checkpoints/latest").exists():
            losses = session.load(folder)["losses"]
        if session.steps == STEPS and workers.is_main:
            print(f"all {STEPS} steps are done: delete {folder} to train again")
        for step in range(session.steps, STEPS):
            mine = torch.arange(step * BATCH, (step + 1) * BATCH)[workers.data_rank :: workers.data]
            result = session.step([collate(rows) for rows in mine.split(micro)])
            losses.append(float(result.loss))
            if workers.is_main:
                print(f"step {step + 1}: loss {losses[-1]:.6f}", flush=True)
            session.save(folder, {"losses": losses})
    return losses


if __name__ == "__main__":
    train(sys.argv[1:])
