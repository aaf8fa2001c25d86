"""The exported model: a folder that transformers' ``from_pretrained`` loads, from a running engine or a checkpoint.

The run folder contains everything in such a folder except the weights from the first step on (``model/``). So a
checkpoint can be exported without the data that defines the labels, and without the script that built the model.
"""

from __future__ import annotations

import copy
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.optimizer_state import average_of
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.loading import class_of, mark_folder, modules_of_changed_models, read_config_of
from rapidformer_templates.models.weight_files import save_model, save_weights
from rapidformer_templates.planning.request import config_file
from rapidformer_templates.run.checkpoint.format import Reader
from rapidformer_templates.run.push_to_hub import write_card
from rapidformer_templates.run.run import Run
from rapidformer_templates.run.saved_model import DESCRIPTION
from rapidformer_templates.run.scripts import overridden_hooks
from rapidformer_templates.system.files import new_folder, write_json
from rapidformer_templates.system.process_state import freed_memory_given_back
from rapidformer_templates.system.tensor_files import TensorFiles


@contextmanager
def exported_weights(engine: Engine) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield an iterator over the weights that a run exports, see :meth:`Engine.whole_weights`. Call it on every rank.

    All ranks send their parts, even if rank 0 cannot write them. Freed memory is given back meanwhile. Otherwise the
    allocator would keep it, because values that stay lie between the gathered tensors.
    """
    with engine.averaged(), freed_memory_given_back():
        weights = engine.whole_weights()
        try:
            yield weights
        finally:
            deque(weights, maxlen=0)


def export_model(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    write_more: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Write weights, config and tokenizer, and what else belongs to them. Call it on every rank. Rank 0 writes.

    Rank 0 gathers one tensor at a time and stores it in a temporary file in the same place. A model that is not from
    transformers is exported only as ``model.safetensors``, or shards with an index.
    """
    with exported_weights(engine) as weights:
        if engine.workers.is_main:
            with new_folder(folder) as temporary, TensorFiles(temporary) as files:
                stored = {name: files.store(tensor) for name, tensor in weights}  # one at a time
                _write(engine.assembly, stored, files, temporary)
                if tokenizer is not None:
                    tokenizer.save_pretrained(temporary)
                write_more(temporary)


def describe_model(run: Run, folder: Path) -> None:
    """Write everything in an export except the weights, and the decisions of the data."""
    assembly, tokenizer = run.engine.assembly, run.hooks.tokenizer
    model = assembly.model
    with new_folder(folder) as temporary:
        writer = _writer_of(assembly)
        if writer:
            writer.describe(assembly, temporary)
        elif isinstance(model, PreTrainedModel):
            config = _config_of(model)
            config.architectures = [class_of(model).__name__]
            config.save_pretrained(temporary)
            _write_generation_config(model, temporary)
            mark_folder(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        write_card(run.config, run.plan, temporary)  # an export of a checkpoint has it, too
        decisions = run.task.decisions() if run.task else {}
        write_json(temporary / DESCRIPTION, {"hooks": overridden_hooks(type(run.hooks)), "decisions": decisions})


class ExportedWeights:
    """Reads the weights of a checkpoint that its export has: the averages, if the run keeps any.

    Args:
        checkpoint: folder of a checkpoint that any engine has written.
        averages: whether the run keeps averages of its weights.
    """

    def __init__(self, checkpoint: Path, *, averages: bool) -> None:
        self.reader, self._averages = Reader(checkpoint), averages

    def names(self, kind: str) -> dict[str, tuple[int, ...]]:
        return self.reader.names("weights") if kind == "weights" else {}

    def read(self, kind: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return self.reader.read(*self.source(name), offset, shape)

    def source(self, name: str) -> tuple[str, str]:
        """Return the kind and the name in the checkpoint of a weight."""
        average = average_of(name) if self._averages else ""
        return ("optimizer", average) if average in self.reader.names("optimizer") else ("weights", name)


def export_checkpoint(checkpoint: Path, described: Path, folder: Path, *, averages: bool) -> None:
    """Write what the run would have exported at a checkpoint. Any engine may have written it.

    Args:
        described: the folder that :func:`describe_model` has written.
        averages: whether the run keeps averages of its weights, which it exports.

    Raises:
        CheckpointError: a file cannot be read.
        ModelError: the model has adapters, and its class is not from transformers.
    """
    exported = ExportedWeights(checkpoint, averages=averages)
    reader = exported.reader
    with new_folder(folder) as temporary, TensorFiles(temporary) as files:
        assembly = _skeleton(described)
        # Copies the tokenizer. Files that belong to the weights are overwritten with them.
        shutil.copytree(described, temporary, ignore=shutil.ignore_patterns(DESCRIPTION), dirs_exist_ok=True)
        # A tensor that the checkpoint has in one piece stays in the file of the checkpoint. Others are put together.
        weights = {}
        for name, shape in reader.names("weights").items():
            source = exported.source(name)
            mapped = reader.mapped(*source) if 0 not in shape else None  # empty tensors of a file look like tied ones
            if mapped is None:
                weights[name] = files.store(reader.read(*source, (0,) * len(shape), shape))
            else:
                weights[name] = files.add_mapped(mapped)
        if assembly is not None:
            _write(assembly, weights, files, temporary)
        else:
            save_weights(weights, temporary, metadata={"format": "pt"})


def _skeleton(described: Path) -> Assembly | None:
    """Build the described model without memory. None if it is not from transformers."""
    if not config_file(described).is_file():
        return None
    config = read_config_of(described)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    restoring = (module for module in modules_of_changed_models() if hasattr(module, "restore"))
    restore = next((module.restore for module in restoring if module.is_marked(described)), None)
    if kind is None:
        if restore:
            name = (config.architectures or ["for this model"])[0]
            message = f"transformers has no class {name}, so its adapters cannot be exported from here"
            hint = "finish the run with --resume: it exports its adapters"
            raise ModelError(message, where=str(config_file(described)), hint=hint)
        return None
    model = _empty(kind, config)
    if (described / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(described)
    return restore(model, described) if restore else Assembly(model)


def _write(assembly: Assembly, weights: dict[str, torch.Tensor], files: TensorFiles, folder: Path) -> None:
    """Write a model whose weights are in mapped files."""
    writer = _writer_of(assembly)
    if writer:
        writer.write(assembly, weights, folder)
    elif isinstance(assembly.model, PreTrainedModel):
        # An empty model of the original class saves in the format that transformers expects.
        skeleton = _empty(class_of(assembly.model), _config_of(assembly.model))
        save_model(skeleton, folder, files, weights)
        _write_generation_config(assembly.model, folder)
    else:
        save_weights(weights, folder)


def _writer_of(assembly: Assembly) -> ModuleType | None:
    writing = (module for module in modules_of_changed_models() if hasattr(module, "writes"))
    return next((module for module in writing if module.writes(assembly)), None)


def _config_of(model: PreTrainedModel) -> PreTrainedConfig:
    config: PreTrainedConfig = copy.deepcopy(model.config)
    if hasattr(config, "use_cache"):
        config.use_cache = True  # only training turns it off
    return config


def _empty(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = kind(config)
    return model


def _write_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the config directly. transformers refuses to save some settings that pretrained models have."""
    if model.can_generate():
        model.generation_config.to_json_file(folder / "generation_config.json")
