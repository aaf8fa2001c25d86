"""Finds a fine-tuning data set and its columns, and counts its training rows. Plans use this, so torch is not imported.

The search order is as follows. EXT is one of csv, tsv, json, jsonl, parquet. ``.gz`` may follow all but parquet.

0. If ``DIR`` is a file, it is the training part.
1. ``DIR/NAME/``, or ``DIR`` itself without a name. It is a folder saved by ``datasets``, else it has files called
   ``train.EXT``, ``validation.EXT`` (or valid, val, dev, eval) and ``test.EXT``, which may be sharded
   (``train-00000-of-00002.parquet``). Otherwise its only file is used.
2. ``DIR/NAME`` with its extension, or ``DIR/NAME.EXT``: one file.
3. ``DIR/NAME-train.EXT``, ``DIR/NAME-valid.EXT`` and so on, with ``-``, ``_`` or ``.`` before the part. Validation and
   test files may also accompany the file of 2 if they have its extension.
4. The folders ``train``, ``validation`` … of ``DIR/NAME/``, with any files in them. Otherwise ``DIR/NAME/data/``, as on
   the hub. Otherwise the configuration NAME that ``DIR/README.md`` describes.
5. If ``DIR`` is not a folder: the hub data set of that name, with NAME as its configuration. Without ``--data-dir``
   NAME is that data set, and ``--data-config`` its configuration. It is downloaded unless it is in the cache of
   ``datasets``.

A part is one file, or all shards of one, or all files of its folder or of a card's list, in the order of their names.
If more than one thing fits (``test.csv`` and ``test.jsonl``, ``dev`` and ``validation``), it is refused, because one
may be a copy of the other.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Literal

import yaml

from rapidformer_templates.data.finetuning import hub_cache
from rapidformer_templates.data.finetuning.hub_cache import PART_NAMES
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.files import ROW_READERS, data_stem, data_suffix, parquet_row_count
from rapidformer_templates.errors import DataError, MistakeCollector, RapidformerError, did_you_mean
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flag_values import TEST, Epochs, mixture_of, named_sets
from rapidformer_templates.planning.flags import DataFlags
from rapidformer_templates.planning.tasks import TASKS, tasks_with
from rapidformer_templates.system.files import JSON_ERRORS, check_downloaded

STEM = re.compile(rf"^(?:(?P<name>.+)[-_.])?(?P<part>{'|'.join(PART_NAMES)})(?:-\d+-of-\d+)?$")
SHARD = re.compile(r"-(\d+)-of-(\d+)$")
READ = ("train", "valid")
"""The parts that a run uses. ``--evaluate-test`` adds the test part."""

NAMES_IN_MESSAGES = {"train": "training", "valid": "validation", TEST: "test"}
"""Names of the parts in messages."""

SAVED = ("dataset_dict.json", "state.json")
"""Files that mark a folder saved by ``datasets``."""

SAVED_DATA_ERRORS = (*JSON_ERRORS, NotImplementedError)
"""Errors of reading a folder that ``datasets`` saved if one of its files is damaged or has another form."""

FIXED = (".csv", ".tsv", ".parquet")
"""Formats in which all rows have the same columns."""

MAX_READ_BYTES = 5_000_000
"""Files of other formats are read for their columns only up to this size."""

MAX_COUNTED_BYTES = 200_000_000
"""Text files are counted only if their total size is at most this number of bytes."""


@dataclass(frozen=True)
class Located:
    """The location of a data set.

    Attributes:
        kind: files of rows, folders that ``datasets`` saved, or Arrow files of its cache.
        name: the folder or the name of the data set, for messages.
        parts: the files or folders of each existing part: ``train``, ``valid`` and ``test``.
    """

    kind: Literal["files", "saved", "cached"]
    name: str
    parts: Mapping[str, list[Path]]

    def __post_init__(self) -> None:
        check_downloaded(chain(*self.parts.values()), DataError)


def locate(flags: DataFlags, read: Sequence[str] | None = None) -> Located:
    """Find the data set.

    Args:
        read: the parts that will be read. Each of them must be unambiguous. None means the parts of a run with these
            flags.

    Raises:
        DataError: nothing was found, more than one thing fits, or a flag has no effect on what was found.
    """
    read = parts_read(flags) if read is None else read
    if flags.data_dir is None:
        if flags.data_name is None:
            raise DataError("no data is named", where="--data-dir", hint="give --data-dir DIR and --data-name NAME")
        return _on_hub(flags.data_name, flags, "--data-name", read)
    check_data_folder(flags)
    folder = Path(flags.data_dir)
    if not folder.exists():
        config = flags.data_config or flags.data_name
        return _on_hub(flags.data_dir, replace(flags, data_config=config), "--data-dir", read)
    for flag, value in {"--data-config": flags.data_config, "--data-split": flags.data_split}.items():
        if value is not None:
            hint = f"leave it out, or name a data set of the hub: --data-name ORG/NAME without --data-dir {folder}"
            raise DataError(f"{flag} has no effect on local files", where=flag, hint=hint)
    if folder.is_file():
        return _named_file(folder, flags.data_name)
    name = flags.data_name
    if name is not None and (folder / name).is_dir():
        folder, name = folder / name, None
    if name is None and any((folder / mark).is_file() for mark in SAVED):
        return Located("saved", str(folder), _by_part(_saved_parts(folder), read, folder))
    return Located("files", str(folder), _locate(folder, name, read))


def is_on_hub(flags: DataFlags) -> bool:
    """Return whether the data set is on the hub, so that reading it may download it."""
    return flags.data_name is not None if flags.data_dir is None else not Path(flags.data_dir).exists()


def check_data_folder(flags: DataFlags) -> None:
    """Check that ``--data-dir`` names a folder or a file, or may be the name of a data set.

    Raises:
        DataError: it does not.
    """
    folder = Path(flags.data_dir or "")
    if not folder.exists() and not hub_cache.may_be_data_set(str(flags.data_dir)):
        siblings = [str(p) for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        advice = f"give the folder that holds the files, or a name in {hub_cache.cache_root()}"
        hint = did_you_mean(str(folder), siblings, advice)
        raise DataError(f"the folder {folder} does not exist", where="--data-dir", hint=hint)


def _named_file(file: Path, name: str | None) -> Located:
    """Return a single file as the training part.

    Raises:
        DataError: files of its kind are not read, or ``--data-name`` names something in it.
    """
    if data_suffix(file) not in ROW_READERS:
        hint = f"files can be {', '.join(ROW_READERS)}"
        raise DataError(f"{file} is not a data file that is read", where="--data-dir", hint=hint)
    if name is not None:
        hint = f"leave out --data-name, or give the folder: --data-dir {file.parent}"
        raise DataError(f"{file} is a file, so there is no data set '{name}' in it", where="--data-name", hint=hint)
    return Located("files", str(file), {"train": [file]})


def parts_read(flags: DataFlags) -> tuple[str, ...]:
    """Return the parts that a run reads."""
    return (*READ, TEST) if flags.evaluate_test else READ


def _on_hub(name: str, flags: DataFlags, flag: str, read: Sequence[str]) -> Located:
    folder = hub_cache.find_or_download(name, flags.data_config, flag)
    return Located("cached", name, _by_part(hub_cache.cached_files(folder, name, flags.data_split), read, name))


def _locate(folder: Path, name: str | None, read: Sequence[str]) -> dict[str, list[Path]]:
    """Return the files of each part, by the rules in the module docstring."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and data_suffix(p) in ROW_READERS)
    if name and (training_file := folder / name) in files:
        others = _neighbouring_parts(training_file, files, read) if "valid" in read else {}
        return {"train": [training_file], **others}
    parts = _parts_by_name(name, files)
    if "train" not in parts:
        training = [p for p in files if name in (p.name, data_stem(p))] if name else ([] if parts else files)
        if training:
            parts["train"] = training
    for part in parts.keys() & set(read):
        _check_one(parts[part], folder)
    if not parts and name is None:
        by_folder: dict[str, list[Path]] = {}
        for inner in sorted(inner for inner in folder.iterdir() if inner.name in PART_NAMES):
            by_folder[inner.name] = sorted(p for p in inner.glob("*") if data_suffix(p) in ROW_READERS)
        parts = _by_part({part: files for part, files in by_folder.items() if files}, read, folder)
    if not parts:
        parts = _by_part(_parts_in_readme(folder, name), read, folder)
    if not parts and name is None and (folder / "data").is_dir():
        return _locate(folder / "data", name, read)
    if not parts:
        names_there = sorted(p.name for p in folder.iterdir())
        message = f"there is no data set '{name}' in {folder}" if name else f"there is no data file in {folder}"
        listed = ", ".join(names_there[:20]) or "nothing"
        advice = f"the folder holds: {listed}; files can be {', '.join(ROW_READERS)}"
        hint = did_you_mean(name or "", names_there, advice)
        raise DataError(message, where="--data-name" if name else "--data-dir", hint=hint)
    return parts


