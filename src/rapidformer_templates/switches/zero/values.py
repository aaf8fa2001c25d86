"""Checks of DeepSpeed before the workers start: its compiled parts, and the values of a DeepSpeed file."""

from __future__ import annotations

import logging

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.deepspeed_file.file import read, section_at
from rapidformer_templates.planning.deepspeed_file.settings import fill_bucket_sizes
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.zero import compiled_parts


def prepare(config: RunConfig, plan: Plan) -> None:
    """Build the compiled parts that the run needs, and check the values of the file.

    Raises:
        PartError: a part cannot be built.
        ConfigError: a value of the file is invalid.
    """
    compiled_parts.prepare(plan)
    check_values(config, plan)


def check_values(config: RunConfig, plan: Plan) -> None:
    """Validate the sections of a DeepSpeed file with DeepSpeed's own models. :func:`prepare` must have set its folder.

    Raises:
        ConfigError: a value has the wrong type, or is out of range.
    """
    text, settings = config.get("deepspeed_config"), plan.engine_options.deepspeed
    if text is None or not settings:
        return
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # messages during the import do not matter to a run
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    models = {"fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config, "zero_optimization": DeepSpeedZeroConfig}
    for section, model in models.items():
        try:
            model(**fill_bucket_sizes(section_at(settings, section), width=1))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join([section, *map(str, first["loc"])])
            value = first["input"] if first["loc"] else "this section"
            file = read(text)
            raise ConfigError(
                f"{file.name}: {path} cannot be {value!r}", where=file.where(path), hint=first["msg"]
            ) from error
