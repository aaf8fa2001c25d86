"""White-box pretraining: a small GPT learns to write Python from Python's standard library.

    python examples/pretrain_gpt.py
    python examples/pretrain_gpt.py --model-type llama --train-iters 300 --save runs/llama

The script reads the standard library of the Python that runs it, trains a byte-level BPE tokenizer on these sources,
and starts from random weights. It takes every flag of the black box, and those of ``CorpusFlags``.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from rapidformer_templates import Data, Pretrainer, flag

END = "<|endoftext|>"


@dataclass(frozen=True)
class CorpusFlags:
    """Corpus"""

    vocab_size: int = flag(2048, "tokens of the tokenizer that is trained on the corpus", minimum=300)
    max_files: int = flag(100, "use the first N files of the library", metavar="N", minimum=2)


class PythonGPT(Pretrainer):
    """Pretrain a language model on Python's own library."""

    Flags = CorpusFlags
    uses_task = True  # the data have the same form as the task's, so its predictions and metrics fit

    def build_data(self) -> Data:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[: self.flags.max_files]
        texts = [file.read_text(encoding="utf-8", errors="replace") + END for file in files]
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(texts, self.flags.vocab_size, special_tokens=[END], show_progress=False)
        own = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END, pad_token=END)
        self.tokenizer = self.task.tokenizer = own  # for export/, and for the size of the model's vocabulary
        tokens = np.concatenate([encoding.ids for encoding in bpe.encode_batch(texts)])
        length = self.task.seq_length
        windows = tokens[: len(tokens) // length * length].reshape(-1, length)
        held_out = max(1, len(windows) // 20)
        return Data(train=list(windows[:-held_out]), valid=list(windows[-held_out:]), collate=self.collate)

    @staticmethod
    def collate(samples: list[np.ndarray]) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(np.stack(samples))
        return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    sizes = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 128, "micro_batch_size": 8}
    PythonGPT.main(model_type="gpt2", **sizes, train_iters=300, lr=2e-3, lr_warmup_iters=20, log_interval=10)
