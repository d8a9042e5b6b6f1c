"""Read trace files, gzip or plain: lines, CSV rows and JSON lines; errors name file and line.

All traces are read here. A byte-order mark, blank lines, any line ends, quoted headers and blanks
around column names do not matter. Used by `workload.traces`, `block_traces` and `servegen`.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path

import msgspec

from ballast.workload.workload import WorkloadError


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text without its end) of each non-blank line of a UTF-8 file.
    Raises WorkloadError where it is unreadable."""
    line = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        opener = gzip.open if packed else open
        with opener(path, "rt", encoding="utf-8-sig") as lines:
            for line, text in enumerate(lines, start=1):
                if text.strip():
                    yield line, text.rstrip("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise WorkloadError(f"cannot be read: {error}", str(path), line + 1) from error


def columns_of(header: str) -> list[str]:
    """Return the column names in a CSV file's first line."""
    return [name.strip() for name in next(csv.reader([header], skipinitialspace=True), [])]


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line number, row) of a CSV file with a header; a row is one line."""
    lines = read_lines(path)
    _, first = next(lines, (0, ""))
    header = columns_of(first)
    for line, text in lines:
        values = next(csv.reader([text], skipinitialspace=True), [])
        if len(values) != len(header):
            fault = f"{len(values)} columns where the header has {len(header)}"
            raise WorkloadError(fault, str(path), line)
        yield line, dict(zip(header, values, strict=True))


@contextmanager
def errors_at(path: Path, line: int) -> Iterator[None]:
    """Context manager that turns parse errors into a WorkloadError with the file and line."""
    try:
        yield
    except KeyError as error:
        raise WorkloadError(f"column {error} is missing", str(path), line) from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise WorkloadError(str(error), str(path), line) from error


def number(row: dict[str, str], column: str) -> float:
    """Parse a finite number, 0 or more. Raises KeyError or ValueError."""
    text = row[column]
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{column}: {text!r} is not a number") from None
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"{column}: {text!r}: finite and not negative")
    return value


def whole(row: dict[str, str], column: str) -> int:
    """Parse a whole number, 0 or more, such as a count of tokens. Raises KeyError or ValueError."""
    value = number(row, column)
    if value != int(value):
        raise ValueError(f"{column}: {row[column]!r} is not a whole number")
    return int(value)


def moment(row: dict[str, str], column: str) -> float:
    """Parse an ISO 8601 time, UTC where it names no zone, to seconds since 1970. Raises KeyError or
    ValueError."""
    text = row[column]
    close = re.sub(r"\s+(?=[Z+-])|\s*UTC$", "", text.strip().upper())  # the zone at the time
    try:
        at = datetime.fromisoformat(close)
    except ValueError:
        allowed = "write 2024-05-12 00:00:10.25, with a zone (Z, +08:00) or without"
        raise ValueError(f"{column}: {text!r} is not a time: {allowed}") from None
    return (at.replace(tzinfo=UTC) if at.tzinfo is None else at).timestamp()
