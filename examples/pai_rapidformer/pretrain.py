"""Pretraining as in the documentation of PAI-Rapidformer. Only the import is different.

python examples/pai_rapidformer/pretrain.py --train-iters 20 --micro-batch-size 4 --lr 1e-3 --no-save
"""

from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

# from rapidformer import mpu, RapidformerEngine, get_args, get_timers, PreTrainer
from rapidformer_templates.compat.rapidformer import PreTrainer, RapidformerEngine, get_args, get_timers, mpu

WORDS, LENGTH = 60, 12


class MaskedWords(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A data set with the requested number of samples. Some samples have more masked words than others."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.seed * 1000 + index)
        ids = torch.randint(1, WORDS, (LENGTH,), generator=draw)
        hidden = torch.rand(LENGTH, generator=draw) < (index % 4 + 1) / 8
        return {"input_ids": ids.masked_fill(hidden, 0), "labels": ids.masked_fill(~hidden, -100)}


class MyBertPreTrainer(PreTrainer):
    def __init__(self, engine: RapidformerEngine) -> None:
        super().__init__(engine=engine)

    def train_valid_test_datasets_provider(self, train_val_test_num_samples: list[int]) -> Any:
        timers = get_timers()
        timers("data").start()
        train, valid, test = (
            MaskedWords(count, get_args().seed + i) for i, count in enumerate(train_val_test_num_samples)
        )
        timers("data").stop()
        return train, valid, test

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForMaskedLM(BertConfig(vocab_size=WORDS, **sizes, **dropout)), None, None

    def run_forward_step(self, data_iterator: Any, model: Any) -> Any:
        keys = ["input_ids", "labels"]
        data = next(data_iterator) if data_iterator is not None else None
        data_b = mpu.broadcast_data(keys, data, torch.int64)
        output_tensor = model(input_ids=data_b["input_ids"], labels=data_b["labels"])
        return output_tensor["loss"]


if __name__ == "__main__":
    engine = RapidformerEngine()
    trainer = MyBertPreTrainer(engine=engine)
    trainer.train()