def _parts_by_name(name: str | None, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files whose names mark them as parts of the data set ``name``."""
    parts: dict[str, list[Path]] = {}
    for path in files:
        match = STEM.match(data_stem(path))
        if match and match["name"] == name:
            parts.setdefault(PART_NAMES[match["part"]], []).append(path)
    return parts


def _neighbouring_parts(training_file: Path, files: Sequence[Path], read: Sequence[str]) -> dict[str, list[Path]]:
    """Return the validation and test files next to a training file that have the same extension."""
    match = STEM.match(data_stem(training_file))
    name = match["name"] if match and PART_NAMES[match["part"]] == "train" else data_stem(training_file)
    suffix = data_suffix(training_file)
    parts = _parts_by_name(name, [path for path in files if data_suffix(path) == suffix and path != training_file])
    parts.pop("train", None)
    for part in parts.keys() & set(read):
        _check_one(parts[part], training_file.parent)
    return parts


def _check_one(files: Sequence[Path], folder: Path) -> None:
    """Check that the files of a part are a single file, or all shards of one."""
    numbers = [SHARD.search(data_stem(path)) for path in files]
    numbered = [(path, of) for path, of in zip(files, numbers, strict=True) if of]
    shards = [(data_stem(path)[: of.start()], data_suffix(path), of[2]) for path, of in numbered]
    if len(files) > 1 and (len(shards) < len(files) or len(set(shards)) > 1):
        hint = "keep one, or choose one with --data-name: " + ", ".join(path.name for path in files)
        raise DataError(f"several files in {folder} fit", where="--data-name", hint=hint)
    if shards and len({int(of[1]) for of in numbers if of}) != int(shards[0][2]):
        names_there = ", ".join(path.name for path in files)
        hint = f"add the others; there is: {names_there}"
        message = f"only {len(files)} of {int(shards[0][2])} shards are in {folder}"
        raise DataError(message, where="--data-dir", hint=hint)


def _by_part(files: Mapping[str, list[Path]], read: Sequence[str], where: Path | str) -> dict[str, list[Path]]:
    """Group what was found under names such as ``dev`` by our names of the parts."""
    names: dict[str, list[str]] = {}
    for name in files:
        names.setdefault(PART_NAMES[name], []).append(name)
    for part, fitting in names.items():
        if part in read and len(fitting) > 1:
            hint = f"keep one of {', '.join(fitting)}"
            message = f"several parts of {where} are for {NAMES_IN_MESSAGES[part]}"
            raise DataError(message, where="--data-name", hint=hint)
    return {part: [path for name in fitting for path in files[name]] for part, fitting in names.items()}


def _parts_in_readme(folder: Path, name: str | None) -> dict[str, list[Path]]:
    """Return the files of a configuration by split, from the YAML header of ``README.md`` as on the hub."""
    readme = folder / "README.md"
    try:
        head = re.match(r"---\n(.*?)\n---", readme.read_text(encoding="utf-8"), re.DOTALL) if readme.is_file() else None
        configs = (yaml.safe_load(head[1]) or {}).get("configs", []) if head else []
        usual = name or "default"
        chosen = next(c for c in configs if c["config_name"] == usual or (name is None and c.get("default")))
        files = chosen["data_files"]
        listed = files if isinstance(files, list) else [{"split": "train", "path": files}]
        entries = [e if isinstance(e, dict) else {"split": "train", "path": e} for e in listed]
        parts: dict[str, list[Path]] = {}
        for entry in entries:
            patterns = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
            for pattern in patterns:
                _check_inside(pattern, readme)
            files = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
            if entry["split"] in PART_NAMES and files:
                parts.setdefault(entry["split"], []).extend(files)
    except (*SAVED_DATA_ERRORS, StopIteration, yaml.YAMLError):
        return {}
    return parts


def _check_inside(name: str, written_in: Path) -> None:
    """Raise a :class:`DataError` if a file that came with the data refers to data outside of its folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        hint = "copy the data into the folder, or name them yourself with --data-dir and --data-name"
        raise DataError(f"it names data outside its folder: {name}", where=str(written_in), hint=hint)


def _saved_parts(folder: Path) -> dict[str, list[Path]]:
    """Return the folder of each part that ``datasets`` saved, by name. Without parts it is the folder itself.

    Raises:
        DataError: the list of parts cannot be read.
    """
    listed = folder / "dataset_dict.json"
    if not listed.is_file():
        return {"train": [folder]}
    try:
        names = [str(name) for name in json.loads(listed.read_text(encoding="utf-8"))["splits"]]
    except SAVED_DATA_ERRORS as error:
        raise unreadable_error(folder, error) from error
    return {name: [folder / name] for name in names if name in PART_NAMES}


def unreadable_error(folder: Path, error: Exception) -> DataError:
    reason = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
    return DataError(f"the saved data set cannot be read: {reason}", where=str(folder), hint="save it again")


def held_out_rows(rows: int, fraction: float) -> int:
    """Return how many rows ``--validation-fraction`` holds out: at least one, and never all."""
    return min(max(1, round(rows * fraction)), rows - 1)


def flags_of_sets(flags: DataFlags) -> list[DataFlags]:
    """Return the flags for each data set of a mixture. A single data set keeps its flags.

    Raises:
        DataError: weights and names do not alternate.
    """
    mixture = mixture_of(flags.data_name)
    return [replace(flags, data_name=name) for _, name in mixture] if mixture else [flags]


def evaluated_sets(flags: DataFlags) -> dict[str, DataFlags]:
    """Return the flags for each additional validation set of ``--eval-data-name``, by name.

    A set is a folder or a file, relative to ``--data-dir`` or to the working directory. Otherwise it is anything
    that ``--data-name`` accepts.

    Raises:
        DataError: a name cannot be used.
    """
    folder = Path(flags.data_dir or ".")
    is_file = folder.is_file()
    if is_file:
        folder = folder.parent
    sets = {}
    for name, of in named_sets(flags.eval_data_name, "--eval-data-name").items():
        alone = replace(flags, eval_data_name=None, evaluate_test=False, data_config=None, data_split=None)
        if is_file:
            alone = replace(alone, data_dir=str(folder))
        path = next((path for path in (folder / of, Path(of)) if path.is_dir() or path.is_file()), None)
        if path is None:
            sets[name] = replace(alone, data_name=of)
        elif path.is_dir():
            sets[name] = replace(alone, data_dir=str(path), data_name=None)
        else:
            sets[name] = replace(alone, data_dir=str(path.parent), data_name=path.name)
    return sets


def locate_evaluated(name: str, flags: DataFlags) -> tuple[Located, list[Path]]:
    """Find an additional validation set and its files, as in :func:`locate_part`.

    Raises:
        DataError: nothing was found, or it has several parts but no validation part.
    """
    try:
        return locate_part(flags, None, "name one of its files")
    except DataError as error:
        raise DataError(error.message, where=f"--eval-data-name, {name}", hint=error.hint) from None


def locate_part(
    flags: DataFlags, part: str | None, advice: str = "choose one with --part"
) -> tuple[Located, list[Path]]:
    """Find a data set of which one part is read, and the files of that part.

    Args:
        part: ``train``, ``valid`` or ``test``. None is the validation part, or the only part.
        advice: what to do if the part does not exist.

    Raises:
        DataError: there is no data set or no such part, or several files fit.
    """
    parts = locate(flags, read=()).parts
    chosen = part or (next(iter(parts)) if len(parts) == 1 else "valid")
    if chosen not in parts:
        values = {"valid": "validation"}  # --part names the parts so
        shown = ", ".join(f"{values.get(part, part)} ({', '.join(map(str, files))})" for part, files in parts.items())
        where = f"--data-name {flags.data_name}" if flags.data_name else f"--data-dir {flags.data_dir}"
        hint = f"{advice}; there is: {shown or 'none'}"
        raise DataError(f"the data set has no {NAMES_IN_MESSAGES[chosen]} part", where=where, hint=hint)
    located = locate(flags, read=(chosen,))
    return located, located.parts[chosen]


def check_located(flags: DataFlags) -> None:
    """Check that the data sets of a run exist, with the parts that it evaluates.

    Raises:
        DataError: a data set is missing, or several files fit.
    """
    check_evaluated(flags)
    for one in flags_of_sets(flags):
        locate(one)


def check_evaluated(flags: DataFlags) -> None:
    """Check that the sets that are evaluated in addition to the validation part exist.

    Raises:
        DataError: an additional validation set, or the test part, does not exist.
    """
    for name, one in evaluated_sets(flags).items():
        locate_evaluated(name, one)
    if flags.evaluate_test and all(TEST not in locate(one).parts for one in flags_of_sets(flags)):
        hint = "name a file or a folder of it test, or leave the flag out"
        raise DataError("the data set has no test part", where="--evaluate-test", hint=hint)


def training_samples(config: RunConfig) -> int | None:
    """Return the number of samples per epoch if it is cheap to count, else None."""
    flags = config.data
    is_local = flags.data_dir is not None and Path(flags.data_dir).exists()  # a plan must not download a data set
    has_samples_as_rows = config.training.task in tasks_with(lambda task: task.rows_are_samples)
    may_leave_out = flags.skip_bad_lines  # only a task knows which rows it cannot use
    if not has_samples_as_rows or flags.pack_sequences or flags.streaming or may_leave_out or not is_local:
        return None
    total = 0
    try:
        for one in flags_of_sets(flags):
            located = locate(one)
            files = tuple((path, path.stat().st_size) for path in located.parts.get("train", ()))
            rows = None if located.kind == "cached" else _rows(files, saved=located.kind == "saved")
            if not rows:
                return None
            if "valid" not in located.parts and one.validation_fraction > 0:
                rows -= held_out_rows(rows, one.validation_fraction)
            total += min(rows, one.max_train_samples or rows)
    except (RapidformerError, *SAVED_DATA_ERRORS):
        return None  # the training reports the error
    return total


def steps_of(config: RunConfig, epochs: Epochs, global_batch: int) -> int | None:
    """Return the optimizer steps of a number of epochs if the samples are cheap to count, else None."""
    samples = training_samples(config)
    return epochs.steps(math.ceil(samples / global_batch)) if samples else None


@cache
def _rows(files: Sequence[tuple[Path, int]], *, saved: bool) -> int | None:
    """Return the number of rows in files or saved folders, or None if counting would take too long."""
    if saved:
        import pyarrow as pa

        rows = 0
        for folder, _ in files:  # the headers of the batches tell their rows
            for name in json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]:
                _check_inside(name["filename"], folder / "state.json")
                with pa.memory_map(str(folder / name["filename"])) as file, pa.ipc.open_stream(file) as batches:
                    rows += sum(batch.num_rows for batch in batches)
        return rows
    texts = [(path, size) for path, size in files if data_suffix(path) != ".parquet"]
    if sum(size for _, size in texts) > MAX_COUNTED_BYTES:
        return None
    rows = sum(parquet_row_count(path) for path, _ in files if data_suffix(path) == ".parquet")
    return rows + sum(1 for path, _ in texts for _ in ROW_READERS[data_suffix(path)](path, BadLines(skip=True)))


