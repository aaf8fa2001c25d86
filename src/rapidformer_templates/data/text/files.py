"""Readers and writers of single files. Readers yield rows or documents one at a time, each with its line number.

Lines that cannot be read are recorded (:mod:`~rapidformer_templates.data.text.bad_lines`). Everything is read as UTF-8,
and a byte-order mark is allowed. UTF-16 and UTF-32 are recognized by that mark. Files with the further extension
``.gz`` are decompressed.
"""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.errors import DataError, counted, did_you_mean
from rapidformer_templates.system.files import check_downloaded

if TYPE_CHECKING:
    import pyarrow.parquet as pq


Row = dict[str, object]
"""The values of a row by column: texts, numbers, lists and dicts of them, or None."""

TextUnit = Literal["paragraph", "line", "file"]
"""The unit of text that is one document in a ``.txt`` file."""


@dataclass(frozen=True)
class Span:
    """Whole lines of a file, so that several processes can share one file.

    Attributes:
        start, stop: its bytes, [start, stop).
        line: number of its first line in the file, from 1.
        lines: the lines themselves, if the bytes of the file cannot be read from the middle (``.gz``, UTF-16).
    """

    start: int
    stop: int
    line: int
    lines: bytes | None = None

    def read(self, path: Path) -> BinaryIO:
        """Read the bytes into an in-memory file."""
        if self.lines is not None:
            return io.BytesIO(self.lines)
        with path.open("rb") as file:
            file.seek(self.start)
            return io.BytesIO(file.read(self.stop - self.start))


COMPRESSIBLE = (".csv", ".tsv", ".json", ".jsonl", ".txt")
"""Extensions that ``.gz`` may follow."""

ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32",  # it begins with the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte-order marks of encodings that are converted to UTF-8."""


def data_suffix(path: Path) -> str:
    """Return the extension that tells how a file is read. It is ``.csv`` for ``train.CSV`` and ``train.csv.gz``."""
    suffix, inner = path.suffix.lower(), Path(path.stem).suffix.lower()
    return inner if suffix == ".gz" and inner in COMPRESSIBLE else suffix


def data_stem(path: Path) -> str:
    """Return the name of a file without its extension, and without ``.gz``."""
    return Path(path.stem).stem if is_compressed(path) else path.stem


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz" and data_suffix(path) != ".gz"


