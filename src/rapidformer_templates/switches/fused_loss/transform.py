"""The transform of ``--fused-linear-cross-entropy``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import nn

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.fused_loss.logits import SWITCH_FLAG, FusedHead


def fuse_loss(assembly: Assembly, building: Building) -> None:
    """Make the layer that scores the words compute the loss. Its parameters keep their names.

    In a pipeline, only the last stage changes.

    Raises:
        ModelError: the model has no such layer, or it is not a plain ``torch.nn.Linear``.
    """
    if not building.workers.ends_pipeline:
        return
    model = assembly.model
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    if type(head) is not nn.Linear:
        what = "none" if head is None else f"a {type(head).__name__}"
        raise ModelError(
            f"the fused loss needs a torch.nn.Linear that scores the words, and {type(model).__name__} has {what}",
            where=SWITCH_FLAG,
            hint=f"leave {SWITCH_FLAG} out; in your own model, let get_output_embeddings() return that layer",
        )
    head.__class__ = FusedHead
    fused: Any = head
    on_gpu = building.workers.device.type == "cuda"
    fused.kernel = "liger" if on_gpu and find_spec("liger_kernel") else "torch"
    fused.used, fused.rows, fused.columns = set(), 0, 0
