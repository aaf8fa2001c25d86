"""``rapidformer evaluate --lm-eval``: the tasks of EleutherAI's lm-evaluation-harness, on an exported model."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rapidformer_templates.commands.export import ADAPTERS, base_named_in
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.run.saved_model import SavedModel

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "auto": "bfloat16"}
FORWARDED = {"micro_batch_size": "--batch_size", "max_eval_samples": "--limit", "device": "--device"}
"""Flags that the harness knows under another name."""
OTHERS = ("lm_eval", "base", "mixed_precision", "nproc_per_node", "trust_remote_code")


def evaluate_tasks(saved: SavedModel, values: Mapping[str, object]) -> int:
    """Run the harness, which prints its table. With a run folder, it also writes its results into ``RUN/lm-eval``.

    Args:
        values: flags of the command line by field name.

    Returns:
        The exit status of the harness.

    Raises:
        ConfigError: the harness is not installed, or a flag has no meaning for it.
    """
    if unknown := [name for name in values if name not in (*FORWARDED, *OTHERS)]:
        message = f"{spelling(unknown[0])} has no effect on the tasks of lm-eval"
        raise ConfigError(message, where="--lm-eval", hint="leave one of them out")
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("lm-eval is not installed", where="--lm-eval", hint="pip install 'lm-eval[hf]'")
    words = [sys.executable, "-m"]
    if (workers := values.get("nproc_per_node", 1)) != 1:
        words += ["accelerate.commands.launch", "--num_processes", str(workers), "-m"]
    words += ["lm_eval", "--model", "hf", "--model_args", _model(saved.folder, values)]
    words += ["--tasks", str(values["lm_eval"])]
    words += [word for name, flag in FORWARDED.items() if name in values for word in (flag, str(values[name]))]
    if values.get("trust_remote_code"):
        words.append("--trust_remote_code")
    if saved.run is not None:
        words += ["--output_path", str(saved.run / "lm-eval")]
    print(f"runs {shlex.join(words[2:])}", file=sys.stderr, flush=True)
    return subprocess.run(words, check=False).returncode


def _model(folder: Path, values: Mapping[str, object]) -> str:
    """Return the harness's description of the model: with adapters, they are loaded onto their base."""
    described = {"pretrained": str(folder)}
    if (folder / ADAPTERS).is_file():
        described = {"pretrained": str(values.get("base") or base_named_in(folder)), "peft": str(folder)}
    if precision := values.get("mixed_precision"):
        described["dtype"] = DTYPES[str(precision)]
    return ",".join(f"{name}={value}" for name, value in described.items())
