"""Builds models from a pretrained folder, or from scratch by architecture and sizes."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from rapidformer_templates.errors import ModelError, counted, is_out_of_memory
from rapidformer_templates.models import architectures, model_files
from rapidformer_templates.models.adapters import SETTINGS, set_new_modules
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flags import ModelFlags
from rapidformer_templates.planning.hub import PRETRAINED, Part, model_folder, reason
from rapidformer_templates.planning.registry import REGISTRY

WITHOUT_NEW_HEAD = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
"""Auto classes whose heads a task uses as they were trained before."""

NUMBER = re.compile(r"\.\d+\.")
"""The number of a block or an expert in the name of a weight."""


def model_type_of(config: RunConfig) -> str:
    """Return the architecture of the run, from the pretrained folder or ``--model-type``."""
    if config.model.pretrained_model_name_or_path:
        return _pretrained_config(config).model_type
    if config.model.model_type is None:
        raise model_files.no_model_error()
    return config.model.model_type


def check_seq_length(config: RunConfig, model_config: PreTrainedConfig) -> None:
    """Raise a :class:`ModelError` if ``--seq-length`` is greater than the model's number of positions."""
    requested, positions = config.model.seq_length, architectures.positions_of(model_config)
    if requested is not None and positions is not None and requested > positions:
        hint = f"use --seq-length {positions} or less"
        if config.model.model_type:
            hint += f", or --max-position-embeddings {requested}"
        message = f"sequences of {requested} tokens do not fit the model's {positions} positions"
        raise ModelError(message, where="--seq-length", hint=hint)


def seq_length_of(config: RunConfig, model_config: PreTrainedConfig) -> int:
    """Return ``--seq-length``, else the model's positions, else 512 (relative positions: T5's pretraining length)."""
    check_seq_length(config, model_config)
    return config.model.seq_length or architectures.positions_of(model_config) or 512


def build_config(
    config: RunConfig, auto_class: str, tokenizer: PreTrainedTokenizerFast | None = None, **overrides: object
) -> PreTrainedConfig:
    """Return the configuration of the model that :func:`build_model` makes, for training (without a cache).

    Raises:
        ModelError: no model is named, the folder or the architecture does not exist, it has no head for ``auto_class``,
            or a size flag does not fit it.
    """
    base, folder = config.model.base, Path(config.model.pretrained_model_name_or_path or "")
    if base is not None and not (folder / SETTINGS).is_file():
        hint = f"leave out --base; {PRETRAINED} names the model to start from"
        raise ModelError("there are no adapters that need a base", where="--base", hint=hint)
    if base is not None and not (Path(base) / "config.json").is_file():
        hint = "name the folder that holds the base model"
        raise ModelError(f"there is no config.json in {base}", where="--base", hint=hint)
    if config.model.pretrained_model_name_or_path:
        model_config = _pretrained_config(config)
        if config.model.dropout is not None:
            overrides = {**architectures.dropout_rates(model_config, config.model.dropout), **overrides}
    elif config.model.model_type:
        model_config = architectures.scratch_config(config, auto_class, tokenizer or model_files.load_tokenizer(config))
    else:
        raise model_files.no_model_error()
    architectures.check_head(model_config, auto_class)
    is_masked = architectures.objective_of(model_config.model_type) == "masked"
    encodes = is_masked or not getattr(model_config, "is_decoder", True)
    if auto_class == "AutoModelForCausalLM" and encodes and not model_config.is_encoder_decoder:
        overrides["is_decoder"] = True  # otherwise an encoder would see the tokens that it must predict
    if auto_class == architectures.SEQUENCE_CLASSIFICATION and model_config.pad_token_id is None:
        # A decoder classifies at the last token before the padding.
        overrides["pad_token_id"] = (tokenizer or model_files.load_tokenizer(config)).pad_token_id
    model_config.use_cache = False
    for name, value in overrides.items():
        setattr(model_config, name, value)
    check_seq_length(config, model_config)
    return model_config


