"""Exported models that tests load and use in this process."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rapidformer_templates.data.tasks import Task
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.run.saved_model import find_saved, load_saved_task


@dataclass(frozen=True)
class OpenedModel:
    """A saved model in memory.

    Attributes:
        task: the task, with the labels of the model.
        model: the model in evaluation mode, in float32 on the CPU.
    """

    config: RunConfig
    task: Task
    model: PreTrainedModel

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the model."""
        return self.task.tokenizer


def open_saved(path: str | Path, task: str | None = None, *, base: str | Path | None = None) -> OpenedModel:
    """Load the model of a run folder or of a transformers folder.

    Args:
        path: the folder.
        task: the task, if the run or the folder does not specify it or if you want another one.
        base: folder of the base of adapters, if it is not where the adapters say.

    Raises:
        RapidformerError: the folder does not exist or cannot be read.
    """
    saved = find_saved(path)
    config = saved.config(task=task, base=str(base) if base is not None else None)
    used = load_saved_task(config, saved)
    return OpenedModel(config, used, used.build_model().eval())
