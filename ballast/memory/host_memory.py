"""Read the installed and the available memory of this machine, for `doctor` and start-up checks."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Files of a control group's limit and use, of version 2 and of version 1."""

Bound = tuple[int, str]
"""(bytes, name of what sets this bound)."""


def available(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Bound:
    """Bytes that this process can still allocate."""
    grants = [(max(0, most - used), who) for most, used, who in _control_groups(cgroup)]
    return min([(_field(meminfo, "MemAvailable"), "the machine"), *grants])


def installed(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Bound:
    """Bytes of memory in all, used or not."""
    grants = [(most, who) for most, _, who in _control_groups(cgroup)]
    return min([(_field(meminfo, "MemTotal"), "the machine"), *grants])


def _field(meminfo: Path, name: str) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{meminfo} has no {name}")


def _control_groups(root: Path) -> list[tuple[int, int, str]]:
    """(limit, use, who) of the groups that limit this process."""
    found = []
    for limit, use in _LIMITS:
        try:
            most, used = (root / limit).read_text().strip(), (root / use).read_text().strip()
        except OSError:
            continue
        if most != "max":
            found.append((int(most), int(used), "the control group"))
    return found
