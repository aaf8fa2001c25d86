"""Counts of the collectives that torch sends in a step, independent of an engine's own names for them."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer_templates import Trainer
from tests.support.parity import Trained, trained

GATHER, REDUCE, SUM = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"  # from torch.ops.c10d


class Sent(TorchDispatchMode):
    """Counts the messages of this worker since the last step.

    Attributes:
        messages: number of messages by (name, workers that take part).
        gathered: elements that were gathered.
        types: types of the elements that were summed into shares.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self.messages: Counter[tuple[str, int]] = Counter()
        self.gathered = 0
        self.types: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in (GATHER, REDUCE, SUM):
            group = next(each for each in args if isinstance(each, torch.ScriptObject))
            self.messages[name, dist.ProcessGroup.unbox(group).size()] += 1
            self.gathered += args[0].numel() if name == GATHER else 0
            self.types |= {str(args[1].dtype).removeprefix("torch.")} if name == REDUCE else set()
        return func(*args, **kwargs or {})


def count_collectives(template: Trainer) -> tuple[Trained, list[tuple[Counter[tuple[str, int]], int, set[str]]]]:
    """Train a template. Return the run, and for the setup and each step: messages, gathered elements, types of sums."""
    sent, seen = Sent(), list[tuple[Counter[tuple[str, int]], int, set[str]]]()
    at_start, at_end = template.on_train_start, template.on_step_end

    def note() -> None:
        seen.append((sent.messages, sent.gathered, sent.types))
        sent.forget()

    def on_train_start() -> None:
        at_start()
        note()

    def on_step_end(step: int, result: Any) -> None:
        at_end(step, result)
        note()

    template.on_train_start, template.on_step_end = on_train_start, on_step_end  # type: ignore[method-assign]
    with sent:
        run = trained(template)
    return run, seen
