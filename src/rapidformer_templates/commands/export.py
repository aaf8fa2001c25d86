"""``rapidformer export``: writes the model of a checkpoint, or of adapters and their base.

torch is imported only when the export starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rapidformer_templates.errors import CheckpointError, ConfigError, ModelError
from rapidformer_templates.models.model_files import CONVERTED
from rapidformer_templates.planning.flag_parser import CommandParser, dashed
from rapidformer_templates.planning.hub import BESIDE_ADAPTERS
from rapidformer_templates.planning.request import config_file
from rapidformer_templates.planning.tasks import TASKS
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.out_of_memory import explained_without_plan
from rapidformer_templates.run.push_to_hub import CARD, write_card_of_merged
from rapidformer_templates.system.files import JSON_ERRORS, sync, writing

ADAPTERS = "adapter_config.json"
WRITTEN = (
    "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors",
    "adapter_base.json", BESIDE_ADAPTERS, "config.json", "generation_config.json", ADAPTERS,
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "vocab-*.json", "merges.txt", "bpe.codes",
    "*.jinja", "s*.model", "*.spm", "*.tiktoken", "*processor_config.json", "configuration_*.py", "modeling_*.py",
    "tokenization_*.py", "*processing_*.py", "model-*.gguf", CARD,
)  # fmt: skip
"""Files that transformers, peft and tokenizers write for a model. ``--overwrite`` replaces only these."""

CONVERTER = "convert_hf_to_gguf.py"
"""llama.cpp's own program, which ``--gguf`` calls."""

TYPES = ("f32", "f16", "bf16", "q8_0")
"""Types of the weights that the converter writes. ``llama-quantize`` makes smaller ones from the file."""


def main(argv: Sequence[str]) -> int:
    """Write the model of a run in the format of transformers, from a checkpoint or from adapters and their base.

    Args:
        argv: words after ``rapidformer export``.

    Raises:
        ConfigError: there is nothing to export, or the output exists already.
        CheckpointError: the checkpoint is incomplete.
        ModelError: llama.cpp's converter does not know the model.
    """
    options = build_parser().parse_args(dashed(argv))
    run = RunFolder(options.run)
    if not run.path.exists():
        raise ConfigError(f"{run.path} does not exist", where="RUN", hint="name the --save folder of a run")
    if options.base and not options.merge:
        message = "only --merge reads the base of adapters"
        raise ConfigError(message, where="--base", hint="add --merge, or leave it out")
    converter = find_converter() if options.gguf else None
    output = _written(run, options)
    print(f"wrote {write_gguf(converter, output, options.gguf) if converter else output}")
    if (line := serving_line(output)) is not None:
        print(line)
    return 0


def _written(run: RunFolder, options: argparse.Namespace) -> Path:
    """Write what is missing, and return its folder: an export, a merged model, or for ``--gguf`` the existing one.

    Raises:
        ConfigError: there is nothing to write.
    """
    adapters = next((f for f in (run.export, run.path) if (f / ADAPTERS).is_file()), None)
    if options.gguf and not options.merge and (adapters or (run.model / ADAPTERS).is_file()):
        raise ConfigError(f"{run.path} holds adapters", where="--gguf", hint="add --merge: it needs the whole model")
    if options.step is not None or (options.output and not (options.merge and adapters)):
        return _export(run, options)
    if options.merge and adapters:
        merged = adapters.with_name("merged")
        if options.gguf and not (options.output or options.overwrite) and _is_newer(merged, adapters):
            return merged
        output = _output(options, merged, reads=adapters)
        _merge(adapters, output, options.base)
        return output
    if not run.export.is_dir() or (options.overwrite and not options.merge):
        return _export(run, options)
    if options.merge:
        message = f"{run.path} holds no adapters"
        raise ConfigError(message, where="RUN", hint=f"a whole model is in its {run.export.name}/")
    if options.gguf:
        return run.export
    if adapters:
        message = f"{adapters} already holds the adapters, as peft reads them"
        raise ConfigError(message, hint="--merge writes the whole model")
    steps = ", ".join(map(str, _steps(run))) or "none is kept"
    hint = f"--step N exports another checkpoint: {steps}"
    raise ConfigError(f"{run.export} already holds the model", where="RUN", hint=hint)


