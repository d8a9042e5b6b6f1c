"""Name worker processes for operators, as `ps` and `top` show them."""

from __future__ import annotations

from pathlib import Path

SERVING, SPARE, PREPARING = "ballast-worker", "ballast-spare", "ballast-prepare"
"""Names of a worker of a device, of a spare that waits, and of a spare that is warming up."""


def name_process(name: str) -> None:
    """Name this process; at most 15 bytes are shown."""
    Path("/proc/self/comm").write_text(name)
