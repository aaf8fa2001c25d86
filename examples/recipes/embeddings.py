"""Sentence embeddings from pairs of texts. It runs in seconds on a CPU: the pairs are generated, the model is tiny.

    python embeddings.py
    python embeddings.py --nproc-per-node 2 --fsdp-memory-optimization --matryoshka 32 16 --save runs/embeddings-2
    python embeddings.py --pretrained-model-name-or-path "$(rapidformer demo --prepare)" --data-dir FOLDER --lr 2e-5 \
        --micro-batch-size 64 --epochs 1 --mixed-precision bf16 --matryoshka 256 128 64 --save runs/my-embeddings

FOLDER has train.jsonl and valid.jsonl, with {"anchor": "…", "positive": "…", "negative": "…"} in each line. The hard
negative may be left out of all lines. The positives and negatives of all other pairs of the batch, on all workers, are
negatives, too. SentenceTransformer("runs/my-embeddings/export") loads the trained model.

It takes every flag: python embeddings.py --help-all. To see what a run would do:
rapidformer plan --user-script embeddings.py
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel
from transformers.modeling_outputs import BaseModelOutput

from rapidformer_templates import Data, Trainer, flag

Texts = list[Tensor]
"""The tokens of an anchor, of its positive, and of its hard negative if there is one."""

WORDS, PADDING = 1000, 0


def made_pairs(count: int, seed: int) -> list[Texts]:
    """Make sentences of four words, their translations in another order, and translations with a wrong word."""
    draw = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(count):
        chosen = 1 + torch.randperm(WORDS, generator=draw)[:5]
        translated = chosen[torch.randperm(4, generator=draw)] + WORDS
        wrong = torch.cat([translated[1:], chosen[4:] + WORDS])
        pairs.append([chosen[:4], translated, wrong])
    return pairs


def collate(pairs: list[Texts]) -> dict[str, Tensor]:
    """Pad all texts to the longest one. The tensors have the shape (pairs, texts, tokens)."""
    texts = [text for pair in pairs for text in pair]
    ids = pad_sequence(texts, batch_first=True, padding_value=PADDING)
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {name: rows.unflatten(0, (len(pairs), -1)) for name, rows in (("input_ids", ids), ("attention_mask", mask))}


def mean_pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the outputs at the tokens of each text, (pairs, texts, features)."""
    weights = mask.unsqueeze(-1).float()
    return (hidden.float().unflatten(0, mask.shape[:2]) * weights).sum(2) / weights.sum(2)


def contrastive(anchors: Tensor, candidates: Tensor, scale: float) -> Tensor:
    """Return the cross-entropy of finding the positive of each anchor by cosine (InfoNCE, van den Oord et al., 2018).

    Args:
        anchors: (pairs, features).
        candidates: (all pairs, positive and hard negative, features). The pairs of the anchors come first.
        scale: what the similarities are multiplied by: the inverse of the temperature.
    """
    rows = normalize(candidates, dim=-1).transpose(0, 1).flatten(0, 1)  # all positives, then all hard negatives
    return cross_entropy(scale * normalize(anchors, dim=-1) @ rows.T, torch.arange(len(anchors)).to(rows.device),
                         reduction="none")  # fmt: skip


@dataclass(frozen=True)
class EmbeddingFlags:
    """Embeddings"""

    scale: float = flag(20.0, "what cosine similarities are multiplied by", minimum=0)
    matryoshka: tuple[str, ...] = flag((), "further sizes: the first numbers of an embedding are one as well")


class Embeddings(Trainer):
    """Train a model whose embeddings of texts that belong together are similar."""

    Flags = EmbeddingFlags

    def build_data(self) -> Data:
        if self.config.data.data_dir is None:
            return Data(train=made_pairs(2048, seed=1), valid=made_pairs(512, seed=2), collate=collate)
        self.tokenizer = AutoTokenizer.from_pretrained(self.config.model.pretrained_model_name_or_path)
        return Data(train=self.read("train"), valid=self.read("valid"), collate=collate)

    def read(self, part: str) -> list[Texts]:
        lines = (Path(self.config.data.data_dir) / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        names = ("anchor", "positive", "negative")[: len(rows[0])]
        length = self.config.model.seq_length or 256
        columns = [self.tokenizer([row[name] for row in rows], truncation=True, max_length=length) for name in names]
        return [[torch.tensor(ids) for ids in texts] for texts in zip(*(c["input_ids"] for c in columns), strict=True)]

    def build_model(self) -> nn.Module:
        folder = self.config.model.pretrained_model_name_or_path
        if folder is not None:
            model = AutoModel.from_pretrained(folder, dtype="float32")
            if hasattr(model, "pooler"):
                model.pooler = None  # the mean over the tokens replaces it
            return model
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertModel(BertConfig(vocab_size=2 * WORDS + 1, **sizes, **dropouts), add_pooling_layer=False)

    def sizes(self, features: int) -> list[int]:
        """Return the sizes of embeddings that are trained: the whole one, and prefixes (Kusupati et al., 2022)."""
        return [features, *map(int, self.flags.matryoshka)]

    def on_train_start(self) -> None:
        sizes = self.plan.sizes
        if sizes.accumulation > 1 and self.is_main:
            seen = sizes.global_batch // sizes.accumulation
            print(f"note: a step has {sizes.accumulation} micro batches per worker, so an anchor sees {seen} pairs and "
                  f"not {sizes.global_batch}; a larger --micro-batch-size gives it more negatives")  # fmt: skip

    def compute_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        mask = batch["attention_mask"]
        outputs = model(input_ids=batch["input_ids"].flatten(0, 1), attention_mask=mask.flatten(0, 1))
        texts = mean_pooled(outputs.last_hidden_state, mask)
        anchors, candidates = texts[:, 0], self.gather(texts[:, 1:])  # of all workers, those of this one first
        sizes = self.sizes(anchors.shape[-1])
        losses = [contrastive(anchors[:, :n], candidates[..., :n], self.flags.scale) for n in sizes]
        return torch.stack(losses).sum(), len(anchors)

    def read_outputs(
        self, outputs: BaseModelOutput, batch: dict[str, Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        texts = mean_pooled(outputs.last_hidden_state.cpu(), batch["attention_mask"])
        return list(texts[:, 0]), list(texts[:, 1])

    def compute_metrics(self, predictions: Sequence[Tensor], references: Sequence[Tensor]) -> Mapping[str, float]:
        """Return the share of anchors that are closer to their positive than to any other one of the validation set."""
        anchors, positives = torch.stack(list(predictions)), torch.stack(list(references))
        recalls = {}
        for size in self.sizes(anchors.shape[-1]):
            similarities = normalize(anchors[:, :size], dim=-1) @ normalize(positives[:, :size], dim=-1).T
            right = similarities.argmax(1) == torch.arange(len(anchors))
            recalls["recall" if size == anchors.shape[-1] else f"recall_{size}"] = float(right.float().mean())
        return recalls


if __name__ == "__main__":
    Embeddings.main(
        epochs=6, lr=2e-3, micro_batch_size=32, metric_for_best="recall", metric_for_best_mode="max",
        save="runs/embeddings",
    )  # fmt: skip
