"""Turns a configuration of another trainer into flags, by the rules of the TOML files of this folder.

A rule says what a key becomes. Keys inside of mappings have dots: ``peft_config.r``. ``key = "flag"`` copies the value,
and a table says more:

- ``flag``: what gets the value: a flag, or a fact from which this module computes flags
- ``values``: what becomes of a value: another value for the flag, or a table of flags. A text names a table of
  ``transformers.toml``. Other values are copied, or are not converted if there is no flag or a hint
- ``set``: flags that the key sets as well, unless it is off
- ``hint``: what to do about a value that is not converted. A key without a rule is never converted
- ``note``: a difference that the flags do not show
- ``refuse``: why there is no such training here

A section also has keys that change nothing here (``idle``), keys that have the same name here (``same``), the defaults
of the trainer, also by task, and keys from which the task is guessed (``tasks``).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import checked_value, field_types, value_kind
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.registry import switch_options
from rapidformer_templates.planning.schedules import SHAPING, STYLES

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"
Rule: TypeAlias = Mapping[str, Any]

RULES = {
    "axolotl": ("transformers.arguments", "axolotl.axolotl"),
    "llama-factory": ("transformers.arguments", "llama_factory.stages"),
    "llama-factory, version 1": ("llama_factory.version_1",),
    "transformers": ("transformers.arguments", "transformers.trl"),
    "megatron": ("megatron.arguments",),
}
"""The sections with the rules of each format: ``file.section``. A later one wins over an earlier one."""

UNKNOWN = "no rule knows these keys. Look up what they do. A template can do it (docs/white-box.md)"
OFF = ("false", "none", "no")
NONE: tuple[Value, ...] = (None, "", [], {})
SEVERAL = "give one data set, or a mixture by weights: data-name: 0.5 a 0.5 b (docs/fine-tuning-data.md)"
OWN_MODEL = "build the model in build_model() of your script, from a config.json with these values (docs/white-box.md)"
FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt")
STRATEGY = "data_parallel_sharding_strategy"
SIZES = tuple(f"{part}_parallel_size" for part in ("tensor_model", "pipeline_model", "context", "expert_model"))
NOTHING = dict.fromkeys(("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples", "neftune_alpha"), 0)
NOTHING |= {"dataloader_num_workers": 0, SIZES[3]: 1}
"""Values with which a flag changes nothing, although they are not its default."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Facts that the user adds to a configuration.

    Attributes:
        world_size: number of workers, or None for the number in the file.
        samples: samples of an epoch, with which shares become numbers of rows or steps.
        task: the task, if the configuration does not name one.
        folders: where files that the configuration names are looked for.
    """

    world_size: int | None = None
    samples: int | None = None
    task: str | None = None
    folders: tuple[Path, ...] = (Path(),)

    def find(self, name: object) -> Path | None:
        """Return the file with this name, if there is one."""
        return next((folder / str(name) for folder in self.folders if (folder / str(name)).is_file()), None)

    def read(self, name: object) -> dict[str, Value]:
        """Return the mapping in the JSON or YAML file with this name. It is empty if there is none."""
        file = self.find(name)
        return mapping_of(file.read_text(encoding="utf-8"), file) if file else {}


def mapping_of(text: str, file: Path) -> dict[str, Value]:
    """Return the keys and values in the text of a JSON or YAML file.

    Raises:
        ConfigError: the text is neither, or it does not map keys to values.
    """
    kind = "JSON" if file.suffix == ".json" else "YAML"
    try:
        values = json.loads(text) if kind == "JSON" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} is not {kind}: {error}", where="FILE") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{file} must map keys to values", where="FILE")
    return values


class Conversion:
    """A configuration that is converted.

    Args:
        name: its format.
        values: its keys and values.

    Attributes:
        flags: values of flags and facts, by name.
        left: settings that are not converted, each with what to do.
        notes: differences that the flags do not show.
        keys: the key that has set a flag or a fact, by its name.
        workers: number of workers.

    Raises:
        ConfigError: there is no such training here.
    """

    def __init__(self, name: str, values: Mapping[str, Value], options: Options) -> None:
        self.options, self.workers = options, options.world_size or 1
        self.flags: dict[str, Any] = {}
        self.left: dict[str, str] = {}
        self.notes: list[str] = []
        self._implied: dict[str, Value] = {}
        self.keys: dict[str, str] = {}
        self._rules = {key: rule for section in RULES[name] for key, rule in rules_of(section).items()}
        for key, value in self._flattened(values):
            rule = self._rules.get(key.replace("-", "_"))
            if rule is None and value not in NONE:
                self._leave(key, value, {"hint": UNKNOWN})
            elif rule and value not in NONE:
                self._read(key, value, rule)
        self.flags = self._implied | self.flags
        self._add_defaults([section_of(section) for section in RULES[name]], values.keys())

    def _flattened(self, values: Mapping[str, Value], prefix: str = "") -> Iterator[tuple[str, Value]]:
        """Yield keys with dots and their values. A mapping that has a rule stays whole."""
        for name, value in values.items():
            key = prefix + (name.removeprefix("fsdp_") if prefix == "fsdp_config." else name)
            value = (self.options.read(value) or value) if key == "fsdp_config" and isinstance(value, str) else value
            value = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) else value
            has_parts = key not in self._rules or any(other.startswith(f"{key}.") for other in self._rules)
            if isinstance(value, dict) and value and has_parts:
                yield from self._flattened(value, f"{key}.")
            else:
                yield key, value

    def _read(self, key: str, value: Value, rule: Rule) -> None:
        """Apply the rule of a key."""
        known, missed = rule.get("values", {}), {name: rule[name] for name in ("hint", "refuse") if name in rule}
        known = section_of(f"transformers.{known}") if isinstance(known, str) else known
        is_copied = "flag" in rule and not (known and missed)
        parts = value if known and isinstance(value, list) else [value]
        if known and isinstance(value, str) and value.lower() not in known:
            parts = re.split(r"[ ,]+", value)
        if len(parts) > 1 and "refuse" in rule:
            self._leave(key, value, rule)
        for part in parts:
            text = str(part).lower()
            outcome = known.get(text, known.get(re.split("[.:]", text)[0] if isinstance(part, str) else text))
            if isinstance(outcome, dict):
                self._imply(key, part, outcome)
            elif outcome is not None or is_copied:
                self.flags[rule["flag"]], self.keys[rule["flag"]] = part if outcome is None else outcome, key
            elif text not in OFF:
                self._imply(key, part, missed or ({"hint": UNKNOWN} if known else {}))
            if outcome is None and text not in OFF:
                self._imply(key, part, rule.get("set", {}))
        self.note(rule.get("note", "") if str(value).lower() not in OFF else "")

    def _imply(self, key: str, value: Value, outcome: Rule) -> None:
        """Set flags that follow from the value of a key. Values that are copied from other keys win over them."""
        for name, new in outcome.items():
            old = self._implied.get(name)
            if name in ("hint", "refuse"):
                self._leave(key, value, outcome)
            elif name == "note":
                self.note(new)
            elif name == "report_to" and old:
                self._implied[name] = ",".join(dict.fromkeys([*str(old).split(","), new]))
            elif new != "" or old is None:
                self._implied[name] = new
                self.keys.setdefault(name, key)

    def _add_defaults(self, sections: Iterable[Rule], keys: Iterable[str]) -> None:
        """Add the trainer's defaults, and leave out what has no effect there."""
        task, defaults = self.options.task or self.flags.get("task"), dict[str, Any]()
        for section in sections:
            guesses = [name for name, words in section.get("tasks", {}).items() if set(keys) & set(words.split())]
            if "tasks" in section and not guesses and "task" not in self.flags:
                continue  # no key is of this trainer
            self.note(section["guess"] if guesses == ["causal_lm"] and task is None else "")
            defaults |= section.get("defaults", {})
            task = task or next(iter(guesses), defaults.get("task"))
            defaults |= section.get(str(task), {})
        self.note("" if task else "the file does not name a task, a model or data: give --task, and add their flags")
        chosen = defaults | self.flags | {"task": task}
        loss = chosen.get("preference_loss") if task == "preference" else None
        acting = {
            "lora_": chosen.pop("adapters", None), "fsdp_": chosen.get("fsdp_memory_optimization"),
            "preference_": loss, "precompute_": loss, "simpo_": loss == "simpo", "kto_": loss == "kto",
            "run_name": chosen.get("report_to"), "project_name": chosen.get("report_to"),
            "recompute_num_layers": chosen.pop("recompute_method", None) == "block",
            "use_distributed_optimizer": not chosen.get("fsdp_memory_optimization"),  # FSDP shards its state itself
            "tokenizer_path": task != "pretraining" or chosen.get("tokenizer_type") == "HuggingFaceTokenizer",
            "overwrite": not chosen.get("resume"),
        }  # fmt: skip
        self.flags, stated = chosen, self.flags
        self.drop(*(prefix for prefix, is_acting in acting.items() if not is_acting))
        for name, default in self.flags.items():
            if isinstance(default, dict) and name not in stated:
                self.note(default["note"])
                self.flags[name] = default.get("value")

    def _leave(self, key: str, value: Value, rule: Rule) -> None:
        if "refuse" in rule:
            raise ConfigError(f"{key}: {shown(value)} is not supported", where=key, hint=rule["refuse"])
        several = isinstance(value, list) and isinstance(next(iter(value), None), dict)
        self.left[f"{key}: {shown(value)}"] = SEVERAL if several else rule["hint"]

    def leave(self, name: str, value: Value, hint: str) -> None:
        """Name a value of a flag or a fact that is not converted, and say what to do."""
        self._leave(self.keys.get(name, name.replace("_", "-")), value, {"hint": hint})

    def drop(self, *prefixes: str, hint: str = "it has no effect in this file") -> None:
        """Leave out the flags and facts that begin with one of these, and name those that a key has set."""
        for name in [name for name in self.flags if name.startswith(prefixes)]:
            if (value := self.flags.pop(name)) and name in self.keys:
                self.leave(name, value, hint)

    def note(self, text: str) -> None:
        """Add a difference that the flags do not show."""
        self.notes += [text] if text and text not in self.notes else []

    def number(self, name: str, *, is_whole: bool = False) -> float | None:
        """Take a number out of the flags and facts. It may also be written as a text, such as 2e-5 in YAML 1.1.

        Raises:
            ConfigError: the value is not a finite number, or not a whole one.
        """
        value, key = self.flags.pop(name, None), self.keys.get(name, name)
        try:
            number = None if value is None else math.nan if isinstance(value, bool | list | dict) else float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if number is not None and (not math.isfinite(number) or (is_whole and not number.is_integer())):
            hint = "write the number in place of the variable" if "$" in str(value) else None
            kind = "a whole number" if is_whole else "a number"
            raise ConfigError(f"{key} needs {kind}, not {shown(value)!r}", where=key, hint=hint)
        return number

    def count(self, name: str, default: int = 1) -> int:
        """Take a whole number. Missing ones, 0 and -1 are the default."""
        number = self.number(name, is_whole=True)
        return int(number) if number is not None and number > 0 else default

    def close(self) -> None:
        """Check the values of the flags, and leave out those that change nothing.

        Raises:
            ConfigError: a value has the wrong type or is out of range.
        """
        values, self.flags = self.flags, {}
        kinds = [*SECTIONS.values(), *switch_options().values()]
        flags = [(f, field_types(kind)[f.name]) for kind in kinds for f in dataclasses.fields(kind)]
        for declared, annotation in flags:
            name = declared.name
            value = values.get(name)
            if value in NONE:
                continue
            _, choices, is_list = value_kind(annotation)
            value = int(value) if isinstance(value, float) and value >= 1 and value.is_integer() else value
            value = ",".join(map(str, value)) if isinstance(value, list) and not is_list else value
            if "$" in str(value):
                self.note(f"the file does not set a variable, so write its value: {shown(value)}")
            elif choices and value not in choices:
                self.leave(name, value, f"{name.replace('_', '-')} has {', '.join(choices)}")
                continue
            else:
                checked = checked_value(declared, annotation, value, self.keys.get(name, name))
                value = checked if isinstance(value, str) and isinstance(checked, int | float) else value
                if checked in (0, 1) and checked == NOTHING.get(name, declared.default):
                    continue  # it changes nothing
            self.flags[name] = value