def _is_newer(merged: Path, adapters: Path) -> bool:
    """Return whether there is a merged model that was written after the adapters."""
    written = merged / "config.json"
    return written.is_file() and written.stat().st_mtime_ns >= (adapters / ADAPTERS).stat().st_mtime_ns


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer export``."""
    parser = CommandParser(
        prog="rapidformer export",
        description="Write the model of a run as transformers' from_pretrained reads it, as the run itself would have"
        " exported it: of a run that was interrupted, of any of its checkpoints, or adapters added to their base."
        " It needs no data, and neither the workers nor the switches of the training.",
    )
    parser.add_argument("run", metavar="RUN", help="run folder; for --merge also a folder of adapters")
    what = parser.add_argument_group("what to export")
    text = "the checkpoint of step N (default: the best one, else the newest)"
    what.add_argument("--step", type=int, metavar="N", help=text)
    what.add_argument("--merge", action="store_true", help="add adapters to the weights of their base")
    text = "with --merge: folder of the base (default: the one that the adapters name)"
    what.add_argument("--base", metavar="FOLDER", help=text)
    text = "also write the model as one file for llama.cpp, with weights of this type. Needs llama.cpp's converter"
    what.add_argument("--gguf", choices=TYPES, help=text)
    where = parser.add_argument_group("where to")
    text = "folder to write (default: RUN/export, with --merge RUN/merged; and -step-N)"
    where.add_argument("--output", metavar="FOLDER", help=text)
    where.add_argument("--overwrite", action="store_true", help="replace an existing export")
    return parser


SERVED_RANK, RANKS = 16, (32, 64, 128, 256, 320, 512)
"""The largest rank of adapters that vLLM serves without a flag, and the other values that its flag takes."""


def serving_line(export: Path) -> str | None:
    """Return a line with the command that serves an exported model. None if it writes no text."""
    file = config_file(export)
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    kind = (config.get("architectures") or [""])[0]
    if not kind.endswith(TASKS["causal_lm"].model_classes) or str(config["model_type"]).startswith(CONVERTED):
        return None
    served = [str(export)]
    if (export / ADAPTERS).is_file():
        settings = json.loads((export / ADAPTERS).read_text(encoding="utf-8"))
        base = settings.get("base_model_name_or_path") or "BASE"
        served = [base, "--enable-lora", "--lora-modules", f"adapters={export}"]
        rank = settings.get("r", 0)
        if rank > SERVED_RANK:
            served += ["--max-lora-rank", str(next((size for size in RANKS if size >= rank), rank))]
    return f"serve it with vLLM: {shlex.join(['vllm', 'serve', *served])}"


def _export(run: RunFolder, options: argparse.Namespace) -> Path:
    """Export a checkpoint and return the output folder."""
    step, why = step_to_export(run, options.step, merge=options.merge)
    if not run.model.is_dir():
        message = f"{run.path} does not say what its model is: it was made by an earlier version"
        raise ConfigError(message, where="RUN", hint="finish it with --resume, which exports it")
    is_adapted = (run.model / ADAPTERS).is_file()
    if options.merge and not is_adapted:
        raise ConfigError(f"{run.path} trains no adapters", where="--merge", hint="leave it out")
    name = ("merged" if options.merge else "export") + (f"-step-{options.step}" if options.step is not None else "")
    output = _output(options, run.path / name, reads=run.model)

    from rapidformer_templates.run.checkpoint.format import folder_of, problem_of
    from rapidformer_templates.run.export import export_checkpoint
    from rapidformer_templates.run.saved_model import values_of

    checkpoint = folder_of(run.checkpoints, step)
    if problem := problem_of(checkpoint):
        hint = f"choose another one with --step: {', '.join(map(str, _steps(run)))}"
        raise CheckpointError(f"the checkpoint cannot be used: {problem}", where=str(checkpoint), hint=hint)
    print(f"from {checkpoint}{why}", file=sys.stderr)
    averages = "ema_decay" in values_of(run.path)
    if not options.merge:
        export_checkpoint(checkpoint, run.model, output, averages=averages)
        return output
    with tempfile.TemporaryDirectory(prefix=".adapters-", dir=run.path) as folder:
        export_checkpoint(checkpoint, run.model, Path(folder, "adapters"), averages=averages)
        _merge(Path(folder, "adapters"), output, options.base)
    return output


def _merge(adapters: Path, output: Path, base: str | None) -> None:
    from rapidformer_templates.switches.lora.exported import merge

    with explained_without_plan(str(adapters), "merge on a machine with more memory"):
        merge(adapters, output, base)
    write_card_of_merged(adapters, output)


def _output(options: argparse.Namespace, default: Path, *, reads: Path) -> Path:
    output = Path(options.output) if options.output else default
    if output.exists() and not options.overwrite:
        raise ConfigError(f"{output} already exists", where="--output", hint="give another one, or --overwrite")
    if output.resolve() == reads.resolve():
        what = "the adapters" if (reads / ADAPTERS).is_file() else "the run's description of its model"
        raise ConfigError(f"{what} would be replaced", where="--output", hint="give another folder")
    if output.is_dir():
        others = sorted(p.name for p in output.iterdir() if p.is_dir() or not any(map(p.match, WRITTEN)))
    else:
        others = [output.name] if output.exists() else []
    if others:
        message = f"{output} holds files that are not from an export, which would be lost: {', '.join(others[:3])}"
        raise ConfigError(message, where="--overwrite", hint="give another --output, or move them elsewhere")
    return output


def _steps(run: RunFolder) -> list[int]:
    """Return the steps of the existing checkpoints, newest first."""
    names = [path.name.removeprefix("step-") for path in run.checkpoints.glob("step-*")]
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def step_to_export(run: RunFolder, step: int | None, *, merge: bool) -> tuple[int, str]:
    """Return the step to export, and a text for the user with the reason for this choice."""
    steps = _steps(run)
    if not steps:
        hint = "name the --save folder of a run that has written a checkpoint"
        what = "no adapters, and no checkpoint" if merge else "no checkpoint"
        raise ConfigError(f"{run.path} holds {what}", where="RUN", hint=hint)
    if step is not None and step not in steps:
        existing = ", ".join(map(str, steps))
        message = f"{run.path} holds no checkpoint of step {step}"
        raise ConfigError(message, where="--step", hint=f"there is: {existing}")
    if step is not None:
        return step, ""
    try:
        state = json.loads((run.checkpoints / f"step-{steps[0]}" / "state.json").read_text(encoding="utf-8"))
        best = state.get("best")
        if best and best["step"] in steps:
            return best["step"], f", the best so far by {best['metric']} ({best['value']:.6g})"
    except JSON_ERRORS as error:
        message = f"its newest checkpoint cannot be read: {error}"
        raise CheckpointError(message, where=str(run.checkpoints), hint="choose another one with --step") from error
    return steps[0], ", the newest"


def find_converter() -> Path:
    """Return the path of the converter.

    Raises:
        ConfigError: the converter or the gguf package is missing.
    """
    found = shutil.which(CONVERTER)
    if found is None:
        hint = "put the folder of llama.cpp on PATH: PATH=$PATH:FOLDER"
        raise ConfigError(f"{CONVERTER} of llama.cpp is not on PATH", where="--gguf", hint=hint)
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the package gguf is not installed", where="--gguf", hint="pip install gguf")
    return Path(found)


def write_gguf(converter: Path, export: Path, weights: str) -> Path:
    """Convert an export. The file gets its name after it has been read and compared with the export.

    Args:
        export: folder of a whole model with its tokenizer.
        weights: type of the weights, one of :data:`TYPES`.

    Returns:
        The new file, ``model-TYPE.gguf`` in the folder.

    Raises:
        ModelError: the converter does not know the model or its tokenizer, or its file differs from the export.
    """
    target = export / f"model-{weights}.gguf"
    partial = target.with_suffix(".gguf.tmp")
    command = [sys.executable, str(converter), str(export), "--outfile", str(partial), "--outtype", weights]
    with writing(target):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode or not partial.is_file():
                said = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
                hint = f"the export itself is complete: {export}"
                raise ModelError(f"llama.cpp's converter failed: {said[-1]}", where=str(converter), hint=hint)
            _check_gguf(partial, export)
            sync(partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return target


def _check_gguf(file: Path, export: Path) -> None:
    """Compare the number of tokens, the end token and the chat template in a file with those of the tokenizer.

    Raises:
        ModelError: one of them differs.
    """
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    template = tokenizer.chat_template
    told = {name: field.contents() for name, field in GGUFReader(file).fields.items() if "tokenizer" in name}
    tokens = len(told.get("tokenizer.ggml.tokens") or ())
    pairs = {
        "number of tokens": (min(tokens, len(tokenizer)), len(tokenizer)),  # the converter adds unused ones
        "end token": (told.get("tokenizer.ggml.eos_token_id"), tokenizer.eos_token_id),
        "chat template": (
            told.get("tokenizer.chat_template"),
            template.get("default") if isinstance(template, dict) else template,
        ),
    }
    for what, (converted, own) in pairs.items():
        if converted != own:
            message = f"the {what} in llama.cpp's file differs from the export: {converted!r:.80}, not {own!r:.80}"
            raise ModelError(message, where=str(export), hint="update llama.cpp, which may not know this tokenizer")
