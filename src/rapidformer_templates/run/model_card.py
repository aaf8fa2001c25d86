"""The model card of an exported model: ``README.md`` with its task, data, metrics and plan, and how to load it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from rapidformer_templates.models.adapters import SETTINGS
from rapidformer_templates.models.expert_architectures import CONVERTED
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.flag_values import TEST, mixture_of
from rapidformer_templates.planning.hub import is_hub_name
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.tasks import TASKS
from rapidformer_templates.run.folder import Summary


def write_card(config: RunConfig, plan: Plan, summary: Summary, export: Path) -> None:
    """Write the model card into an exported model.

    Args:
        summary: content of ``summary.json``.
        export: the exported folder.
    """
    name = str(config.training.push_to_hub)
    base = config.model.pretrained_model_name_or_path
    task = config.training.task
    is_adapter = (export / SETTINGS).is_file()
    data = ModelCardData(
        model_name=name.rpartition("/")[2],
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=_pipeline_of(task),
        base_model=base if base and is_hub_name(base) else None,
        datasets=[set_name for set_name in _data_sets(config) if is_hub_name(set_name)] or None,
        tags=["rapidformer_templates"],
        eval_results=_results(config, summary["metrics"]) or None,
        ignore_metadata_errors=True,
    )
    origin = f"started from `{_public(base)}`" if base else "was trained from scratch"
    sections = [
        f"# {name}",
        f"This model {origin}. rapidformer_templates {summary['versions']['rapidformer_templates']} trained it for "
        f"{summary['steps']:,} steps ({summary['epochs']:g} epochs) with the task `{task or 'of a script'}`.",
        f"## How to load it\n\n```python\n{_code(name, export, config.model.revision)}\n```",
        "## Metrics\n\n" + _table(("metric", "value"), {k: f"{v:.4f}" for k, v in summary["metrics"].items()}),
        "## Training data\n\n" + ("\n".join(f"- `{_public(s)}`" for s in _data_sets(config)) or "Data of a script."),
        "## Plan\n\n" + _table(("", ""), _plan(plan)) + "\n\n" + _table(("flag", "value"), _values(plan)),
    ]
    body = "\n\n".join(sections)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n").save(export / "README.md")


def _pipeline_of(task: str | None) -> str | None:
    """Return the hub's name of a task."""
    return TASKS[task].hub_pipeline if task else None


def _data_sets(config: RunConfig) -> list[str]:
    """Return the data sets of a run: names on the hub, or paths."""
    data = config.data
    if data.data_path:
        # A blend has weights between its paths.
        return [path for path in data.data_path if not path.replace(".", "", 1).isdigit()]
    names = [name for _, name in mixture_of(data.data_name)] or [data.data_name or ""]
    on_hub = data.data_dir is None or is_hub_name(data.data_dir)
    if not on_hub:
        return [str(Path(str(data.data_dir), name)) for name in names]
    return [data.data_dir] if data.data_dir else [name for name in names if name]


def _results(config: RunConfig, metrics: Mapping[str, float]) -> list[EvalResult]:
    """Return the finite metrics of the run's own data set in the form of the hub's index."""
    task = config.training.task
    sets = _data_sets(config)
    return [
        EvalResult(
            task_type=_pipeline_of(task) or task or "",
            dataset_type=_public(sets[0]),
            dataset_name=_public(sets[0]),
            dataset_config=config.data.data_config,
            dataset_split="test" if metric.startswith(f"{TEST}/") else None,
            metric_type=metric.rpartition("/")[2],
            metric_name=metric,
            metric_value=value,
        )
        for metric, value in metrics.items()
        if sets and math.isfinite(value) and ("/" not in metric or metric.startswith((f"{TEST}/", "rewards/")))
    ]


def _public(name: str | None) -> str:
    """Return a name as it may be published: a name on the hub, or the last part of a local path."""
    return name if name and is_hub_name(name) else Path(name or "").name


def _code(name: str, export: Path, revision: str | None) -> str:
    """Return Python code that loads the exported model from the hub.

    Args:
        revision: that of the base, which adapters need, too.
    """
    file = export / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    kind = (config.get("architectures") or ["AutoModel"])[0]
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    has_tokenizer = (export / "tokenizer_config.json").is_file()
    if str(config.get("model_type", "")).startswith(CONVERTED):
        load = [
            "from huggingface_hub import snapshot_download",
            "from rapidformer_templates import load_mixture",
            "",
            f'model = load_mixture(snapshot_download("{name}"))',
        ]
        return "\n".join(load)
    if not config:
        load = ["from huggingface_hub import hf_hub_download", "from safetensors.torch import load_file", ""]
        return "\n".join([*load, f'weights = load_file(hf_hub_download("{name}", "model.safetensors"))'])
    imports = ", ".join(sorted({kind, *(["AutoTokenizer"] if has_tokenizer else [])}))
    load = [f'model = {kind}.from_pretrained("{name}")']
    head = [f"from transformers import {imports}", ""]
    if (export / SETTINGS).is_file():
        settings = json.loads((export / SETTINGS).read_text(encoding="utf-8"))
        imports = ", ".join(sorted({"AutoConfig", kind, *(["AutoTokenizer"] if has_tokenizer else [])}))
        head = ["from peft import PeftModel", f"from transformers import {imports}", ""]
        base = _public(settings.get("base_model_name_or_path")) or "BASE"
        of_base = f', revision="{revision}"' if revision else ""
        load = [
            f'base = {kind}.from_pretrained("{base}"{of_base}, config=AutoConfig.from_pretrained("{name}"))',
            f'model = PeftModel.from_pretrained(base, "{name}")',
        ]
    return "\n".join([*head, *load, *([tokenizer] if has_tokenizer else [])])


def _plan(plan: Plan) -> dict[str, str]:
    sizes = plan.sizes
    layout = f"tensor {sizes.tensor} × pipeline {sizes.pipeline} × data {sizes.data}"
    micro = f"micro batches of {sizes.micro_batch} on {sizes.data} workers, {sizes.accumulation} accumulated"
    return {
        "workers": f"{sizes.world} × {plan.device} = {layout}",
        "precision": plan.precision,
        "batch": f"{sizes.global_batch} samples: {micro}",
        "optimizer": f"{plan.optimizer}: {plan.optimizer_implementation}",
        "switches": ", ".join(plan.switches) or "none",
    }


def _values(plan: Plan) -> dict[str, str]:
    """Return the flags that are not defaults. Local paths are not published."""
    shown = {name: str(entry["value"]) for name, entry in plan.values.items() if name != "template"}
    return {
        f"`{name}`": value
        for name, value in shown.items()
        if is_hub_name(value) or ("/" not in value and not Path(value).exists())
    }


def _table(head: tuple[str, str], rows: Mapping[str, str]) -> str:
    lines = (
        f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in [head, ("---", "---"), *rows.items()]
    )
    return "\n".join(lines)