@cache
def section_of(name: str) -> Rule:
    """Return a table of a TOML file: ``file.table``."""
    file, _, table = name.partition(".")
    section: Rule = tomllib.loads(Path(__file__).with_name(f"{file}.toml").read_text(encoding="utf-8"))[table]
    return section


def rules_of(name: str) -> dict[str, Rule]:
    """Return the rules of a section by key."""
    section = section_of(name)
    models = section_of("megatron.models")["default"] if name == "megatron.arguments" else ()
    rules: dict[str, Rule] = {key: {} for key in section.get("idle", "").split()}
    rules |= {key: {"flag": key} for key in (*section.get("same", "").split(), *models)}
    return rules | {key: {"flag": rule} if isinstance(rule, str) else rule for key, rule in section["keys"].items()}


def shown(value: object) -> str:
    """Return a value on one line, shortened."""
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    text = " ".join((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).split())
    return text if len(text) <= 80 else f"{text[:77]}…"


def convert_trainer(name: str, values: dict[str, Value], options: Options) -> Conversion:
    """Convert a configuration of axolotl, LLaMA-Factory, TRL or transformers' Trainer.

    Raises:
        ConfigError: there is no such training here, or a value has the wrong type.
    """
    if name == "llama-factory":
        name, values = _with_described_data(values, options)
    c = Conversion(name, values, options)
    _data_set(c)
    steps, epochs, batch = _length(c, _divide_workers(c))
    _schedule(c, steps)
    _outputs(c, steps, epochs, batch)
    _trained_weights(c)
    if config := c.flags.get("deepspeed_config"):
        file = options.find(config) or config
        c.flags["deepspeed_config"] = json.dumps(config) if isinstance(config, dict) else str(file)
    c.close()
    return c


