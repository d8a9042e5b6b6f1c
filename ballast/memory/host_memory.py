"""Read the installed and the available memory of this machine.

Used by `doctor`, the checks at the start, and the host tier.
"""

from __future__ import annotations

from pathlib import Path

from ballast.memory.control_groups import ROOT, ControlGroup, control_groups

_GROUP = "the control group"

Bound = tuple[int, str]
"""(bytes, name of what sets this bound)."""


def available(root: Path = ROOT) -> Bound:
    """Bytes that this process can still allocate. `root`: the directory below which `/proc` and the
    mount points of control groups are."""
    grants = []
    for group in control_groups("memory", root):
        limits = [n for n in (_limit(group), _throttle(group)) if n is not None]
        if limits:
            grants.append((max(0, min(limits) - _used(group)), f"{_GROUP} {group.name}"))
    return min([(_field(root, "MemAvailable"), "the machine"), *grants])


def installed(root: Path = ROOT) -> Bound:
    """Bytes of memory in all, used or not; `root` as of `available`."""
    grants = []
    for group in control_groups("memory", root):
        if (limit := _limit(group)) is not None:
            grants.append((limit, f"{_GROUP} {group.name}"))
    return min([(_field(root, "MemTotal"), "the machine"), *grants])


def is_granted(who: str) -> bool:
    """Whether what sets a bound is a control group, and not the machine."""
    return who.startswith(_GROUP)


def _field(root: Path, name: str) -> int:
    meminfo = root / "proc" / "meminfo"
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{meminfo} has no {name}")


def _limit(group: ControlGroup) -> int | None:
    """Bytes beyond which processes of a group are killed; None: no bound."""
    if group.version == 2:
        return group.number("memory.max")
    # What groups above it allow is known also where the mount does not show them.
    above = group.statistics("memory.stat").get("hierarchical_memory_limit")
    own = group.number("memory.limit_in_bytes")
    return min((n for n in (own, above) if n is not None), default=None)


def _throttle(group: ControlGroup) -> int | None:
    """Bytes beyond which processes of a group are slowed down; None: no bound."""
    return group.number("memory.high") if group.version == 2 else None


def _used(group: ControlGroup) -> int:
    """Bytes that a group has in use, without the file cache, which makes way."""
    file, prefix = "memory.current", ""
    if group.version == 1:
        file, prefix = "memory.usage_in_bytes", "total_"
    statistics = group.statistics("memory.stat")
    cached = sum(statistics.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    return max(0, (group.number(file) or 0) - cached)