def build_model(
    config: RunConfig, auto_class: str, tokenizer: PreTrainedTokenizerFast | None = None, **overrides: object
) -> PreTrainedModel:
    """Build the model that the flags ask for, in float32 on the CPU.

    From scratch, sizes that are not given have the architecture's defaults. Feed-forward layers keep their default
    ratio to the hidden size (four for gpt2, bert and t5), in multiples of 8. The vocabulary is padded to a multiple of
    128. Without ``--max-position-embeddings`` there are at least ``--seq-length`` positions. The caller seeds torch.

    Args:
        config: the run. ``--pretrained-model-name-or-path`` or ``--model-type`` chooses the model.
        auto_class: name of the transformers auto class for the task, such as ``AutoModelForCausalLM``.
        tokenizer: gives the vocabulary size and the special tokens. The default is the tokenizer of the run.
        overrides: attributes of the model's configuration, such as ``num_labels``.

    Raises:
        ModelError: see :func:`build_config`. Also if the folder has no weights or weights of other shapes, or if the
            model has fewer tokens than the tokenizer.
    """
    model_config = build_config(config, auto_class, tokenizer, **overrides)
    tokenizer = tokenizer or model_files.load_tokenizer(config)
    path = config.model.pretrained_model_name_or_path
    if path:
        left_out = _head_to_leave_out(config, auto_class, model_config)
        model = _load_weights(auto_class, path, model_config, config.model, left_out)
    else:
        try:
            model = getattr(transformers, auto_class).from_config(model_config).float()
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            hint = "check the sizes against the architecture's own"
            message = f"a {model_config.model_type} of these sizes cannot be built: {error}"
            raise ModelError(message, where="--model-type", hint=hint) from error
    if getattr(model, "loss_type", "") is None and auto_class == "AutoModelForCausalLM":
        # Transformers derives the loss from the class name, which does not work for GPT2LMHeadModel. Without this line
        # it warns at every start that it uses this loss.
        model.loss_type = "ForCausalLM"
    embeddings: Any = model.get_input_embeddings()
    size = model_files.vocabulary_size(tokenizer)
    if size > embeddings.num_embeddings:
        message = f"the tokenizer has {size} tokens, the model only {embeddings.num_embeddings}"
        raise ModelError(message, where=path, hint="use the model's own tokenizer")
    if config.model.seq_length:
        architectures.choose_frequencies(model, config.model.seq_length)
    return model


def _pretrained_config(config: RunConfig) -> PreTrainedConfig:
    flags = config.model
    path = str(flags.pretrained_model_name_or_path)
    folder = folder_of_model(flags, "config")
    model_files.check_config_file(folder)
    pretrained = read_config_of(folder, trust_remote_code=flags.trust_remote_code)
    fixed = {"model_type": "model_type", **architectures.SIZE_FLAGS}  # flags that cannot change the model
    for flag, attribute in fixed.items():
        requested, actual = getattr(flags, flag), getattr(pretrained, attribute, None)
        if flag == "max_position_embeddings":
            actual = architectures.positions_of(pretrained)
        if requested is not None and requested != actual:
            message = f"the pretrained model's {attribute} is {actual}, not {requested}"
            hint = f"leave out {spelling(flag)}, or leave out {PRETRAINED} to start from scratch"
            raise ModelError(message, where=spelling(flag), hint=hint)
    if flags.new_head and not architectures.has_head_of(pretrained, *architectures.CLASSIFICATION):
        hint = "leave out --new-head: the model gets a new head without it"
        raise ModelError(f"{path} has no head for labels that could be replaced", where="--new-head", hint=hint)
    return pretrained


def folder_of_model(flags: ModelFlags, part: Part = "weights") -> Path:
    """Return the folder of the pretrained model. A model on the hub is downloaded if it is not in the cache.

    Args:
        part: how much of the model is needed. Its own code comes with any part, if it may run.

    Raises:
        ModelError: there is no such folder, and the model cannot be downloaded.
    """
    name, code = str(flags.pretrained_model_name_or_path), flags.trust_remote_code
    part = "tokenizer" if code and part == "config" else part
    return model_folder(name, flags.revision, part, flag=PRETRAINED, code=code)


