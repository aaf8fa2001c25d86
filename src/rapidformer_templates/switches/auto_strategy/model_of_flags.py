"""The model that a plan is about: built from the flags of a training command, or by another source."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rapidformer_templates.data.pretraining.masking import span_sizes
from rapidformer_templates.data.tasks.base import Task
from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.architectures import DECODER_TWINS, objective_of
from rapidformer_templates.models.loading import build_config, model_type_of, seq_length_of
from rapidformer_templates.models.model_files import load_tokenizer
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.data_rules import has_frozen_copy, rows_per_sample
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY, load_object
from rapidformer_templates.planning.tasks import TASKS
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.stand_ins import FakeDataReads, no_loss
from rapidformer_templates.switches.auto_strategy.step_seconds import CommunicationSizes
from rapidformer_templates.switches.auto_strategy.tracing import Batch, loss_of_model
from rapidformer_templates.switches.layout.declaration import AUTO_MEMORY
from rapidformer_templates.switches.mixture_of_experts.layer import Experts, Gate, own_experts, routers_of
from rapidformer_templates.system.workers import Workers

HEADS = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "seq2seq": "AutoModelForSeq2SeqLM"}
"""The head that each pretraining objective needs."""


class ModelSource(Protocol):
    """Builds the model of a plan, its batches and its loss.

    Attributes:
        tokens: tokens per sample.
    """

    tokens: int

    def build(self, blocks: int | None) -> nn.Module:
        """Build the model with ``blocks`` blocks in each stack, or with all of them.

        Raises:
            ModelError: it cannot be built.
        """

    def batch(self, samples: int) -> Batch:
        """Build a micro batch with the shapes of training."""

    def compute_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the mean loss of a batch."""


class Subject:
    """A model with its batches.

    Attributes:
        shapes: parameters of the model, and the memory of a micro batch.
        facts: sizes for the time model.
    """

    def __init__(
        self, config: RunConfig, plan: Plan | None = None, *, gpu: bool, source: ModelSource | None = None
    ) -> None:
        """Build the model with the switches of the plan that change its structure.

        Args:
            source: builds the model. The default is the model of the flags.

        Raises:
            ModelError: no model is named, or it cannot be built with these sizes.
        """
        source = source or FlagModel(config)
        planned = plan or Plan("Trainer")

        def build(blocks: int | None) -> Assembly:
            return with_switches(source.build(blocks).train(), config, planned)

        stage_sizes = config.get("pipeline_stages") if plan else None
        stages = [int(word) for word in stage_sizes.split(",")] if stage_sizes and stage_sizes != AUTO_MEMORY else None
        copied = has_frozen_copy(config, (REGISTRY[name] for name in planned.switches))
        self.shapes = ModelShapes(
            build, source.batch, gpu=gpu, stages=stages, has_copy=copied, compute_loss=source.compute_loss
        )
        self.facts = communication_sizes(self.shapes, source.tokens)

    @cached_property
    def experts(self) -> int:
        """Greatest common divisor of the numbers of experts in all blocks. 0 without experts."""
        whole = self.shapes.whole
        expert_counts = [len(experts.up) for experts in whole.modules() if isinstance(experts, Experts)]
        return math.gcd(*expert_counts, *(experts.num_experts for experts in own_experts(whole)))


def communication_sizes(shapes: ModelShapes, tokens: int) -> CommunicationSizes:
    """Return the sizes of a model that communication depends on.

    Args:
        tokens: tokens per sample.
    """
    gates = [module for module in shapes.whole.modules() if isinstance(module, Gate)]  # else the architecture's own
    return CommunicationSizes(
        parameters=sum(facts.count for facts in shapes.all_parameters.values()),
        blocks=sum(shapes.depths.values()),
        hidden=shapes.width,
        tokens=tokens,
        experts=sum(facts.count for facts in shapes.all_parameters.values() if facts.is_expert),
        visits=sum(gate.top_k for gate in gates or routers_of(shapes.whole)),
    )