def _with_described_data(values: dict[str, Value], options: Options) -> tuple[str, dict[str, Value]]:
    """Add what other files of LLaMA-Factory say about the data set. Return its format, too."""
    name, folder = values.get("dataset"), values.get("dataset_dir") or "data"
    if {"model", "train_dataset"} <= values.keys():
        sets = [*options.read(values["train_dataset"]).values()] or [values["train_dataset"]]
        return "llama-factory, version 1", values | {"train_dataset": sets[0] if len(sets) == 1 else sets}
    if values.get("do_train") is not True and ("do_predict" in values or "learning_rate" not in values):
        raise ConfigError("this file does not train", where="do_train", hint="rapidformer predict, chat and export")
    if isinstance(name, str) and not set(", ") & set(name):
        entry = options.read(f"{folder}/dataset_info.json").get(name)
        info = entry if isinstance(entry, dict) else {"file_name": name}
        file = None if info.get("hf_hub_url") else f"{folder}/{info.get('file_name')}"
        values = values | {"dataset": None, "dataset_info": {**info, "file_name": file}}
    return "llama-factory", values


def _divide_workers(c: Conversion) -> int:
    """Set the sizes of the layout and return the number of data-parallel workers."""
    tensor, pipeline, context, experts = sizes = [c.count(name) for name in SIZES]
    c.flags |= dict(zip(SIZES, sizes, strict=True))
    shard, copies = c.count("dp_shard_size"), c.count("dp_replicate_size")
    strategy = c.flags.pop(STRATEGY, None)
    if (c.flags.get("fsdp_memory_optimization") or shard > 1) and tensor * pipeline > 1:
        strategy = strategy or "optim_grads_params"
    c.flags |= {"fsdp_shard_size": shard} if shard > 1 and copies > 1 else {}
    if strategy in ("optim", "optim_grads") or (strategy == "optim_grads_params" and tensor * pipeline > 1):
        c.flags |= {"fsdp_memory_optimization": False, "use_distributed_optimizer": True, STRATEGY: strategy}
    # Experts are divided over the workers that have copies of everything else: data × context.
    c.workers = max(c.workers, tensor * pipeline * max(context, experts, context * shard * copies))
    c.flags["sequence_parallel"] = tensor > 1 and c.flags.get("sequence_parallel")
    return max(1, c.workers // (tensor * pipeline * context))


def _data_set(c: Conversion) -> None:
    """Set the data set: a file, a folder, or a name on the hub with its configuration and its splits."""
    names = ("data_files", "data_path", "train_split", "test_split")
    files, path, train, test = (c.flags.pop(name, None) for name in names)
    files = files[0] if isinstance(files, list) and len(files) == 1 else files
    name, train, test = str(files or path or ""), str(train or "train"), str(test or "test")
    if isinstance(files or path, list):
        c.leave("data_files" if files else "data_path", files or path, SEVERAL)
    elif files or name.endswith(FILES):
        c.flags |= {"data_dir": str(Path(name).parent), "data_name": Path(name).name}
    elif name:
        c.flags["data_dir" if name.startswith(("/", ".", "~")) else "data_name"] = name
    if "[" in train:
        c.leave("train_split", train, "max-train-samples: N takes the first N rows")
    elif (train, test) != ("train", "test"):
        c.flags["data_split"] = train if c.flags.get("eval_strategy") in (None, "no") else f"{train},{test}"


def _length(c: Conversion, replicas: int) -> tuple[int, float, int]:
    """Set the batches and the length. Return (steps, or 0 for a run of epochs; epochs; samples per step)."""
    micro, accumulation, total = c.count("micro_batch_size"), c.count("accumulation"), c.count("global_batch_size", 0)
    accumulation = max(accumulation, math.ceil(total / (micro * replicas)))
    steps, epochs, batch = c.count("max_steps", 0), c.number("num_epochs") or 1.0, micro * accumulation * replicas
    c.flags |= {"micro_batch_size": micro, "global_batch_size": batch if accumulation > 1 else None}
    if not steps and epochs.is_integer() and accumulation == 1:
        c.flags["epochs"] = int(epochs)
    else:
        c.flags["train_iters"] = steps or f"{epochs:.12g}epochs"
    return steps, epochs, batch


def _schedule(c: Conversion, steps: int) -> None:
    style, rate, low = str(c.flags.get("lr_decay_style") or "linear"), c.number("lr"), c.number("min_lr_ratio")
    if rate is None:
        raise ConfigError("there is no learning_rate", where="learning_rate")
    c.flags["lr"] = rate
    if low and style.startswith(("cosine", "warmup_stable")):
        c.flags["min_lr"] = float(f"{rate * low:.12g}")
    if style == "constant":
        c.drop("warmup_")
    warmup, share, cap = c.number("warmup_steps"), c.number("warmup_ratio"), c.number("warmup_cap")
    if cap and warmup is None and "warmup_ratio" not in c.keys:  # axolotl's own warmup
        warmup = min(int((share or 0.0) * steps), cap) if steps else None
        limit = f"the warmup has at most {cap:g} steps there. In a long run, set lr-warmup-iters: {cap:g}"
        c.note("" if steps else limit)
    share = None if cap and warmup is not None else share
    is_count = warmup is not None and warmup >= 1
    c.flags["lr_warmup_iters" if is_count else "lr_warmup_fraction"] = warmup or share
    _check_shape(c, style)


def _check_shape(c: Conversion, style: str) -> None:
    """Leave out the flags that do not act on a schedule."""
    hint = f"lr-decay-style {style} does not have it"
    c.drop(*(name for name in SHAPING if name not in STYLES[style].takes), hint=hint)


def _interval(c: Conversion, what: str, steps: int, epochs: float) -> str:
    """Set an interval and return the strategy: ``steps``, ``epoch`` or ``no``."""
    strategy = str(c.flags.pop(f"{what}_strategy", None) or "no")
    every, times = c.number(f"{what}_steps"), c.number(f"{what}s_per_epoch")
    if times:  # axolotl's share of the run
        every = 1 / (times * epochs)
        strategy = "steps" if every < 1 else strategy
    if strategy == "steps" and every:
        share = max(1, math.ceil(every * steps)) if steps else f"{every * epochs:.12g}epochs"
        c.flags[f"{what}_interval"] = every if every >= 1 else share
    elif strategy == "epoch" and steps and not c.flags.get("streaming"):  # the default in a run of epochs
        c.flags[f"{what}_interval"] = "1epochs"
    return strategy


def _outputs(c: Conversion, steps: int, epochs: float, batch: int) -> None:
    """Set how often the run saves, logs and evaluates, and what it holds out."""
    _interval(c, "save", steps, epochs)
    if saved := c.number("save_epochs"):
        c.flags["save_interval"] = f"{saved:.12g}epochs"
    logged, samples, held_out = c.number("logging_steps"), c.options.samples, c.number("held_out")
    c.flags["eval_steps"] = c.flags.get("eval_steps") or logged
    run = steps or (math.ceil(epochs * math.ceil(samples / batch)) if samples else 0)
    if logged and c.flags.pop("logging_strategy", "steps") == "steps":
        c.flags["log_interval"] = logged if logged >= 1 else math.ceil(logged * run) or None
        if logged < 1 and not run:
            c.leave("logging_steps", logged, "log-interval: a number of steps; --samples N computes it")
    if held_out and held_out >= 1:
        if not samples:
            c.leave("held_out", held_out, "validation-fraction: a share; --samples N makes a share of rows")
        held_out = held_out / samples if samples else 0.0
    if not held_out:
        c.flags.pop("evals_per_epoch", None)
    strategy = _interval(c, "eval", steps, epochs)
    held_out = 0.0 if held_out is None and strategy == "no" else held_out
    if not c.flags.get("streaming") and c.flags["task"] != "pretraining":
        c.flags["validation_fraction"] = held_out
    if strategy == "no" and not held_out:
        c.drop("keep_best", "metric_", "early_")
    elif not c.flags.get("keep_best"):
        c.drop("metric_")


def _trained_weights(c: Conversion) -> None:
    """Set what is trained: adapters and their targets, or all weights."""
    named, is_all = c.flags.pop("lora_targets", None) or [], c.flags.pop("lora_target_linear", False)
    targets = [str(name) for name in named] if isinstance(named, list) else re.split(r"[ ,]+", str(named))
    if re.search(r"[][()|*\\^$+?]", " ".join(targets)):
        c.leave("lora_targets", named, "names of layers are ends of names here, with commas. all-linear is used")
    elif not is_all and not {"all", "all-linear"} & set(targets):
        c.flags["lora_target_modules"] = targets
    if c.flags.pop("no_dropout", False):  # TRL and LLaMA-Factory turn off every dropout
        c.flags["dropout"] = 0.0
        c.drop("lora_dropout", hint="the trainer turns off every dropout")


def convert_megatron(script: str, arguments: Mapping[str, Value], workers: int | None, options: Options) -> Conversion:
    """Convert arguments of Megatron-LM.

    Args:
        script: the training script, such as ``pretrain_gpt.py``.
        arguments: the arguments by name, without the dashes.
        workers: number of workers that the launcher starts, or None if it is not known.

    Raises:
        ConfigError: the script trains a model that has no counterpart, or a value has the wrong type.
    """
    c = Conversion("megatron", arguments, dataclasses.replace(options, world_size=options.world_size or workers))
    if not c.flags.keys() & {"train_iters", "train_samples"}:
        raise ConfigError("this command line does not train: it has no train-iters and no train-samples", where="FILE")
    replicas = _divide_workers(c)
    kind = _megatron_model(c, Path(script).stem)
    _megatron_rates(c, kind)
    _megatron_length(c, replicas)
    if "tokenizer_type" not in c.flags and "vocab_file" in c.flags:
        c.flags["tokenizer_type"] = "GPT2BPETokenizer" if "merge_file" in c.flags else "BertWordPieceLowerCase"
    c.flags["sentence_pairs"] = kind == "megatron-bert" and c.flags.get("sentence_pairs", True)
    saved, loaded = c.flags.get("save"), c.flags.pop("load", None)
    if saved and saved == loaded:
        c.flags["resume"] = True
    elif loaded:
        c.leave("load", loaded, "load: RUN reads runs of this library only")
    c.close()
    return c


def _megatron_model(c: Conversion, script: str) -> str | None:
    """Set the architecture, and return it. None if transformers has no such model, or not with these sizes."""
    scripts = section_of("megatron.scripts")
    if script not in scripts:
        hint = f"{', '.join(f'{name}.py' for name in scripts)} are read"
        raise ConfigError(f"{script}.py has no counterpart", where=f"{script}.py", hint=hint)
    width, heads, models = c.count("hidden_size", 0), c.count("num_attention_heads", 0), section_of("megatron.models")
    c.flags |= {"hidden_size": width or None, "num_attention_heads": heads or None}
    inner = int(8 * width / 3 / 64) * 64 if c.flags.get("swiglu") else 4 * width
    usual = {"ffn_hidden_size": inner, "num_query_groups": heads, "kv_channels": width // (heads or 1)}
    usual |= models["default"]
    arguments = {key: c.flags.pop(key, usual[key]) for key in usual}
    if arguments["position_embedding_type"] != "rope":
        arguments |= {key: usual[key] for key in usual if key.startswith("rotary")}
    others = {}
    for kind in scripts[script]:
        model = usual | models[kind] | {"ffn_hidden_size": round(width * models[kind]["inner"] / 8) * 8}
        others[kind] = [key for key in usual if str(arguments[key]) != str(model[key])]
    kind = min(others, key=lambda name: len(others[name]))
    for key in others[kind]:
        c.leave(key, arguments[key], OWN_MODEL)
    return None if others[kind] else kind


def _megatron_rates(c: Conversion, kind: str | None) -> None:
    """Set the dropout of a model that transformers has, and name what it does not have."""
    rates = {name: c.number(name) for name in ("hidden_dropout", "attention_dropout", "norm_epsilon")}
    facts: Rule = section_of("megatron.models").get(str(kind), {})
    if kind:
        dropout = rates["attention_dropout" if kind == "llama" else "hidden_dropout"]
        c.flags |= {"model_type": kind, "dropout": dropout}
        c.note(facts.get("note", ""))
        facts = {"hidden_dropout": dropout, "attention_dropout": dropout, **facts}
    for name, value in rates.items():
        if value != facts.get(name) and (kind or name in c.keys):
            c.leave(name, value, OWN_MODEL)


def _megatron_length(c: Conversion, replicas: int) -> None:
    """Set the batches, the length, the schedule and the stages of a pipeline."""
    micro, steps, samples = c.count("micro_batch_size"), c.count("train_iters", 0), c.count("train_samples", 0)
    batch = c.count("global_batch_size", micro * replicas)
    c.flags |= {"micro_batch_size": micro, "global_batch_size": batch if batch != micro * replicas else None}
    c.flags["train_iters"] = steps or samples // batch
    for name in ("lr_decay", "lr_wsd_decay"):
        c.flags[f"{name}_iters"] = c.count(f"{name}_samples", 0) // batch or c.flags.get(f"{name}_iters")
    _check_shape(c, str(c.flags.get("lr_decay_style") or "linear"))
    layers, stages, virtual = c.count("num_layers", 0), c.flags[SIZES[1]], c.count("virtual_layers", 0)
    c.flags["num_layers"] = layers or None
    if virtual and stages > 1:
        c.flags["virtual_pipeline_size"] = layers // stages // virtual
