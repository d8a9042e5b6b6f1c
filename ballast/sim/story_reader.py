"""Read story files into one `DeviceStory` per run of a device.

Used by `sim.replay`, `bench.story_report`, `bench.story_tables` and `ballast story`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ballast.core.entries import FORMAT, Snapshot, StoryEntry
from ballast.core.errors import ConfigError
from ballast.engine.story_file import first_part_is_gone, parts

_LEASE = ("lease", "epoch", "lender", "borrower", "page_numbers")
_FIELDS = {
    "Arrival": ("n", "request", "model", "arrival", "prompt_tokens", "max_tokens"),
    **dict.fromkeys(("Cancel", "Pause", "Resume", "GrammarReady"), ("request_id",)),
    "JobDone": ("job", "model", "seconds", "prefill_tokens"),
    "JobFailed": ("job", "model", "reason"),
    "Leap": ("job", "model", "steps", "ends"),
    "TransferDone": ("transfer_id", "n_bytes", "seconds"),
    "FirstJobReady": ("transfer_id",),
    "Settled": ("model",),
    "Operate": ("id", "operation"),
    "PeerMet": ("peer", "epoch", "n_pages"),
    "PeerGone": ("peer", "epoch"),
    "KvTail": ("request_id", "tokens"),
    "ImportKv": ("n", "request", "model", "prompt_tokens", "form"),
    **dict.fromkeys(("ExportKv", "Depart", "KvRead", "DropKv"), ("request_id",)),
    **dict.fromkeys(("Lent", "AskedBack", "Returned"), _LEASE),
}
"""Fields that each kind of event requires, besides time and turn."""
_BEGIN = b'{"device":"'
_DEVICE = re.compile(rb'{"device":"([^"]*)"')


@dataclass(slots=True)
class DeviceStory:
    """One device from its snapshot to its end, or to where its story breaks off."""

    device: str
    line: int
    """Line number of the snapshot in the file."""
    at: float
    snapshot: Snapshot
    entries: list[StoryEntry] = field(default_factory=list)
    """After the snapshot."""
    lines: list[int] = field(default_factory=list)
    """Line numbers of the entries in the file."""
    over: bool = False
    """Whether the device ended in order; otherwise its worker died, or is still running."""

    def add(self, line: int, entry: StoryEntry) -> None:
        self.entries.append(entry)
        self.lines.append(line)
        self.over = "end" in entry


@dataclass(frozen=True, slots=True)
class StoryRead:
    """Contents of a story file and of its older parts that still exist."""

    lives: list[DeviceStory]
    """In the order they began."""
    headless: dict[str, int]
    """By device, the number of entries of a run whose beginning was in a deleted part."""


def read_device_stories(path: Path) -> list[DeviceStory]:
    """The lives of `read_story`. Raises ConfigError also where none has its beginning."""
    found = read_story(path)
    if not found.lives:
        raise ConfigError(str(path), "", "the part with its beginning has been deleted")
    return found.lives


def read_story(path: Path) -> StoryRead:
    """Read a story's file, after its older parts. Lines are numbered over all of them.

    Of a line that is cut off nothing is used: where its story goes on after it, an entry says that
    something is missing (`stray`). Raises ConfigError, by file and line, where it is no story that
    this version knows.
    """
    lives: list[DeviceStory] = []
    headless: dict[str, int] = {}
    present: dict[str, DeviceStory] = {}
    cut: set[str] = set()
    """Devices whose last line was cut off."""
    begins_later = first_part_is_gone(path)
    for number, where, line in _lines(path):
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
            life = DeviceStory(device, number, entry["at"], _snapshot(where, entry["snapshot"]))
            present[device] = life
            lives.append(life)
            cut.discard(device)
        elif device not in present and begins_later:
            headless[device] = headless.get(device, 0) + 1
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
    if not lives and not headless:
        raise ConfigError(str(path), "", "it is empty: a story begins with a snapshot")
    return StoryRead(lives, headless)


def _lines(path: Path) -> Iterator[tuple[int, str, bytes]]:
    """Each line that is not empty: its number in the whole story, file and number there, text."""
    before = 0
    try:
        # The last first: if it becomes a part now, it is among the others as well.
        with path.open("rb") as last, ExitStack() as older:
            files = [older.enter_context(part.open("rb")) for part in parts(path)]
            present = os.fstat(last.fileno())
            files = [f for f in files if not os.path.samestat(os.fstat(f.fileno()), present)]
            for file in (*files, last):
                number = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield before + number, f"{file.name}:{number}", line
                before += number
    except OSError as error:
        raise ConfigError("story", str(path), f"a file to read: {error.strerror}") from None


def _check(where: str, entry: StoryEntry) -> None:
    needed: tuple[str, ...] = () if "missing" in entry else ("at",)
    if "event" in entry:
        needed = ("at", "turn", *_FIELDS.get(entry["event"], ()))
    for name in needed:
        if name not in entry:
            raise ConfigError(where, entry.get("event", "an entry"), f"it needs {name!r}")


def _snapshot(where: str, document: Any) -> Snapshot:
    version = document.get("format") if isinstance(document, dict) else None
    if version != FORMAT:
        raise ConfigError(where, f"format {version}", f"this Ballast reads format {FORMAT}")
    try:
        return msgspec.convert(document, Snapshot)
    except msgspec.ValidationError as error:
        raise ConfigError(where, "snapshot", str(error)) from None


def _short(line: bytes) -> str:
    return line[:60].decode(errors="replace").strip()
