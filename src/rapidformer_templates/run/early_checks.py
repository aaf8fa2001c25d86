"""Checks of a run that need only its flags, its folder and the names of its data. This module does not import torch.

Importing torch takes seconds, and a user who mistyped a flag should not wait for it: see :func:`refuse_mistakes` and
:func:`refuse_mistakes_of_script`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rapidformer_templates.data.finetuning.locating import (
    check_data_folder,
    check_located,
    check_training_columns,
    is_on_hub,
)
from rapidformer_templates.data.text.files import no_corpus_error, prefix_of, text_files
from rapidformer_templates.errors import CheckpointError, ConfigError, MistakeCollector, did_you_mean
from rapidformer_templates.models.model_files import check_model_files, check_not_quantized, check_tokenizer_files
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.data_rules import check_data_flags, check_task_flags
from rapidformer_templates.planning.environment import ask_torch_if_needed, detect
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flag_values import named_sets, weighted
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import choose_template, resolve
from rapidformer_templates.planning.switch import TEMPLATES
from rapidformer_templates.planning.tasks import metric_name, metrics_of
from rapidformer_templates.run import configure
from rapidformer_templates.run.folder import RunFolder, try_folder
from rapidformer_templates.run.push_to_hub import check_push, create_repository
from rapidformer_templates.run.scripts import ScriptArguments
from rapidformer_templates.system.launch import is_script, is_worker


def refuse_mistakes(argv: Sequence[str]) -> str:
    """Return the template of a black-box run after all checks that need no torch.

    The run itself repeats these checks and adds more.

    Raises:
        RapidformerError: the mistakes. One error names all that can be found together.
    """
    mistakes = MistakeCollector()
    config, template = parse(argv, REGISTRY.options(), mistakes=mistakes), ""
    if not mistakes.errors:
        with mistakes.collect():
            config, template = configure.complete_black_box(config)
    if mistakes.errors:
        # A wrong flag may have been meant as one that seems to be missing. So only given values are checked.
        if config.model.pretrained_model_name_or_path:
            mistakes.run(check_model_files, config)
        if config.data.tokenizer_path:
            mistakes.run(check_tokenizer_files, config)
        mistakes.run(check_load, config.training)
        mistakes.run(check_data_folder, config.data)
        mistakes.run(check_text_paths, config.data.data_path or ())
        if not mistakes.has_unknown_names:
            mistakes.run(check_folder, config)
        mistakes.raise_all()
    if configure.is_searched(config):
        return template  # the search takes longer than importing torch, and must run only once
    ask_torch_if_needed(config.launch.device)
    with mistakes.collect():
        reason, launch = choose_template(config)[1], config.launch
        environment = detect(template, reason, device=launch.device, world_size=launch.nproc_per_node)
        resolve(config, environment, training=True)
    mistakes.run(check_folder, config)
    mistakes.run(check_task_flags, config)
    if config.training.task:
        mistakes.run(check_data_flags, config)
        mistakes.run(check_metric, config)
    with mistakes.collect():
        check_model_files(config)
        check_not_quantized(config)
        check_tokenizer_files(config)
    mistakes.run(check_load, config.training)
    mistakes.run(check_push, config)
    if is_on_hub(config.data):
        mistakes.run(check_data_folder, config.data)
        mistakes.raise_all()  # before a long download
    mistakes.run(check_data, config)
    mistakes.raise_all()
    if config.training.push_to_hub:
        create_repository(config.training.push_to_hub)
    return template


OWN_COMMAND_LINE = re.compile("Flags|argv|argparse|parse_args|getopt|click|typer|absl|fire|hydra")
"""Words in a script that may give its command line another meaning."""

OWN_TEMPLATE = re.compile(rf"^class (\w+)\((?:{'|'.join(TEMPLATES)})\):", re.MULTILINE)
MAIN_GUARD = r"if __name__ == .__main__.:\n"


def refuse_mistakes_of_script(script: str, argv: Sequence[str]) -> None:
    """Check the flags of a white-box script before it imports torch. Its template repeats the check.

    Only a script whose command line surely has no flags of its own is checked: it calls ``main()`` of a class that
    derives directly from a template.

    Raises:
        ConfigError: the mistakes.
    """
    try:
        source = Path(script).read_text(encoding="utf-8")
        compile(source, script, "exec")
    except (OSError, ValueError, SyntaxError):
        return  # Python reports it
    if OWN_COMMAND_LINE.search(source) or not {"-h", "--help", "--help-all"}.isdisjoint(argv):
        return
    templates = OWN_TEMPLATE.findall(source)
    if any(re.search(rf"^(?:{MAIN_GUARD}    )?{name}\.main\(", source, re.MULTILINE) for name in templates):
        parse(argv, REGISTRY.options(), prog=Path(script).name)


def exit_on_mistakes_of_program() -> None:
    """End the running script if its flags have mistakes: see :func:`refuse_mistakes_of_script`."""
    if not is_script() or isinstance(sys.argv, ScriptArguments):  # the command has checked those
        return
    try:
        if is_worker():
            return
        refuse_mistakes_of_script(sys.argv[0], sys.argv[1:])
    except ConfigError as error:
        print(error.render(), file=sys.stderr)
        raise SystemExit(error.exit_status) from None


def check_load(training: TrainingFlags) -> None:
    """Check that the folder of ``--load`` exists.

    Raises:
        CheckpointError: it does not.
    """
    if training.load and not Path(training.load).is_dir():
        hint = "name the --save folder of a run, or a checkpoint in it"
        raise CheckpointError(f"the folder {training.load} does not exist", where="--load", hint=hint)


def check_text_paths(words: Sequence[str]) -> None:
    """Check that the corpora of ``--data-path`` exist.

    Raises:
        DataError: one does not exist, or weights and corpora do not alternate.
    """
    names = [name for _, name in weighted(words, "--data-path")] or list(words)
    text = [name for name in names if not any(Path(prefix_of(name) + end).is_file() for end in (".bin", ".idx"))]
    text_files(text, "--data-path")


def check_data(config: RunConfig) -> None:
    """Check that the data sets exist, with the columns that flags name.

    Raises:
        DataError: something is missing.
    """
    if config.training.task == "pretraining":
        if not config.data.data_path:
            raise no_corpus_error()
        check_text_paths(config.data.data_path)
    elif not config.data.streaming:
        check_located(config.data)
        check_training_columns(config.data)


def check_metric(
    config: RunConfig, sets: Iterable[str] | None = None, *, of_task: bool = True, own_loss: bool = False
) -> None:
    """Check that the library's own evaluation computes the metric of ``--metric-for-best``.

    Args:
        sets: names of the validation sets. By default those that the flags name.
        of_task: whether the task's metrics are computed. Otherwise there is only the loss.
        own_loss: whether the user overrides ``compute_loss``.

    Raises:
        ConfigError: it does not compute this metric.
    """
    name = config.training.metric_for_best
    if sets is None:
        sets = ("", *named_sets(config.data.eval_data_name, "--eval-data-name"))
    metrics = metrics_of(config, of_task=of_task, own_loss=own_loss)
    names = [metric_name(of, metric) for of in sets for metric in metrics]
    if name is None or name in names:
        return
    known = f"there are: {', '.join(names)}; your own compute_metrics can return others"
    message = f"{config.training.task if of_task else 'this run'} has no metric '{name}'"
    hint = did_you_mean(name, names, known)
    raise ConfigError(message, where=f"--metric-for-best ({config.origin('metric_for_best')})", hint=hint)


def check_folder(config: RunConfig) -> None:
    """Check that the run may use the folder of ``--save``, and that it has one if it needs one.

    Raises:
        ConfigError: the folder cannot be used, or is missing.
    """
    training = config.training
    folder = RunFolder(training.save) if training.save else None
    if training.resume and folder is None:
        raise ConfigError("--resume needs --save, the run folder to continue in", where=config.origin("resume"))
    if training.profile and folder is None:
        raise ConfigError("--profile needs --save, the run folder that it writes to", where=config.origin("profile"))
    if folder:
        folder.check(resume=training.resume, overwrite=training.overwrite)
        values = {name: value for name, value in config.items() if name in config.origins and name != "save"}
        for name, value in values.items() if training.overwrite else ():
            paths = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(path, str) and folder.would_delete(path) for path in paths):
                message = f"--overwrite would delete what {spelling(name)} reads, in {folder.path}"
                hint = "give another --save, or copy that elsewhere first"
                raise ConfigError(message, where=config.origin(name), hint=hint)
        try_folder(folder.path)
        if training.mirror:  # the file system of the URL must be known and installed. Nothing connects.
            from fsspec import get_filesystem_class

            protocol = training.mirror.partition("://")[0] if "://" in training.mirror else "file"
            try:
                get_filesystem_class(protocol)
            except ImportError as error:
                raise ConfigError(f"{protocol}:// needs another package", where="--mirror", hint=str(error)) from error
            except ValueError as error:
                hint = "give a URL such as s3://bucket/run, gs://bucket/run, abfs://container/run or file:///folder"
                raise ConfigError(f"unknown kind of storage '{protocol}://'", where="--mirror", hint=hint) from error
