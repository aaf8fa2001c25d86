"""Fine-tuning as in the documentation of PAI-Rapidformer. Only the import is different.

python examples/pai_rapidformer/finetune.py --epochs 3 --micro-batch-size 4 --lr 1e-3 --no-save
"""

from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

# from rapidformer import RapidformerEngine, get_args, Finetuner
from rapidformer_templates.compat.rapidformer import Finetuner, RapidformerEngine, get_args


def get_tasks_args(parser: Any) -> Any:
    group = parser.add_argument_group(title="made-up words")
    group.add_argument("--words", type=int, default=50, help="words of the vocabulary")
    return parser


class MyFinetuner(Finetuner):
    def __init__(self, engine: RapidformerEngine) -> None:
        super().__init__(engine=engine)

    def train_valid_test_datasets_provider(self) -> Any:
        draw = torch.Generator().manual_seed(get_args().seed)

        def sentences(count: int) -> list[dict[str, Any]]:
            rows = [torch.randint(1, get_args().words, (4 + i % 9,), generator=draw) for i in range(count)]
            return [{"input_ids": row, "labels": int(row.sum() % 3)} for row in rows]

        def collate_fn(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            rows = [example["input_ids"] for example in examples]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            labels = torch.tensor([example["labels"] for example in examples])
            return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

        return sentences(44), sentences(13), None, collate_fn

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        args = get_args()
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForSequenceClassification(BertConfig(vocab_size=args.words, num_labels=3, **sizes, **dropout))
        return model, None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        output_tensor = model(**batch)
        return output_tensor.loss

    # after each epoch run metric on eval dataset
    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        model = model[0]
        right = total = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = self.gather(outputs.logits.argmax(dim=-1))
            references = self.gather(batch["labels"])
            right, total = right + int((predictions == references).sum()), total + len(references)
        return {"accuracy": right / total}


if __name__ == "__main__":
    engine = RapidformerEngine(extra_args_provider=get_tasks_args)
    trainer = MyFinetuner(engine=engine)
    trainer.train()