def find_column(columns: Sequence[str], file: str, flag: str, value: str | None, usual: Sequence[str]) -> str:
    """Return the column that a flag names, else the first of the usual names that exists.

    Args:
        columns: the columns of the file.
        value: the value of the flag.

    Raises:
        DataError: there is none. The message lists the columns.
    """
    where = f"{spelling(flag)} {value}" if value else file
    if value is None:
        usual_name = next((name for name in usual if name in columns), None)
        if usual_name is not None:
            return usual_name
        message = f"none of the columns is called {', '.join(dict.fromkeys(usual))} in {file}"
        raise DataError(message, where=where, hint=f"choose one with {spelling(flag)}: {', '.join(columns)}")
    if value in columns:
        return value
    message = f"there is no column '{value}' in {file}"
    raise DataError(message, where=where, hint=did_you_mean(value, columns, f"columns: {', '.join(columns)}"))


def check_column(columns: Sequence[str], file: str, flag: str, name: str) -> None:
    """Check that a column exists that was used to read other rows.

    Args:
        columns: the columns of the file.
        flag: the flag that names another column.

    Raises:
        DataError: it does not exist. The message lists the columns.
    """
    if name not in columns:
        hint = f"columns: {', '.join(columns)}; {spelling(flag)} names another one"
        message = f"there is no column '{name}', which was used to read the training part"
        raise DataError(message, where=file, hint=did_you_mean(name, columns, hint))