@contextmanager
def utf8_lines(path: Path) -> Iterator[tuple[Iterable[bytes], bool]]:
    """Open a text file. Yield its lines as UTF-8, and whether they are the bytes of the file.

    Raises:
        DataError: the file is not what its extension says, or is UTF-16 without a byte-order mark.
    """
    try:
        with gzip.open(path, "rb") if is_compressed(path) else path.open("rb") as file:
            beginning = file.peek(4)[:4]
            encoding = next((name for mark, name in ENCODINGS.items() if beginning.startswith(mark)), None)
            if encoding is not None:
                text = io.TextIOWrapper(file, encoding, errors="replace", newline="\n")
                # An invalid character must not become a valid one, so that its line is reported.
                yield (line.encode().replace("\ufffd".encode(), b"\xff") for line in text), False
                return
            if b"\0" in beginning:
                message = "the file begins with zero bytes, as UTF-16 without a byte-order mark does"
                raise DataError(message, where=str(path), hint="convert it: iconv -f utf-16le -t utf-8")
            yield file, not is_compressed(path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        message = f"the file cannot be decompressed: {error}"
        raise DataError(message, where=str(path), hint="compress it again") from error


def _lines(path: Path, span: Span | None = None) -> Iterator[tuple[int, str, bool]]:
    """Yield (line number from 1, text, whether it was valid) for each line. Invalid bytes become U+FFFD.

    Lines are split before they are decoded, so that the number of an invalid line is exact.
    """
    with nullcontext((span.read(path), True)) if span else utf8_lines(path) as (lines, _):
        for number, raw in enumerate(lines, start=span.line if span else 1):
            encoding = "utf-8-sig" if number == 1 else "utf-8"
            try:
                yield number, raw.decode(encoding), True
            except UnicodeDecodeError:
                yield number, raw.decode(encoding, errors="replace"), False


NOT_UTF8 = "the text is not UTF-8"
UTF8_HINT = "convert the file, for instance with iconv -f latin1 -t utf-8"


def text_lines(path: Path, bad: BadLines, span: Span | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) for each UTF-8 line of a text file or of a part of it."""
    for number, text, is_utf8 in _lines(path, span):
        if is_utf8:
            yield number, text
        else:
            bad.note(path, number, NOT_UTF8, UTF8_HINT)


OTHER_DELIMITERS = (";", "\t")
"""Separators of columns that are recognized if the lines show them instead of the usual separator."""

ENCLOSED = re.compile(r'"(?:[^"]|"")*"')
"""A cell in quotes, with the quotes inside it doubled."""


def _delimiter_of(path: Path, usual: str) -> str:
    """Return the separator that gives most of the first lines as many columns as the header, which are several."""
    head, best, most = list(islice(_decoded(path), 100)), usual, 0
    for mark in (usual, *OTHER_DELIMITERS):  # spreadsheets take semicolons where a comma is the decimal mark
        counts = []
        with suppress(csv.Error):  # the reader names it
            counts += [len(cells) for cells in csv.reader(head, delimiter=mark) if cells]
        alike = counts.count(counts[0]) if counts and counts[0] > 1 else 0
        if alike > most:
            best, most = mark, alike
    return best


def _quotes_are_text(path: Path) -> bool:
    """Return whether each line of a tab-separated file is a row, and a quote in it is text, as in the files of GLUE.

    If all cells that begin with a quote are enclosed in quotes, they are read as a spreadsheet writes them.
    """

    def cells() -> Iterator[list[str]]:
        return (line.rstrip("\r\n").split("\t") for line in _decoded(path) if line.strip("\r\n"))

    if all(ENCLOSED.fullmatch(cell) for line in cells() for cell in line if cell.startswith('"')):
        return False
    counts = {len(line) for line in cells()}
    return len(counts) == 1 and max(counts) > 1


def _delimited_rows(path: Path, bad: BadLines, delimiter: str) -> Iterator[tuple[int, Row]]:
    # The csv module's default limit of 128 KiB per field is meant for spreadsheets, not for documents.
    csv.field_size_limit(2**31 - 1)
    delimiter = _delimiter_of(path, delimiter)
    broken: set[int] = set()
    # strict: an unclosed quote would otherwise silently swallow the rest of the file.
    reader = csv.reader(
        _decoded(path, broken),
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if delimiter == "\t" and _quotes_are_text(path) else csv.QUOTE_MINIMAL,
        strict=True,
    )
    header: list[str] | None = None
    while True:
        start = reader.line_num + 1  # a quoted field may contain line breaks, so a record can span lines
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            _note_record(header, path, start, *_explained(error, in_header=header is None), bad)
            continue
        span = range(start, reader.line_num + 1)
        not_utf8 = next((n for n in span if n in broken), None)
        if not_utf8 is not None:
            _note_record(header, path, not_utf8, NOT_UTF8, UTF8_HINT, bad)
        elif header is None:
            header = [cell.strip() for cell in cells]
            _check_header(header, path)
        elif cells and len(cells) != len(header):
            than = "fewer" if len(cells) < len(header) else "more"
            bad.note(
                path, start, f"the line has {counted(len(cells), 'column')}, {than} than the header's {len(header)}"
            )
        elif delimiter == "\t" and any("\n" in cell and ("\t" in cell or len(cells) == 1) for cell in cells):
            reason = f"a quote joins {len(span)} lines, which may be rows"
            bad.note(path, start, reason, "give all lines the columns of the header, or write a .csv file")
        elif cells:
            yield start, dict(zip(header, cells, strict=True))


def _explained(error: csv.Error, *, in_header: bool) -> tuple[str, str]:
    """Return why a record cannot be read, and what to do."""
    if "new-line" in str(error):
        ends = "it ends the lines of an old file: convert the file with tr '\\r' '\\n'"
        hint = ends if in_header else "put the text in quotes, or replace the carriage return"
        return "a carriage return is not at the end of the line", hint
    is_open = "end of data" in str(error)
    reason = "a quoted field is never closed" if is_open else f"broken quoting: {error}"
    return reason, "double the quotes inside a quoted field"


def _check_header(names: Sequence[str], path: Path) -> None:
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"the header names the column '{twice}' twice", where=f"{path}:1", hint="rename one of them")
    if any("\0" in name for name in names):
        raise DataError("the header holds a zero byte", where=f"{path}:1", hint="remove it")


def _note_record(header: list[str] | None, path: Path, line: int, reason: str, hint: str, bad: BadLines) -> None:
    """Report a record that cannot be read. Without the header, no other record can be read."""
    if header is None:
        raise DataError(reason, where=f"{path}:{line}", hint=hint) from None
    bad.note(path, line, reason, hint)


def _decoded(path: Path, broken: set[int] | None = None) -> Iterator[str]:
    """Yield the lines of a file. The numbers of lines that are not UTF-8 are added to ``broken``."""
    for number, text, is_utf8 in _lines(path):
        if broken is not None and not is_utf8:
            broken.add(number)
        yield text


UNREADABLE_JSON = "broken JSON: a number that is too long, or brackets that are nested too deeply"


def jsonl_rows(path: Path, bad: BadLines, span: Span | None = None) -> Iterator[tuple[int, Row]]:
    """Yield (line number, object) for each line of a ``.jsonl`` file or of a part of it."""
    for number, text in text_lines(path, bad, span):
        text = text.rstrip()
        if not text:
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            bad.note(path, number, f"broken JSON: {error.msg} (column {error.colno})")
            continue
        except (ValueError, RecursionError):
            bad.note(path, number, UNREADABLE_JSON)
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            bad.note(path, number, f"a line must hold a JSON object, not {type(row).__name__}")


def _json_rows(path: Path, bad: BadLines) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a JSON file, numbered by their position in the list, from 1."""
    unreadable = BadLines(advice="")  # one document: nothing after an invalid place can be read
    text = "".join(text for _, text in text_lines(path, unreadable))
    unreadable.raise_all()
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "fix it; a file with one object per line is called .jsonl"
        message = f"broken JSON: {error.msg} (column {error.colno})"
        raise DataError(message, where=f"{path}:{error.lineno}", hint=hint) from None
    except (ValueError, RecursionError):
        raise DataError(UNREADABLE_JSON, where=str(path), hint="fix it") from None
    if isinstance(rows, dict):
        rows = rows.get("data")
    if not isinstance(rows, list) or (rows and not any(isinstance(row, dict) for row in rows)):
        hint = 'write [{"text": …}, …] or {"data": [{"text": …}, …]}'
        raise DataError("the file does not hold a list of objects", where=str(path), hint=hint)
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            yield number, row
        else:
            bad.note_at(f"{path}, row {number}", f"a row must be an object, not {type(row).__name__}")


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeError) as error:  # a damaged file may have any bytes in its names
        raise DataError(f"the file is not Parquet: {error}", where=str(path), hint="write it again") from None


