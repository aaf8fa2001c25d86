"""The ``Pretrainer``: language modelling by iterations, from scratch or from given weights."""

from __future__ import annotations

from rapidformer_templates.trainer import Trainer


class Pretrainer(Trainer):
    """The template for pretraining. Its default task is ``--task pretraining``.

    The defaults of its flags are in :func:`~rapidformer_templates.planning.resolve.with_template_defaults`. It shards
    model states with FSDP, OSS or SDP. ZeRO and 3D parallelism need :class:`Trainer`.
    """
