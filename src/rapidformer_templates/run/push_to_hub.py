"""``--push-to-hub``: the checks before the run, the model card of the exported model, and the upload.

The model card is ``README.md`` with the task, data, metrics and plan, and how to load the model. This module does not
import torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rapidformer_templates.errors import ConfigError, counted
from rapidformer_templates.models.model_files import CONVERTED
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.flag_values import TEST, mixture_of
from rapidformer_templates.planning.hub import NAME, is_hub_name, log_in_hint, reason
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.request import config_file
from rapidformer_templates.planning.tasks import TASKS
from rapidformer_templates.system.files import write_text

FLAG = "--push-to-hub"
CARD = "README.md"


def check_push(config: RunConfig) -> None:
    """Check that something will be uploaded, that the repository has a valid name, and that there is a token.

    Raises:
        ConfigError: one of them is missing.
    """
    name = config.training.push_to_hub
    if name is None:
        return
    from huggingface_hub import get_token

    if not config.training.export_model:
        raise ConfigError("--no-export-model leaves nothing to upload", where=FLAG, hint="leave out one of them")
    if not NAME.fullmatch(name) or "/" not in name or re.search(r"--|\.\.|[-.]$|\.git$", name):
        hint = "write ORG/NAME: your user name or an organization, and letters, digits, - _ ."
        raise ConfigError(f"'{name}' is not the name of a repository", where=FLAG, hint=hint)
    if get_token() is None:
        raise ConfigError("an upload to the hub needs a token that may write", where=FLAG, hint=log_in_hint())


@cache
def create_repository(name: str) -> None:
    """Create the repository before the first step if it does not exist, which also shows that the token may write.

    Several checks of a process come here, and only the first one asks the hub.

    Raises:
        ConfigError: the token may not write, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        user = HfApi().whoami()
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise ConfigError(f"the token of {user['name']} may only read", where=FLAG, hint=log_in_hint())
        HfApi().create_repo(name, exist_ok=True)
    except ConfigError:
        raise
    except HfHubHTTPError as error:
        reasons = {401: "the hub does not accept the token", 403: f"the token may not write to {name}"}
        message = reasons.get(error.response.status_code, f"{name} cannot be created: {reason(error)}")
        raise ConfigError(message, where=FLAG, hint=log_in_hint()) from None
    except Exception as error:  # of the HTTP client
        message = "HF_HUB_OFFLINE is set, so nothing can be uploaded"
        if not constants.is_offline_mode():
            message = f"{constants.ENDPOINT} cannot be reached: {reason(error)}"
        hint = f"leave the flag out, and upload the export later: hf upload {name} RUN/export ."
        raise ConfigError(message, where=FLAG, hint=hint) from None


def push_export(name: str, export: Path, step: int) -> str:
    """Upload the exported model. A failure does not end the run, because the export is complete.

    Returns:
        The line for the user: where the model is, or what failed and how to upload it again.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(name, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=export, commit_message=f"Upload the export of step {step}")
    except Exception as error:  # huggingface_hub and its HTTP client raise many kinds, and the run must not be lost
        return (
            f"error: the export was not uploaded to {name}: {reason(error)}\n  where  {export}, which is complete\n"
            f"  help   upload it again with: hf upload {name} {export} ."
        )
    return f"uploaded   {HfApi().endpoint}/{name}"


def write_card(
    config: RunConfig,
    plan: Plan,
    export: Path,
    metrics: Mapping[str, float] = MappingProxyType({}),
    trained: tuple[int, float] | None = None,
) -> None:
    """Write the model card into an exported model, before its folder gets its name.

    Args:
        export: the folder, with what is exported so far. The end ``.tmp`` does not belong to its name.
        metrics: those of the exported weights.
        trained: steps and epochs. None before the end of the run.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    from rapidformer_templates.models.adapters import SETTINGS
    from rapidformer_templates.run.console import plan_lines

    name = config.training.push_to_hub
    title = name or Path(config.training.save or export).resolve().name.removesuffix(".tmp")
    base, task, sets = config.model.pretrained_model_name_or_path, config.training.task, _data_sets(config)
    pipeline = TASKS[task].hub_pipeline if task else None
    adapters = json.loads((export / SETTINGS).read_text(encoding="utf-8")) if (export / SETTINGS).is_file() else None
    results = [
        EvalResult(
            task_type=pipeline or task or "",
            dataset_type=_public(sets[0]),
            dataset_name=_public(sets[0]),
            dataset_config=config.data.data_config,
            dataset_split="test" if metric.startswith(f"{TEST}/") else None,
            metric_type=metric.rpartition("/")[2],
            metric_name=metric,
            metric_value=value,
        )
        for metric, value in metrics.items()  # of the run's own data set
        if sets and math.isfinite(value) and ("/" not in metric or metric.startswith((f"{TEST}/", "rewards/")))
    ]
    data = ModelCardData(
        model_name=title.rpartition("/")[2],
        library_name="peft" if adapters else "transformers",
        pipeline_tag=pipeline,
        base_model=base if base and is_hub_name(base) else None,
        datasets=[set_name for set_name in sets if is_hub_name(set_name)] or None,
        tags=["rapidformer_templates"],
        eval_results=results or None,
        ignore_metadata_errors=True,
    )
    # Local paths are not published.
    flags = {name: str(entry["value"]) for name, entry in plan.values.items() if name != "template"}
    flags = {n: v for n, v in flags.items() if is_hub_name(v) or ("/" not in v and not Path(v).exists())}
    card = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    text = card.format(
        header=data.to_yaml(),
        name=title,
        origin=f"started from `{_public(base)}`" if base else "was trained from scratch",
        version=importlib.metadata.version("rapidformer_templates"),
        length=f" for {counted(trained[0], 'step')} ({counted(trained[1], 'epoch')})" if trained else "",
        task=task or "of a script",
        code=_code(name, export, adapters, config.model.revision),
        metrics="\n".join(f"| {metric} | {value:.4f} |" for metric, value in metrics.items()) or "| none | |",
        data="\n".join(f"- `{_public(one)}`" for one in sets) or "Data of a script.",
        plan="\n".join(plan_lines(plan)),
        flags="\n".join(f"| `{flag}` | {value.replace('|', '/')} |" for flag, value in flags.items()),
    )
    ModelCard(text).save(export / CARD)