def columns_of(path: Path) -> list[str] | None:
    """Return the columns of a file, or None if it has no row, or if finding them would take long."""
    reader = ROW_READERS.get(data_suffix(path))
    if reader is None or (data_suffix(path) not in FIXED and path.stat().st_size > MAX_READ_BYTES):
        return None
    rows = (row for _, row in reader(path, BadLines(skip=True)))
    if data_suffix(path) in FIXED:
        return list(next(rows, {})) or None
    return list(dict.fromkeys(name for row in rows for name in row)) or None


def check_training_columns(flags: DataFlags) -> None:
    """Check that the training files have the columns that flags name.

    Raises:
        DataError: a column is missing.
    """
    values = {flag: getattr(flags, flag) for flag in ("text_column", "pair_column", "label_column", "tools_column")}
    named = {flag: value for flag, value in values.items() if value is not None}
    for one in flags_of_sets(flags) if named else ():
        located = locate(one)
        files = located.parts.get("train", []) if located.kind == "files" else []
        columns = columns_of(files[0]) if files else None
        if columns is None or "paragraphs" in columns:  # SQuAD's nested rows get their columns later
            continue
        mistakes = MistakeCollector()
        for flag, value in named.items():
            mistakes.run(find_column, columns, str(files[0]), flag, value, ())
        mistakes.raise_all()


def check_input_columns(task: str | None, flags: DataFlags, trained: Mapping[str, str | None], path: Path) -> None:
    """Check that a file of rows to predict has the columns of the task.

    Args:
        task: the task of the model.
        trained: the columns of the training part, by flag.

    Raises:
        DataError: a column is missing.
    """
    columns = columns_of(path)
    if task is None or columns is None or "paragraphs" in columns:
        return
    facts = TASKS[task]
    mistakes = MistakeCollector()
    for flag, usual in facts.input_columns.items():
        value, trained_name = getattr(flags, flag), trained.get(flag)
        with mistakes.collect():
            # A text of any usual column can be continued, and not only of the one that the model was trained on.
            if value is None and trained_name is not None and not facts.continues_text:
                check_column(columns, str(path), flag, trained_name)
            elif value is not None or (usual and trained_name not in columns):
                find_column(columns, str(path), flag, value, usual)
    mistakes.raise_all()