class FlagModel:
    """The model and the batches that a training command's flags describe."""

    def __init__(self, config: RunConfig) -> None:
        """Read the configuration of the model.

        Raises:
            ModelError: no model is named.
        """
        self._config = config
        self._kind = model_type_of(config)
        task = config.training.task
        self._auto_class: str = (
            HEADS[objective_of(self._kind)]
            if task in (None, "pretraining")
            else load_object(TASKS[task].implementation).auto_class
        )
        self._model_config = build_config(config, self._auto_class, _tokenizer(config))
        self.tokens = seq_length_of(config, self._model_config)

    def build(self, blocks: int | None) -> nn.Module:
        model_config = self._model_config if blocks is None else _shortened(self._model_config, blocks)
        try:
            model: Any = getattr(transformers, self._auto_class).from_config(model_config, dtype=torch.float32)
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise ModelError(f"a {self._kind} of these sizes cannot be built: {error}", where="--model-type") from error
        if getattr(model, "loss_type", "") is None and self._auto_class == HEADS["causal"]:
            model.loss_type = "ForCausalLM"
        built: nn.Module = model
        return built

    def batch(self, samples: int) -> Mapping[str, torch.Tensor]:
        """Return a micro batch with the shapes of the task's own collate function."""
        task, data = self._config.training.task, self._config.data
        if task not in (None, "pretraining"):
            kind: type[Task] = load_object(TASKS[task].implementation)
            return kind.planned_batch(samples * rows_per_sample(self._config), self.tokens)
        rows = torch.zeros((samples, self.tokens), dtype=torch.long)
        if self._auto_class == HEADS["causal"]:
            return {"input_ids": rows, "labels": rows, "shift_labels": rows}
        if self._auto_class == HEADS["seq2seq"]:
            sizes = span_sizes(self.tokens, data.mask_prob, data.mean_span_length)
            return {"input_ids": rows, "labels": torch.zeros((samples, sizes.labels), dtype=torch.long)}
        padded = {"attention_mask": torch.ones_like(rows)} if data.short_seq_prob > 0 else {}
        return {"input_ids": rows, "labels": rows, **padded}

    def compute_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return loss_of_model(model, batch)


def with_switches(model: nn.Module, config: RunConfig, plan: Plan) -> Assembly:
    """Apply the transforms of all switches in the plan whose effect the planner traces, to a model without data.

    Raises:
        ModelError: a switch cannot act on this model.
    """
    assembly, alone = Assembly(model), Workers(0, 0, 1, torch.device("cpu"))
    for switch in (REGISTRY[name] for name in plan.switches):
        if switch.predicts.traced and switch.transform:
            options = config.switches[switch.name]
            building = Building(options, plan, alone, no_loss, has_values=False)
            with FakeDataReads(dense=True):
                load_object(switch.transform)(assembly, building)
    return assembly


def fp8_layers(subject: Subject, config: RunConfig, plan: Plan) -> dict[str, int]:
    """Return the numbers of linear layers in the blocks: those in ``fp8``, and the others by reason.

    Raises:
        ModelError: no layer can multiply in fp8.
    """
    from rapidformer_templates.switches.fp8 import declaration, transform  # needs torchao

    with torch.device("meta"):
        assembly = subject.shapes.build(None)
    building = Building(
        config.switches[declaration.NAME], plan, Workers(0, 0, 1, torch.device("cpu")), no_loss, has_values=False
    )
    transform.multiply_in_fp8(assembly, building)
    layers = assembly.find(transform.Fp8Layers)
    return {"fp8": layers.converted, **layers.left_out} if layers else {}


class _OwnVocabulary:
    """Placeholder if no tokenizer is named. The vocabulary comes from the architecture's default configuration."""

    def __init__(self, default: PreTrainedConfig) -> None:
        self._size = int(default.vocab_size)
        self.pad_token_id, self.eos_token_id = 0, getattr(default, "eos_token_id", None)
        self.bos_token_id = getattr(default, "bos_token_id", None)
        self.cls_token_id = self.sep_token_id = 0

    def get_vocab(self) -> dict[str, int]:
        return {"": self._size - 1}


def _tokenizer(config: RunConfig) -> Any:
    named = (config.data.tokenizer_type, config.data.tokenizer_path, config.model.pretrained_model_name_or_path)
    kind = str(config.model.model_type)
    if any(named) or kind not in CONFIG_MAPPING:  # an unknown architecture is refused later, with similar names
        return load_tokenizer(config) if any(named[:2]) else None
    return _OwnVocabulary(CONFIG_MAPPING[kind]())


def _shortened(model_config: PreTrainedConfig, blocks: int) -> PreTrainedConfig:
    """Return the configuration of a model with ``blocks`` blocks per stack. Its other sizes are the same."""
    shorter = copy.deepcopy(model_config)
    before = model_config.num_hidden_layers
    shorter.num_hidden_layers = blocks
    for twin in DECODER_TWINS["num_layers"]:
        if hasattr(shorter, twin):
            setattr(shorter, twin, blocks)
    for name, value in vars(model_config).items():
        if isinstance(value, list) and len(value) == before:  # one entry per block, such as ``layer_types``
            setattr(shorter, name, value[:blocks])
    return shorter
