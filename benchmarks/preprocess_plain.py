"""A preprocessing script in the style of Megatron, which ``benchmarks preprocess`` runs as a peer.

A pool of processes takes the JSON lines one after the other and calls transformers' tokenizer once for each. The lists
of tokens go one by one into megatron-core's builder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import warnings
from typing import Any

import numpy as np

LINES = 25
"""Lines that a process takes at a time, as in the first published version of Megatron-LM's script."""

_process: dict[str, Any] = {}


def _start(vocab: str, merges: str) -> None:
    from transformers import GPT2Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _process["tokenizer"] = GPT2Tokenizer(vocab=vocab, merges=merges)


def _encode(line: str) -> list[int]:
    tokenizer = _process["tokenizer"]
    ids: list[int] = tokenizer(json.loads(line)["text"])["input_ids"]
    return [*ids, tokenizer.eos_token_id] if ids else ids


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokenize JSON lines in the plain way.")
    for name in ("input", "output-prefix", "vocab-file", "merge-file"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{options.output_prefix}.bin", dtype=np.uint16)
    names = (options.vocab_file, options.merge_file)
    with open(options.input, encoding="utf-8") as file, multiprocessing.Pool(options.workers, _start, names) as pool:
        for ids in pool.imap(_encode, file, LINES):
            if ids:
                builder.add_document(ids, [len(ids)])
    builder.finalize(f"{options.output_prefix}.idx")
    return 0


if __name__ == "__main__":
    sys.exit(main())
