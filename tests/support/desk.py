"""A scratch folder with small files under the names that the commands of the manual use."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from tests.support.preference_runs import pairs, pretrained
from tests.support.texts import DOCUMENTS, write_jsonl

ROOT = Path(__file__).parents[2]
CHATS = [
    {"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[-20:]}]}
    for text in DOCUMENTS[:24]
]
TWEETS = [{"text": text[:60], "label": ("negative", "neutral", "positive")[i % 3]} for i, text in enumerate(DOCUMENTS)]
FOLDERS = ("DATA", "DIR", "data", "texts", "runs/demo-data", "reviews")
"""Folders of data sets in the manual."""


def save_models(folder: Path, bert_tokenizer: Path, gpt_tokenizer: Path) -> None:
    """Save a tiny encoder in ``bert`` and a tiny language model in ``gpt``, with tokenizers."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(bert_tokenizer)
    BertModel(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64,
        )
    ).save_pretrained(folder / "bert")  # fmt: skip
    tokenizer.save_pretrained(folder / "bert")
    pretrained(folder / "gpt", gpt_tokenizer)


def lay_out(desk: Path, models: Path, tokenizer: Path, *, classifies: bool) -> None:
    """Write the files that commands name, except those that the pages themselves write.

    Args:
        models: the folder of :func:`save_models`.
        tokenizer: folder of a tokenizer for pretraining.
        classifies: whether FOLDER is an encoder. Otherwise it is a language model.
    """
    for name, model in (("FOLDER", "bert" if classifies else "gpt"), ("gpt2", "gpt"), ("model", "bert")):
        shutil.copytree(models / model, desk / name)
    for name in ("TOKENIZER_FOLDER", "my-tokenizer", "tokenizer"):
        shutil.copytree(tokenizer, desk / name)
    for name in FOLDERS:
        _write_sets(desk / name)
    write_jsonl(desk / "DATA/reviews.jsonl", TWEETS[:30])
    write_jsonl(desk / "corpus.jsonl", _texts())
    (desk / "corpus.txt").write_text("\n\n".join(DOCUMENTS), encoding="utf-8")
    (desk / "shards").mkdir()
    write_jsonl(desk / "shards/a.jsonl", _texts())
    (desk / "lines.txt").write_text("a good dog\na bad cat\n", encoding="utf-8")
    (desk / "rows.csv").write_text("text,label\na good dog,positive\na bad cat,negative\n", encoding="utf-8")
    small = "task: pretraining\nmodel-type: gpt2\nnum-layers: 2\nhidden-size: 16\nnum-attention-heads: 2\n"
    corpus = "seq-length: 16\ntokenizer-path: tokenizer\ndata-path: corpus.txt\nlr: 1.0e-3\ntrain-iters: 2\n"
    for file in ("my.yaml", "pretrain.yaml"):
        (desk / file).write_text(f"{small}{corpus}save: runs/mine\n", encoding="utf-8")


def _texts() -> list[dict[str, Any]]:
    return [{"text": text} for text in DOCUMENTS]


def _write_sets(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_jsonl(folder / "chat.jsonl", CHATS)
    write_jsonl(folder / "more.jsonl", CHATS)
    write_jsonl(folder / "pairs.jsonl", pairs())
    write_jsonl(folder / "ultra.jsonl", pairs())
    write_jsonl(folder / "notes.jsonl", _texts())
    for name, rows in (("tweets-train", TWEETS[:40]), ("tweets-valid", TWEETS[40:]), ("test", TWEETS[40:])):
        lines = [f"{row['text']},{row['label']}" for row in rows]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines, ""]), encoding="utf-8")
    write_jsonl(folder / "hard.jsonl", TWEETS[30:40])


def converted_files(desk: Path) -> None:
    """Write a configuration of each other trainer, under the name on its page."""
    sft = {"model_name_or_path": "FOLDER", "stage": "sft", "do_train": True, "dataset": "chat", "dataset_dir": "DATA"}
    common = {"num_train_epochs": 1, "gradient_accumulation_steps": 2, "use_cpu": True}
    axolotl = {
        "base_model": "FOLDER", "datasets": [{"path": "DATA/chat.jsonl", "type": "chat_template"}], "num_epochs": 1,
        "micro_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-4,
        "optimizer": "adamw_torch", "sequence_len": 32, "val_set_size": 0.1,
    }  # fmt: skip
    trl = {"model_name_or_path": "FOLDER", "dataset_name": "DATA", "max_length": 32, "packing": False}
    files: dict[str, dict[str, Any]] = {
        "qlora.yml": axolotl, "theirs.yaml": axolotl, "qwen3_lora_sft.yaml": sft | common | {"cutoff_len": 32},
        "arguments.json": common, "recipe.yaml": trl | common,
    }  # fmt: skip
    for name, values in files.items():
        # JSON is YAML.
        (desk / name).write_text(json.dumps(values | {"output_dir": f"runs/{name}"}), encoding="utf-8")
    sizes = "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
    batch = "--micro-batch-size 1 --global-batch-size 128 --train-iters 2 --lr 1e-4"
    (desk / "train_gpt.sh").write_text(f"torchrun pretrain_gpt.py {sizes} {batch}\n", encoding="utf-8")
