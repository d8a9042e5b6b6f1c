"""Read lines and CSV rows of trace files, gzip or plain; errors name the file and the line.

Used by `workload.traces` and `workload.servegen`.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path

import msgspec

from ballast.workload.workload import WorkloadError


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of a UTF-8 file. Raises WorkloadError where it is unreadable."""
    line = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        opener = gzip.open if packed else open
        with opener(path, "rt", encoding="utf-8") as lines:
            for line, text in enumerate(lines, start=1):
                yield line, text
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise WorkloadError(f"cannot be read: {error}", str(path), line + 1) from error


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, row) of a CSV file with a header; a row is one line."""
    lines = read_lines(path)
    _, first = next(lines, (0, ""))
    header = next(csv.reader([first]), [])
    for line, text in lines:
        values = next(csv.reader([text]), [])
        if not values:
            continue
        if len(values) != len(header):
            fault = f"{len(values)} columns where the header has {len(header)}"
            raise WorkloadError(fault, str(path), line)
        yield line, dict(zip(header, values, strict=True))


@contextmanager
def naming(path: Path, line: int) -> Iterator[None]:
    """Context manager that turns errors of parsing a line into a WorkloadError that names it."""
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


def tokens(row: dict[str, str], column: str) -> int:
    """Parse a whole number of tokens; 0 becomes 1, since a request without tokens cannot be
    served."""
    value = number(row, column)
    if value != int(value):
        raise ValueError(f"{column}: {row[column]!r} is not a whole number")
    return max(1, int(value))
