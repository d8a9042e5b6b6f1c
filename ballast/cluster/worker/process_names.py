"""Names of worker processes, as `ps` and `top` show them to operators."""

from __future__ import annotations

from pathlib import Path

SERVING, SPARE, PREPARING = "ballast-worker", "ballast-spare", "ballast-prepare"
"""A worker of a device; a spare that waits; a spare that is warming up."""


def name_process(name: str) -> None:
    """Name this process; at most 15 bytes are shown."""
    Path("/proc/self/comm").write_text(name)