def read_config_of(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read the configuration of a folder, including models that a switch has changed.

    Raises:
        ModelError: it cannot be used.
    """
    with model_files.explain_config_errors(folder):
        reader = own_reader(folder)
        if reader:
            return reader.read_config(folder)
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    return config


class LoadingInfo(TypedDict):
    """The report of transformers on loaded weights: names that the files lack, (name, shape in the file, shape) of
    weights of other shapes, and names that the model lacks.
    """

    missing_keys: set[str]
    mismatched_keys: set[tuple[str, torch.Size, torch.Size]]
    unexpected_keys: set[str]


class ModelFactory(Protocol):
    """An auto class of transformers. ``from_pretrained`` is called with ``output_loading_info``."""

    def from_config(self, config: PreTrainedConfig) -> PreTrainedModel: ...
    def from_pretrained(self, folder: Path, **options: object) -> tuple[PreTrainedModel, LoadingInfo]: ...


class _Reader(Protocol):
    """A module that reads the folders of models that a switch has changed."""

    def is_marked(self, folder: Path) -> bool: ...
    def read_config(self, folder: Path) -> PreTrainedConfig: ...
    def read_model(
        self, factory: ModelFactory, folder: Path, config: PreTrainedConfig, *, base_folder: str | None = None
    ) -> tuple[PreTrainedModel, LoadingInfo]: ...


def modules_of_changed_models() -> list[Any]:
    """Return the modules of switches that write, mark or read models that transformers does not know."""
    return [import_module(switch.exported) for switch in REGISTRY.switches if switch.exported]


def own_reader(folder: Path) -> _Reader | None:
    """Return the reader of a folder that ``from_pretrained`` cannot load, or None for other folders."""
    return next((reader for reader in modules_of_changed_models() if reader.is_marked(folder)), None)


def mark_folder(folder: Path) -> None:
    """Mark a saved folder if transformers would build another model from it."""
    for module in modules_of_changed_models():
        if hasattr(module, "mark"):
            module.mark(folder)


def rebuild_layers(model: PreTrainedModel) -> None:
    """Put the layers into a model that its configuration describes and that transformers does not know."""
    for module in modules_of_changed_models():
        if hasattr(module, "rebuild"):
            module.rebuild(model)


def _head_to_leave_out(config: RunConfig, auto_class: str, model_config: PreTrainedConfig) -> list[str]:
    """Return modules of a pretrained label head that cannot be used: of another kind or size, or unwanted."""
    if auto_class not in architectures.CLASSIFICATION:
        return []
    pretrained = _pretrained_config(config)
    if not architectures.has_head_of(pretrained, *architectures.CLASSIFICATION):
        return []
    fits = architectures.has_head_of(pretrained, auto_class) and pretrained.num_labels == model_config.num_labels
    if fits and not config.model.new_head:
        return []
    with torch.device("meta"):
        model = getattr(transformers, auto_class).from_config(model_config)
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]


def read_weights(
    factory: ModelFactory, folder: Path, config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, LoadingInfo]:
    """Read a folder of transformers in fp32. Weights of other shapes are left out, and reported.

    Weights in the formats of ``DEQUANTIZED`` are dequantized. Otherwise transformers would keep them quantized where
    the machine has a kernel for it.
    """
    quantization = model_files.quantization_of(folder)
    if quantization.get("quant_method") in model_files.DEQUANTIZED:
        config.quantization_config = {**quantization, "dequantize": True}
    return factory.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )


def _load_weights(
    auto_class: str, path: str, model_config: PreTrainedConfig, flags: ModelFlags, left_out: list[str]
) -> PreTrainedModel:
    folder, code = folder_of_model(flags), flags.trust_remote_code
    model_files.check_weight_files(folder)
    factory: ModelFactory = getattr(transformers, auto_class)
    reader, random_state = own_reader(folder), torch.get_rng_state()
    if reader and left_out:
        hint = "write plain weights first, with rapidformer export, or start from a model without a head"
        raise ModelError(f"{path} cannot be read without its head", where=PRETRAINED, hint=hint)
    try:
        with quiet_transformers():
            model, info = (
                reader.read_model(factory, folder, model_config, base_folder=flags.base)
                if reader
                else read_weights(factory, folder, model_config, trust_remote_code=code)
            )
    except ModelError:
        raise
    except Exception as error:  # for a damaged file safetensors, torch and transformers each raise different errors
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"the weights in {path} cannot be read: {reason(error)}",
            where=PRETRAINED,
            hint="install what its format needs, or name the model that it was made from"
            if model_files.quantization_of(folder)
            else "download the folder again",
        ) from error
    of_head = {name for name in model.state_dict() if name.partition(".")[0] in left_out}
    differing = info["missing_keys"] | info["unexpected_keys"]
    declared = _declared_weights(read_config_of(folder, trust_remote_code=code), model) if differing else frozenset()
    _check_weights(model, info, path, auto_class, declared, of_head)
    if not Path(path).is_dir():
        model.name_or_path = model.config.name_or_path = path  # adapters record it as their base
    new = info["missing_keys"] | of_head
    _draw(new, model, random_state)
    set_new_modules(model, new)
    return model


def _bare(name: str, model: PreTrainedModel) -> str:
    """Return the name that a weight has in the architecture's model without a head."""
    return name.removeprefix(f"{model.base_model_prefix}.")


def _declared_weights(config: PreTrainedConfig, model: PreTrainedModel) -> frozenset[str]:
    """Return the weights that a folder must have by the class in its ``config.json``. Empty for an unknown class."""
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None or not isinstance(config, kind.config_class):  # its code is in the folder
        return frozenset()
    with torch.device("meta"):
        return frozenset(_bare(name, model) for name in kind(config).state_dict())


def _check_weights(
    model: PreTrainedModel,
    info: LoadingInfo,
    path: str,
    auto_class: str,
    declared: Collection[str],
    of_head: Collection[str],
) -> None:
    """Check that a folder has the weights that its ``config.json`` and the task require.

    Args:
        declared: from :func:`_declared_weights`.
        of_head: the weights of a head that is replaced by a new one.

    Raises:
        ModelError: they disagree, or the task needs a head that the folder lacks.
    """
    prefix, again = f"{model.base_model_prefix}.", "correct its config.json, or download the folder again"
    for name, names, needed in sorted(info["mismatched_keys"]):
        if name in of_head:
            continue
        message = f"the weight {name} is of shape {tuple(names)} in {path} and {tuple(needed)} in the model"
        is_of_labels = auto_class in architectures.CLASSIFICATION and not name.startswith(prefix)
        of_labels = "the head was trained for other labels or sizes; remove it, or start from the base model"
        raise ModelError(message, where=PRETRAINED, hint=of_labels if is_of_labels else again)
    missing = sorted(info["missing_keys"])
    if len(missing) == len(model.state_dict()):
        raise _foreign_weights_error(model, path, sorted(info["unexpected_keys"]))
    # Fine-tuning may need a new head. A model can be saved without a pooler, and its class does not say so.
    of_model = [name for name in missing if "pooler" not in name and name not in of_head]
    body = {name for name in of_model if name.startswith(prefix)}
    damaged = [name for name in of_model if name in body or _bare(name, model) in declared]
    if damaged:
        message = f"{path} lacks {counted(len(damaged), 'weight')}, such as {damaged[0]}"
        shared = "set tie_word_embeddings to true in its config.json if the embeddings have this weight, or "
        raise ModelError(message, where=PRETRAINED, hint=again if damaged[0] in body else shared + again)
    if missing and auto_class in WITHOUT_NEW_HEAD:
        message = f"{path} has no head for words: {missing[0]} is missing"
        hint = f"it would begin with random values: start from the whole model, a {type(model).__name__}"
        raise ModelError(message, where=PRETRAINED, hint=hint)
    strangers = sorted(name for name in info["unexpected_keys"] if _is_stranger(name, model, declared))
    if strangers:
        message = f"the model of its config.json has no place for {len(strangers)} weights in {path}: {strangers[0]} …"
        raise ModelError(message, where=PRETRAINED, hint=again)
    untied = model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys()
    if untied:
        message = f"the config.json of {path} ties {min(untied)} to another weight, but they differ"
        raise ModelError(message, where=PRETRAINED, hint="set tie_word_embeddings to false there")


def _is_stranger(name: str, model: PreTrainedModel, declared: Collection[str]) -> bool:
    """Return whether a weight in the files belongs into a block, but the model has no place for it.

    It is of one more block, or a bias or a layer that the blocks lack. Former versions of transformers also saved
    masks and frequencies in blocks. They are not missed.
    """
    if not NUMBER.search(name) or _bare(name, model) in declared:
        return False
    owner, _, end = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        alike = NUMBER.sub(".N.", name)
        return end == "weight" or any(alike == NUMBER.sub(".N.", own) for own, _ in model.named_parameters())
    return getattr(module, end, module) is None


def _foreign_weights_error(model: PreTrainedModel, path: str, names: Sequence[str]) -> ModelError:
    """Return the error for files without any weight of the model. ``names`` are the files' own."""
    hint = "check the folder's config.json"
    own = set(model.state_dict())
    parts = ((name.split(".")[:i], ".".join(name.split(".")[i:])) for name in names for i in range(1, 4))
    prefix = next((".".join(before) for before, rest in parts if rest in own), None)
    if prefix:
        hint = f"a wrapper has put '{prefix}.' before the names: save the model inside of it, or remove this"
    elif "state_dict" in names:
        hint = "this is a checkpoint of a trainer: save only the weights of the model that are in its 'state_dict'"
    shown = f"; they are named {', '.join(names[:3])}{' …' if names[3:] else ''}" if names else ""
    return ModelError(f"no weight in {path} belongs to a {type(model).__name__}{shown}", where=PRETRAINED, hint=hint)


def _draw(names: set[str], model: PreTrainedModel, random_state: torch.Tensor) -> None:
    """Initialize new parameters of a pretrained model, and those of a head that is left out.

    Args:
        names: names of the new parameters.
        random_state: torch's random state before the model was built.
    """
    if not names:
        return
    owners = {name.rpartition(".")[0] for name in names}
    for prefix, module in model.named_modules():
        module._is_hf_initialized = prefix not in owners  # transformers' mark for weights that came from a file
        for name, parameter in module.named_parameters(recurse=False) if prefix in owners else ():
            parameter._is_hf_initialized = f"{prefix}.{name}".lstrip(".") not in names
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random_state)
        model.initialize_weights()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide progress bars, load reports and log messages while transformers reads or writes a model.

    Every worker would print them. When a model is saved, accelerate imports DeepSpeed, which logs a message, too.
    """
    disabled, bars = logging.root.manager.disable, transformers_logging.is_progress_bar_enabled()
    logging.disable(max(disabled, logging.WARNING))
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(disabled)
        if bars:
            transformers_logging.enable_progress_bar()


def class_of(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class that a model had before a sharding engine changed it."""
    return next(c for c in type(model).__mro__ if not c.__name__.startswith("FSDP"))
