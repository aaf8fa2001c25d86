"""Checks of a run that need only its flags, its folder and the names of its data. This module does not import torch.

Importing torch takes seconds, and a user who mistyped a flag should not wait for it: see :func:`refuse_mistakes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rapidformer_templates.data.finetuning.locating import check_located
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.environment import ask_torch_if_needed
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.planning.tasks import check_data_flags, check_task_flags
from rapidformer_templates.run import configure
from rapidformer_templates.run.best import check_metric
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.lock import try_folder


def refuse_mistakes(argv: Sequence[str]) -> str:
    """Return the template of a black-box run after all checks that need no torch.

    The run itself repeats these checks and adds more.

    Raises:
        RapidformerError: the first mistake.
    """
    config, template = configure.read_black_box(argv)
    if configure.is_searched(config):
        return template  # the search takes longer than importing torch, and must run only once
    ask_torch_if_needed(config.launch.device)
    resolve(config, configure.environment_of_library(template, config), training=True)
    check_folder(config)
    check_task_flags(config)
    check_data_flags(config)
    check_metric(config)
    if config.training.task != "pretraining" and not config.data.streaming:
        check_located(config.data)
    return template


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
        _check_overwritten(config, folder)
        try_folder(folder.path)


def _check_overwritten(config: RunConfig, folder: RunFolder) -> None:
    """Check that ``--overwrite`` deletes no file that the run reads.

    Raises:
        ConfigError: a flag refers to such a file. The error names the flag.
    """
    if not config.training.overwrite:
        return
    for name, value in config.items():
        paths = value if isinstance(value, list | tuple) else [value]
        if name == "save" or name not in config.origins:
            continue
        if any(isinstance(path, str) and folder.would_delete(path) for path in paths):
            raise ConfigError(
                f"--overwrite would delete what {spelling(name)} reads, in {folder.path}",
                where=config.origin(name),
                hint="give another --save, or copy that elsewhere first",
            )
