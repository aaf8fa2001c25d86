"""A white-box job for test_memory. Its state takes 1.7 GB per worker without partitioning."""

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Data, Trainer


class Large(Trainer):
    """A GPT with 109 million parameters on random tokens."""

    def build_data(self) -> Data:
        draw = np.random.default_rng(0)
        samples = [torch.from_numpy(draw.integers(0, 8000, 32)) for _ in range(64)]
        return Data(train=samples, collate=lambda rows: {"input_ids": torch.stack(rows), "labels": torch.stack(rows)})

    def build_model(self) -> torch.nn.Module:
        sizes = {"vocab_size": 8000, "n_positions": 64, "n_embd": 1024, "n_layer": 8, "n_head": 8}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


if __name__ == "__main__":
    Large.main(train_iters=2, lr=1e-4, micro_batch_size=1, checkpoint_activations=True, log_interval=1)
