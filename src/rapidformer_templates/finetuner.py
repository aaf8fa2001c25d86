"""Finetuner: pretrained weights, epochs, an evaluation after each, and the best one kept."""

from __future__ import annotations

from rapidformer_templates.trainer import Trainer


class Finetuner(Trainer):
    """The template for fine-tuning.

    Its flags' defaults stand in :data:`rapidformer_templates.planning.templates.TEMPLATE_DEFAULTS`: batches of
    like lengths, and the checkpoint with the best metric is the one that is exported. Model-state
    partitioning is by FSDP, OSS or SDP; ZeRO and 3D parallelism need :class:`Trainer`.
    """
