"""``benchmarks published-runs``: predicted seconds of a step, compared with published measurements of GPU clusters.

Each row of ``published_runs.csv`` is a run with its source. The row becomes a command line, and the planner predicts
the layout that the command line resolves to. A source is either used to choose the constants of the planner, or held
out.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

from benchmarks.contest import Advance, Answer, Columns, Flag, Row, asks, progress, table, verdict
from rapidformer_templates.commands.plan import plan_request
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.auto_strategy.layouts import PARTITIONINGS, layout_of, memory_options_of
from rapidformer_templates.switches.auto_strategy.memory import variant_of
from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject
from rapidformer_templates.switches.auto_strategy.step_seconds import predict_seconds
from rapidformer_templates.switches.auto_strategy.timing import find_hardware

FITTED = frozenset({"llm-foundry", "nanotron", "bloom-v100"})
"""Sources that the constants of the planner were chosen with. All other sources are held out."""

KINDS = {
    "V100-16": "v100-32gb",
    "V100-32": "v100-32gb",
    "A100": "a100-80gb",
    "A100-40": "a100-40gb",
    "A100-80": "a100-80gb",
    "H100-80": "h100-80gb",
    "H100-96": "h100-80gb",
    "H200": "h200-141gb",
}
"""``--device-kind`` for each GPU of the rows."""

PRECISIONS = {"fp32": [], "bf16": ["--bf16"], "fp16": ["--fp16"]}
RECOMPUTATION = {
    "full": ["--checkpoint-activations"],
    "selective": ["--checkpoint-activations", "--recompute-granularity", "selective"],
}

GOAL_MEDIAN, GOAL_WORST = 0.10, 0.30
"""Goals for sources that are held out: relative errors of the seconds of a step."""


def model_config(row: Mapping[str, str]) -> dict[str, object]:
    """Return the ``config.json`` of a row's model. A padded vocabulary is the same on all tensor-parallel workers."""
    multiple = 128 * int(row["tensor"] or 1)
    positions, vocabulary = int(row["seq_length"]), -(-int(row["vocab"] or 50257) // multiple) * multiple
    layers, hidden, heads, ffn = (int(row[name]) for name in ("layers", "hidden", "heads", "ffn_hidden"))
    config: dict[str, object] = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    if row["architecture"] in ("llama", "bert"):
        config |= {"model_type": row["architecture"], "num_hidden_layers": layers, "hidden_size": hidden}
        config |= {"num_attention_heads": heads, "num_key_value_heads": int(row["kv_heads"] or heads)}
        config |= {"intermediate_size": ffn, "max_position_embeddings": positions}
    else:
        config |= {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_inner": ffn}
        config |= {"n_positions": positions}
    return config | ({"attn_implementation": "eager"} if row["attention"] == "eager" else {})


def command(row: Mapping[str, str], folder: str) -> list[str]:
    """Return the words after ``rapidformer plan`` for a row.

    Args:
        folder: folder with the model's ``config.json``.
    """
    tensor, pipeline, virtual = (int(row[name] or 1) for name in ("tensor", "pipeline", "virtual_pipeline"))
    gpus, layers, stages = int(row["gpus"]), int(row["layers"]), pipeline * virtual
    words = ["--pretrained-model-name-or-path", folder, "--seq-length", row["seq_length"]]
    words += ["--device-kind", KINDS[row["gpu"]], "--world-size", str(gpus)]
    words += ["--local-world-size", str(min(gpus, int(row["gpus_per_node"] or 8)))]
    words += ["--micro-batch-size", row["micro_batch"], "--global-batch-size", row["global_batch"]]
    words += ["--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline)]
    if tensor > 1 and row["sequence_parallel"] == "yes":
        words.append("--sequence-parallel")
    if virtual > 1:
        words += ["--virtual-pipeline-size", str(virtual)]
    if pipeline > 1:
        words += ["--pipeline-stages", ",".join(str(len(range(stage, layers, stages))) for stage in range(stages))]
    divides = row["partitioning"] == "fsdp" and tensor * pipeline > 1
    for name, value in PARTITIONINGS["sharding-strategy" if divides else row["partitioning"]].items():
        words += [spelling(name)] if value is True else [spelling(name), str(value)]
    return [*words, *PRECISIONS[row["precision"]], *RECOMPUTATION.get(row["recompute"], [])]


def measured_seconds(row: Mapping[str, str]) -> float:
    """Return the published seconds of a step."""
    value, samples = float(row["value"]), float(row["global_batch"])
    match row["metric"]:
        case "step_seconds":
            return value
        case "samples_per_second":
            return samples / value
        case "tokens_per_second_per_gpu":
            return samples * float(row["seq_length"]) / (value * int(row["gpus"]))
        case other:
            raise ValueError(f"{other} is not a speed")


def variables(row: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that describe a row's cluster."""
    found = {"INTER_NODE_GBS": row["inter_node_gbs"]} if row.get("inter_node_gbs") else {}
    return found | ({"DEVICE_BANDWIDTH_GBS": "1920"} if row["gpu"] == "H100-96" else {})  # 80 % of 2.4 TB/s


class Predictions:
    """Predicts rows. Rows with the same model share its traces."""

    def __init__(self) -> None:
        self._subject: tuple[object, Subject] | None = None

    def seconds(self, row: Mapping[str, str]) -> float:
        """Return the predicted seconds of a step.

        Raises:
            RapidformerError: the planner refuses the command line.
        """
        model = model_config(row)
        with tempfile.TemporaryDirectory(prefix="rf-") as folder, patch.dict("os.environ", variables(row)):
            Path(folder, "config.json").write_text(json.dumps(model), encoding="utf-8")
            config, place, _ = plan_request(command(row, folder))
            plan = resolve(config, place)
            key = (model, row["seq_length"], config.get("pipeline_stages"), plan.switches)
            if self._subject is None or self._subject[0] != key:
                self._subject = key, Subject(config, plan, gpu=True)
            subject, layout = self._subject[1], layout_of(plan)
            # The loops of these measurements have fused kernels between their products.
            setting = replace(memory_options_of(plan, subject.shapes.width), fuses=True)
            trace = subject.shapes.trace(variant_of(layout, setting))
            hardware = find_hardware(place, plan.precision)
        cuts = layout.pipeline * layout.virtual
        stages = subject.shapes.stage_sizes(cuts) if layout.pipeline > 1 else ()
        return predict_seconds(layout, setting, trace, subject.facts, hardware, place.local_world_size, stages).total


def predict_rows(rows: Iterable[Mapping[str, str]], advance: Advance = lambda text: None) -> list[Row]:
    """Predict the rows that name a speed and all sizes. Refused rows have the reason in place of a prediction."""
    predictions, results = Predictions(), list[Row]()
    for row in rows:
        try:
            measured = measured_seconds(row)
            found: Row = {"id": row["id"], "source": row["id"].rpartition("-")[0], "measured": measured}
            found |= {
                "series": row["series"] or row["id"],
                "gpus": int(row["gpus"]),
                "batch": float(row["global_batch"]),
            }
            predicted = predictions.seconds(row)
            found |= {"predicted": predicted, "error": predicted / measured - 1}
        except (KeyError, ValueError) as error:  # a size is missing, or another GPU, precision or metric
            found = {"id": row["id"], "refused": f"not usable: {error}"}
        except RapidformerError as error:
            found = {"id": row["id"], "refused": error.message}
        results.append(found)
        advance(row["id"])
    return results


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's rank correlation of the pairs: 1 if both values order them in the same way."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / len(signs)


def weighted_median(series: Iterable[Sequence[float]]) -> float:
    """Return the median of all values, where each series has the same weight."""
    weighted = sorted((value, 1 / len(values)) for values in series for value in values)
    half, total = sum(weight for _, weight in weighted) / 2, 0.0
    for (value, weight), (following, _) in zip(weighted, [*weighted[1:], weighted[-1]], strict=True):
        total += weight
        if math.isclose(total, half):
            return (value + following) / 2
        if total > half:
            return value
    raise ValueError("no values")


def summary(source: str, rows: Sequence[Row]) -> Row:
    """Return the errors and the rank correlation of a source, with one vote for each series."""
    series: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        series[row["series"]].append(row)
    taus = []
    for members in series.values():
        per_sample = [
            (m["predicted"] * m["gpus"] / m["batch"], m["measured"] * m["gpus"] / m["batch"]) for m in members
        ]
        if len(members) > 2:
            taus.append(kendall_tau(per_sample))
    return {
        "source": source,
        "rows": len(rows),
        "series": len(series),
        "median": weighted_median([[abs(row["error"]) for row in members] for members in series.values()]),
        "bias": statistics.median(row["error"] for row in rows),
        "worst": max((row["error"] for row in rows), key=abs),
        "tau": statistics.mean(taus) if taus else None,
    }


@asks(
    Flag("rows", str(Path(__file__).with_suffix(".csv")), "file with the published rows", kind=str),
    Flag("only", "", "predict only rows whose id begins with one of these words, separated by commas", kind=str),
)
def answer(options: argparse.Namespace) -> Answer:
    """Predict all rows. The status is 0 even if a goal is missed."""
    with Path(options.rows).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["id"].startswith(tuple(options.only.split(",")))]
    with progress("published-runs", len(rows)) as advance:
        results = predict_rows(rows, advance)
    predicted = [row for row in results if "predicted" in row]
    summaries: list[Row] = []
    for group, is_fitted in (("fitted", True), ("held out", False)):
        members = [row for row in predicted if (row["source"] in FITTED) is is_fitted]
        names = dict.fromkeys(row["source"] for row in members)
        parts = {name: [row for row in members if row["source"] == name] for name in names}
        parts |= {"all": members} if members else {}
        summaries += [{"group": group, **summary(name, part)} for name, part in parts.items()]
    columns: Columns = {
        "group": "{group}",
        "source": "{source}",
        "rows": "{rows}",
        "series": "{series}",
        "median error": "{median:.1%}",
        "median with sign": "{bias:+.1%}",
        "worst": "{worst:+.0%}",
        "Kendall's tau": lambda row: "" if row["tau"] is None else f"{row['tau']:.2f}",
    }
    notes = [f"{row['id']}: {row['refused']}" for row in results if "refused" in row]
    for row in summaries:
        if (row["source"], row["group"]) == ("all", "held out"):
            is_met = row["median"] <= GOAL_MEDIAN and abs(row["worst"]) <= GOAL_WORST
            notes.append(
                f"goal: median {GOAL_MEDIAN:.0%}, worst {GOAL_WORST:.0%} on held-out sources: {verdict(is_met)}"
            )
    shown = table("Seconds of a step, predicted and published", summaries, columns, left=2)
    return Answer({"rows": results, "sources": summaries}, shown, notes)