def write_card_of_merged(adapters: Path, merged: Path) -> None:
    """Write the model card of adapters, if there is one, into their merged model, with how to load that."""
    card = adapters / CARD
    if card.is_file():
        text = card.read_text(encoding="utf-8").replace("\nlibrary_name: peft\n", "\nlibrary_name: transformers\n", 1)
        before, _, rest = text.partition("```python\n")
        code, after = _code(None, merged, None, None), rest.partition("\n```")[2]
        write_text(merged / CARD, f"{before}```python\n{code}\n```{after}")


def _data_sets(config: RunConfig) -> list[str]:
    """Return the data sets of a run: names on the hub, or paths."""
    data = config.data
    if data.data_path:
        # A blend has weights between its paths.
        return [path for path in data.data_path if not path.replace(".", "", 1).isdigit()]
    names = [name for _, name in mixture_of(data.data_name)] or [data.data_name or ""]
    if data.data_dir is not None and not is_hub_name(data.data_dir):
        return [str(Path(data.data_dir, name).resolve()) for name in names]  # data/a looks like a name on the hub
    return [data.data_dir] if data.data_dir else [name for name in names if name]


def _public(name: str | None) -> str:
    """Return a name as it may be published: a name on the hub, or the last part of a local path."""
    return name if name and is_hub_name(name) else Path(name or "").name


def _code(name: str | None, export: Path, adapters: Mapping[str, Any] | None, revision: str | None) -> str:
    """Return Python code that loads the exported model.

    Args:
        name: its name on the hub. None: it is in a folder, which the code calls EXPORT.
        adapters: their settings. None if the whole model was exported.
        revision: that of the base, which adapters need, too.
    """
    file, source = config_file(export), f'"{name or "EXPORT"}"'
    folder, download = f"snapshot_download({source})", "from huggingface_hub import snapshot_download\n"
    if not name:
        folder, download = source, ""
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if str(config.get("model_type", "")).startswith(CONVERTED):
        return f"{download}from rapidformer_templates import load_mixture\n\nmodel = load_mixture({folder})"
    if not config:
        return f"""from pathlib import Path

{download}from safetensors.torch import load_file

weights = {{}}
for file in Path({folder}).glob("*.safetensors"):
    weights |= load_file(file)"""
    kind = (config.get("architectures") or ["AutoModel"])[0]
    classes, head, tokenizer = {kind}, "", ""
    load = f"model = {kind}.from_pretrained({source})"
    if (export / "tokenizer_config.json").is_file():
        classes |= {"AutoTokenizer"}
        tokenizer = f"\ntokenizer = AutoTokenizer.from_pretrained({source})"
    if adapters:
        classes |= {"AutoConfig"}
        base = _public(adapters.get("base_model_name_or_path")) or "BASE"
        of_base = f', revision="{revision}"' if revision else ""
        head = ("from huggingface_hub import hf_hub_download\n" if name else "") + "from peft import PeftModel\n"
        of_config = f'hf_hub_download({source}, "{file.name}")' if name else f'"EXPORT/{file.name}"'
        load = f"""config = AutoConfig.from_pretrained({of_config})
base = {kind}.from_pretrained("{base}"{of_base}, config=config)
model = PeftModel.from_pretrained(base, {source})"""
    return f"{head}from transformers import {', '.join(sorted(classes))}\n\n{load}{tokenizer}"