def parquet_row_count(path: Path) -> int:
    with _parquet(path) as file:
        return int(file.metadata.num_rows)


def parquet_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Row]]:
    """Yield (position from 1, row) for each row of a Parquet file.

    Args:
        path: the file.
        columns: the columns to read. None reads all.

    Raises:
        DataError: the file is not Parquet, or has no such column.
    """
    with _parquet(path) as file:
        names = file.schema_arrow.names
        if missing := set(columns or ()) - set(names):
            hint = f"the columns are {', '.join(names)}"
            raise DataError(f"there is no column '{min(missing)}'", where=str(path), hint=hint)
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row


ROW_READERS: dict[str, Callable[[Path, BadLines], Iterator[tuple[int, Row]]]] = {
    ".csv": partial(_delimited_rows, delimiter=","),
    ".tsv": partial(_delimited_rows, delimiter="\t"),
    ".json": _json_rows,
    ".jsonl": jsonl_rows,
    ".parquet": lambda path, bad: parquet_rows(path),  # a binary file has no lines to leave out
}
"""Row readers by file extension. Rows come with their line (``.json``, ``.parquet``: their position from 1)."""

NUMBERED_BY_LINE = (".csv", ".tsv", ".jsonl")


TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
"""Extensions of files with raw text."""


def prefix_of(path: str | Path) -> str:
    """Return the prefix ``P`` of an indexed data set for ``P``, ``P.bin`` or ``P.idx``."""
    text = str(path)
    return text[:-4] if text.endswith((".bin", ".idx")) else text


def no_corpus_error() -> DataError:
    hint = "give files, a folder, a glob or a prefix"
    return DataError("no corpus is named", where="--data-path", hint=hint)


def text_files(paths: Sequence[str], flag: str) -> list[Path]:
    """Return the raw text files that a flag names: files, folders (with all subfolders) and globs, in order.

    Raises:
        DataError: a path does not exist, or has no such file.
    """
    files: list[Path] = []
    for path in paths:
        base = Path(path)
        if base.is_dir():
            entries = sorted(base.rglob("*"))
        else:
            entries = [base] if base.is_file() else sorted(map(Path, glob.glob(path, recursive=True)))
        readable = [file for file in entries if file.is_file() and data_suffix(file) in TEXT_SUFFIXES]
        if not readable:
            raise _no_text(path, base, flag, exists=base.is_dir() or bool(entries))
        files += readable
    check_downloaded(files, DataError)
    return list(dict.fromkeys(files))


