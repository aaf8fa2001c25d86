"""A custom training loop as in the documentation of PAI-Rapidformer. Only the import is different.

python examples/pai_rapidformer/no_trainer.py --micro-batch-size 4 --lr 1e-2 --lr-warmup-iters 2
"""

from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

# from rapidformer import RapidformerEngine, get_args
from rapidformer_templates.compat.rapidformer import RapidformerEngine, get_args

DRAW = torch.Generator().manual_seed(0)
WORDS = [torch.randint(1, 50, (4 + i % 9,), generator=DRAW) for i in range(54)]


def collate_fn(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.tensor([int(row.sum() % 3) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def build_model() -> torch.nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(1)
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes, **dropout))


def main() -> tuple[list[float], float]:
    engine = RapidformerEngine()
    args = get_args()
    train_dataloader: Any = DataLoader(WORDS[:44], batch_size=args.micro_batch_size, collate_fn=collate_fn)
    eval_dataloader: Any = DataLoader(WORDS[44:], batch_size=args.micro_batch_size, collate_fn=collate_fn)
    model: Any = build_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
    lr_scheduler: Any = partial(
        get_linear_schedule_with_warmup, num_warmup_steps=args.lr_warmup_iters, num_training_steps=30
    )
    model, optimizer, lr_scheduler, train_dataloader, eval_dataloader = engine.compose(
        model=model,
        train_dataloader=train_dataloader,
        eval_dataloader=eval_dataloader,
        optimizer=optimizer,
        lr_scheduler_fn=lr_scheduler,
    )
    losses = []
    for _ in range(2):
        model.train()
        for batch in train_dataloader:
            outputs = model(**batch)
            loss = outputs.loss
            engine.backward(loss)
            lr_scheduler.step()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    model.eval()
    right = sum(int((model(**batch).logits.argmax(-1) == batch["labels"]).sum()) for batch in eval_dataloader)
    return losses, right / len(WORDS[44:])


if __name__ == "__main__":
    print(main())
