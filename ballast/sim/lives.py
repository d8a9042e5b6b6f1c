"""Story files, read: the lives of the devices that they tell of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ballast.core.entries import FORMAT, Entry, Snapshot
from ballast.core.errors import ConfigError

_LEASE = ("lease", "epoch", "lender", "borrower", "page_numbers")
_FIELDS = {
    "Arrival": ("n", "request", "model", "arrival", "prompt_tokens", "max_tokens"),
    "Cancel": ("request_id",),
    "JobDone": ("job", "model", "seconds", "prefill_tokens"),
    "JobFailed": ("job", "model", "reason"),
    "Leap": ("job", "model", "steps", "ends"),
    "TransferDone": ("transfer_id", "n_bytes", "seconds"),
    "Settled": ("model",),
    "ThreadLost": ("name",),
    "Operate": ("id", "operation"),
    "PeerMet": ("peer", "epoch", "n_pages"),
    "PeerGone": ("peer", "epoch"),
    **dict.fromkeys(("Lent", "AskedBack", "Returned"), _LEASE),
}
"""What events cannot do without, beside the time and the turn."""
_BEGIN = b'{"device":"'
_DEVICE = re.compile(rb'{"device":"([^"]*)"')


@dataclass(slots=True)
class Life:
    """One device from its snapshot to its end, or to where its story breaks off."""

    device: str
    line: int
    """Of the snapshot, in the file."""
    at: float
    snapshot: Snapshot
    entries: list[Entry] = field(default_factory=list)
    """After the snapshot."""
    lines: list[int] = field(default_factory=list)
    """Of the file, where they are."""
    over: bool = False
    """It ended as it should; otherwise its worker died, or goes on."""

    def add(self, line: int, entry: Entry) -> None:
        self.entries.append(entry)
        self.lines.append(line)
        self.over = "end" in entry


def read_lives(path: Path) -> list[Life]:
    """In the order they began. Of a line that is cut off nothing is used: where its story goes on
    after it, an entry says that something is missing (`stray`).

    Raises ConfigError, by file and line, where the file is no story that this version knows.
    """
    lives: list[Life] = []
    present: dict[str, Life] = {}
    cut: set[str] = set()
    """Devices whose last line was cut off."""
    for number, line in _lines(path):
        where = f"{path}:{number}"
        try:
            entry: Any = msgspec.json.decode(line)
        except msgspec.DecodeError:
            found = _DEVICE.match(line)
            if found is not None:
                cut.add(found[1].decode())
            elif _BEGIN.startswith(line[: len(_BEGIN)].rstrip()):
                cut.update(present)
            else:
                raise ConfigError(where, _short(line), "not a line of a story") from None
            continue
        device = entry.pop("device", None) if isinstance(entry, dict) else None
        if not isinstance(device, str):
            raise ConfigError(where, _short(line), "not a line of a story")
        if "snapshot" in entry:
            life = Life(device, number, entry["at"], _snapshot(where, entry["snapshot"]))
            present[device] = life
            lives.append(life)
            cut.discard(device)
        elif device not in present:
            raise ConfigError(where, device, "a story begins with a snapshot of its device")
        else:
            life = present[device]
            _check(where, entry)
            if "missing" in entry:
                entry = {"stray": f"{entry['missing']} entries before line {number} are missing"}
            elif device in cut:
                life.add(number, {"stray": f"a line before line {number} is cut off"})
            cut.discard(device)
            life.add(number, entry)
    if not lives:
        raise ConfigError(str(path), "", "it is empty: a story begins with a snapshot")
    return lives


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError("story", str(path), f"a file to read: {error.strerror}") from None


def _check(where: str, entry: Entry) -> None:
    needed: tuple[str, ...] = () if "missing" in entry else ("at",)
    if "event" in entry:
        needed = ("at", "turn", *_FIELDS.get(entry["event"], ()))
    for name in needed:
        if name not in entry:
            raise ConfigError(where, entry.get("event", "an entry"), f"it needs {name!r}")


def _snapshot(where: str, told: Any) -> Snapshot:
    version = told.get("format") if isinstance(told, dict) else None
    if version != FORMAT:
        raise ConfigError(where, f"format {version}", f"this Ballast reads format {FORMAT}")
    try:
        return msgspec.convert(told, Snapshot)
    except msgspec.ValidationError as error:
        raise ConfigError(where, "snapshot", str(error)) from None


def _short(line: bytes) -> str:
    return line[:60].decode(errors="replace").strip()
