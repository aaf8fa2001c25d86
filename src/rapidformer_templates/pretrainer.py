"""Pretrainer: language modelling by iterations, from scratch or from given weights."""

from __future__ import annotations

from rapidformer_templates.trainer import Trainer


class Pretrainer(Trainer):
    """The template for pretraining; ``--task pretraining`` is its default task.

    Its flags' defaults stand in :data:`rapidformer_templates.planning.templates.TEMPLATE_DEFAULTS`. Model-state
    partitioning is by FSDP, OSS or SDP; ZeRO and 3D parallelism need :class:`Trainer`.
    """
