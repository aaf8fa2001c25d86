"""Writers of rows, in the formats that can be read again."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from rapidformer_templates.data.text.files import Row, data_suffix, is_compressed

to_json = partial(json.dumps, ensure_ascii=False, allow_nan=False, default=str)


def _write_lines(file: io.BufferedIOBase, rows: Iterable[Row]) -> None:
    file.writelines(f"{to_json(row)}\n".encode() for row in rows)


def _write_list(file: io.BufferedIOBase, rows: Iterable[Row]) -> None:
    lines = ",\n".join(map(to_json, rows))
    file.write(f"[\n{lines}\n]\n".encode())


def _write_parquet(file: io.BufferedIOBase, rows: Iterable[Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), file)


def _write_delimited(file: io.BufferedIOBase, rows: Iterable[Row], delimiter: str) -> None:
    """Write a column for each value. An object has one for each of its keys (``prediction.label``), a list is JSON."""
    flat = [dict(_cells(row)) for row in rows]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in flat for key in row)), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(flat)
    file.write(text.getvalue().encode())


def _cells(values: Mapping[str, object], before: str = "") -> Iterable[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _cells(value, f"{before}{key}.")
        else:
            yield before + key, to_json(value) if isinstance(value, list) else value


ROW_WRITERS: dict[str, Callable[[io.BufferedIOBase, Iterable[Row]], None]] = {
    ".jsonl": _write_lines,
    ".json": _write_list,
    ".csv": partial(_write_delimited, delimiter=","),
    ".tsv": partial(_write_delimited, delimiter="\t"),
    ".parquet": _write_parquet,
}
"""Row writers by file extension."""


def write_rows(path: Path, name: Path, rows: Iterable[Row]) -> None:
    """Write rows to a file in the format of a name, compressed if the name ends with ``.gz``."""
    with gzip.open(path, "wb") if is_compressed(name) else path.open("wb") as file:
        ROW_WRITERS[data_suffix(name)](file, rows)
