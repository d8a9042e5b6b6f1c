"""Define byte units, parse sizes of configuration files, and format sizes for reports."""

from __future__ import annotations

import re

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": 1024 * GiB,
}
_SIZE = re.compile(r"^\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zA-Z]*?)(/s)?\s*$")


def parse_bytes(text: str | int) -> int:
    """Return the bytes of ``"512MiB"``, ``"2 GB"`` or an integer; else raise ValueError.

    A trailing ``/s`` is accepted, so that bandwidths read ``"4GB/s"``.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.match(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB, 2GB or 1048576")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(n: float) -> str:
    """Format bytes for people, ``1536 -> '1.5KiB'``; never parsed back."""
    for unit, size in (("TiB", 1024 * GiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(n) >= size:
            return f"{n / size:.4g}{unit}"
    return f"{n:.4g}B"


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer >= a / b, for b > 0."""
    return -(-a // b)
