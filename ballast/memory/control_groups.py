"""Find the control groups (cgroups) that limit this process: its own and all above it.

Of versions 1 and 2. A limit of any of them holds: a container's, a systemd unit's, a slice's. In a
container the mount may show a part of the tree alone, whose top is then the mount point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One group that this process is in, directly or by a group below."""

    directory: Path
    name: str
    """Its path in the hierarchy, as `/proc/self/cgroup` has it."""
    version: int

    def read(self, file: str) -> str | None:
        """Return the text of one of its files; None where it has none, or it cannot be read."""
        try:
            return (self.directory / file).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None

    def number(self, file: str) -> int | None:
        """Return a file's number; None for `max`, and where there is none."""
        text = self.read(file)
        return int(text) if text is not None and text.isdecimal() else None

    def statistics(self, file: str) -> dict[str, int]:
        """Return the numbers of a file of `name number` lines."""
        pairs = (line.split() for line in (self.read(file) or "").splitlines())
        return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdecimal()}


def control_groups(controller: str, root: Path = ROOT) -> list[ControlGroup]:
    """Return the groups that limit this process by `controller` (`memory`, `cpu`), each before
    those above it. `root`: the directory below which `/proc` and the mount points are."""
    mounts = _mounts(root)
    found: list[ControlGroup] = []
    for controllers, path in _memberships(root):
        version = 1 if controllers else 2
        if version == 1 and controller not in controllers:
            continue
        seen = [
            list(mount.groups(path, root))
            for mount in mounts
            if mount.version == version and (version == 2 or controller in mount.controllers)
        ]
        if seen:
            most = max(seen, key=len)  # of several mounts, the one that shows the most
            found += most
    return found


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy, or a part of one."""

    version: int
    controllers: frozenset[str]
    """Those of a hierarchy of version 1."""
    top: str
    """The group at the mount point, by its path in the hierarchy."""
    point: str

    def groups(self, path: str, root: Path) -> Iterator[ControlGroup]:
        """Yield the groups from `path` up to the mount point, as far as the mount shows them."""
        top, own = PurePosixPath(self.top), PurePosixPath(path)
        # A path beside or above the mounted part (a namespace shows `/..`) has its top in sight.
        inner = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
        if ".." in inner.parts:
            inner = PurePosixPath()
        for part in (inner, *inner.parents) if inner.parts else (inner,):
            directory = root / self.point.lstrip("/") / part
            if directory.is_dir():
                yield ControlGroup(directory, str(top / part), self.version)


def _memberships(root: Path) -> list[tuple[frozenset[str], str]]:
    """Return (controllers, path) of each hierarchy: version 2 has no names of controllers."""
    found = []
    for line in _lines(root / "proc" / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if number.isdecimal() and colon:
            found.append((frozenset(controllers.split(",")) - {""}, path))
    return found


def _mounts(root: Path) -> list[_Mount]:
    found = []
    for line in _lines(root / "proc" / "self" / "mountinfo"):
        head, dash, tail = line.partition(" - ")
        fields, kinds = head.split(), tail.split()
        if not dash or len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kinds[0] == "cgroup2" else 1
        controllers = frozenset(kinds[2].split(","))
        found.append(_Mount(version, controllers, _plain(fields[3]), _plain(fields[4])))
    return found


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _plain(path: str) -> str:
    """Undo the escapes of a path in mountinfo: a space is `\\040`."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), path)