def _no_text(path: str, base: Path, flag: str, *, exists: bool) -> DataError:
    kinds = f"a corpus is a file, a folder or a glob of {', '.join(TEXT_SUFFIXES)}"
    if base.is_file():
        return DataError(f"{path} is not a text file", where=flag, hint=kinds)
    if exists:
        sets = sorted(base.glob("*.idx")) if base.is_dir() else []
        if sets:
            kinds = f"for the indexed data set in it, give its prefix: {str(sets[0]).removesuffix('.idx')}"
        return DataError(f"there is no text file in {path}", where=flag, hint=kinds)
    siblings = [str(p) for p in base.parent.iterdir()] if base.parent.is_dir() else []
    return DataError(f"{path} does not exist", where=flag, hint=did_you_mean(path, siblings, kinds))


def raw_rows(
    path: Path, column: str, bad: BadLines, span: Span | None = None, unit: TextUnit = "paragraph"
) -> Iterator[tuple[int, Row]]:
    """Yield (line, row) for each row of a file of raw text or of a part of it.

    A text file has no columns. Each of its documents is a row with the text in ``column``.
    """
    if data_suffix(path) == ".txt":
        return ((number, {column: text}) for number, text in text_documents(path, bad, span, unit))
    return jsonl_rows(path, bad, span) if span else ROW_READERS[data_suffix(path)](path, bad)


def documents(
    path: Path, column: str, bad: BadLines, unit: TextUnit = "paragraph", flag: str = "--text-column"
) -> Iterator[str]:
    """Yield the documents of one file of raw text.

    ``unit`` defines the documents of a ``.txt`` file. ``.jsonl``, ``.parquet`` and the other formats have one document
    per row in ``column``. Empty documents are left out. ``flag`` is the flag that names the column, for messages.
    """
    for number, row in raw_rows(path, column, bad, unit=unit):
        text = row.get(column)
        if not isinstance(text, str):
            note_column(row, column, flag, path, number, bad)
        elif has_half_character(text):
            bad.note(path, number, f"the column '{column}' {HALF_CHARACTER}")
        elif text.strip():
            yield text


HALF_CHARACTER = "holds half of a surrogate pair, which is not a character"


def has_half_character(text: str) -> bool:
    """Return whether a text holds half of a surrogate pair, as JSON can write it. Such a text cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def note_column(row: Row, column: str, flag: str, path: Path, line: int, bad: BadLines) -> None:
    """Report a row whose column is missing or is not text."""
    if column not in row:
        hint = f"name it with {flag}; columns: {', '.join(row)}"
        bad.note(path, line, f"there is no column '{column}'", hint)
    else:
        bad.note(path, line, f"the column '{column}' holds {type(row[column]).__name__}, not text")


def text_documents(
    path: Path, bad: BadLines, span: Span | None = None, unit: TextUnit = "paragraph"
) -> Iterator[tuple[int, str]]:
    """Yield (number of its first line, text) for each document of a ``.txt`` file or of a part of it.

    Args:
        path: the file.
        bad: how to handle lines that are not UTF-8.
        span: the part. It must end at the end of a document.
        unit: the unit of text that is one document. Blank lines separate paragraphs (the format of BERT's pretraining
            input).
    """
    first = 0
    lines: list[str] = []
    for number, line in text_lines(path, bad, span):
        if line.strip() or (lines and unit == "file"):
            first = first if lines else number
            lines.append(line)
        if lines and (unit == "line" or (unit == "paragraph" and not line.strip())):
            yield first, "".join(lines)
            lines = []
    if lines:
        yield first, "".join(lines)


to_json = partial(json.dumps, ensure_ascii=False, allow_nan=False, default=str)


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


ROW_WRITERS: dict[str, Callable[[io.BufferedIOBase, Iterable[Row]], object]] = {
    ".jsonl": lambda file, rows: file.writelines(f"{to_json(row)}\n".encode() for row in rows),
    ".json": lambda file, rows: file.write(b"[\n" + ",\n".join(map(to_json, rows)).encode() + b"\n]\n"),
    ".csv": partial(_write_delimited, delimiter=","),
    ".tsv": partial(_write_delimited, delimiter="\t"),
    ".parquet": _write_parquet,
}
"""Row writers by file extension."""


def write_rows(path: Path, name: Path, rows: Iterable[Row]) -> None:
    """Write rows to a file in the format of a name, compressed if the name ends with ``.gz``."""
    with gzip.open(path, "wb") if is_compressed(name) else path.open("wb") as file:
        ROW_WRITERS[data_suffix(name)](file, rows)
