"""The ``Finetuner``: trains pretrained weights by epochs, evaluates after each, and keeps the best checkpoint."""

from __future__ import annotations

from rapidformer_templates.trainer import Trainer


class Finetuner(Trainer):
    """The template for fine-tuning.

    The defaults of a fine-tuning task apply: batches hold samples of similar lengths, and the checkpoint with the best
    metric is exported. They follow from the task, so that they are the same in every template. It shards model states
    with FSDP, OSS or SDP. ZeRO and 3D parallelism need :class:`Trainer`.
    """
