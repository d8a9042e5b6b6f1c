"""The file of operators' changes: whole or as it was, whatever the disk does."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ballast.core.errors import ConfigError, NotKept
from ballast.core.settings import ModelSettings
from ballast.fleet import atomic_file
from ballast.fleet.changes import Changes
from ballast.fleet.changes_file import ChangesFile

PINNED = Changes().changing(ModelSettings(name="a", path="p"), {"pinned": True})
REMOVED = Changes().removing({"b"}, {"a", "b"})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    kept = ChangesFile(tmp_path / "c.json")
    assert kept.read() == Changes()
    assert list(tmp_path.iterdir()) == []
    for changes in (PINNED, REMOVED, Changes(version=1)):
        kept.write(changes)
        assert ChangesFile(tmp_path / "c.json").read() == changes
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_without_a_path_they_last_as_long_as_the_process() -> None:
    kept = ChangesFile(None)
    kept.write(PINNED)
    assert kept.read() == PINNED


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    kept = ChangesFile(tmp_path / "c.json")
    kept.write(PINNED)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, call, full)
        with pytest.raises(NotKept, match="No space left on device"):
            kept.write(REMOVED)
    assert kept.changes == PINNED
    assert ChangesFile(tmp_path / "c.json").read() == PINNED
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
    kept.write(REMOVED)
    assert ChangesFile(tmp_path / "c.json").read() == REMOVED


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    kept = ChangesFile(tmp_path / "no" / "c.json")
    assert kept.read() == Changes()
    with pytest.raises(NotKept, match="No such file or directory"):
        kept.write(PINNED)
    assert kept.changes == Changes()


DIE = """
import os, sys
from pathlib import Path
from ballast.fleet.changes_file import ChangesFile
from tests.fleet.test_changes_file import REMOVED
real = os.replace
def die(*paths):
    if sys.argv[2] == "after":
        real(*paths)
    os._exit(3)
os.replace = die
kept = ChangesFile(Path(sys.argv[1]))
kept.read()
kept.write(REMOVED)
"""


@pytest.mark.parametrize(("when", "left"), [("before", PINNED), ("after", REMOVED)])
def test_a_process_that_dies_while_it_writes_leaves_one_or_the_other(
    tmp_path: Path, when: str, left: Changes
) -> None:
    path = tmp_path / "c.json"
    ChangesFile(path).write(PINNED)
    command = [sys.executable, "-c", DIE, str(path), when]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == 3
    kept = ChangesFile(path)
    assert kept.read() == left
    kept.write(Changes(version=1))
    assert ChangesFile(path).read() == Changes(version=1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2}',
        '{"colour": 1}',
        '{"added": [{"name": "x", "priority": 1000}]}',
        '{"changed": {"a": {"was": {}, "now": {"dtype": "float32"}}}}',
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.json.*damaged") as caught:
        ChangesFile(path).read()
    assert caught.value.key == "changes"


def test_two_servers_do_not_overwrite_each_other(tmp_path: Path) -> None:
    one, other = (ChangesFile(tmp_path / "c.json") for _ in range(2))
    one.read()
    other.read()
    one.write(PINNED)
    with pytest.raises(NotKept, match="somebody else has changed it"):
        other.write(REMOVED)
    assert other.read() == PINNED
    other.write(REMOVED)
    assert ChangesFile(tmp_path / "c.json").read() == REMOVED


def test_of_two_servers_that_write_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes when the first has looked at the file, and has not replaced it yet."""
    first, second = ChangesFile(tmp_path / "c.json"), ChangesFile(tmp_path / "c.json")
    waits, refused = threading.Event(), list[NotKept]()

    def write() -> None:
        try:
            second.write(REMOVED)
        except NotKept as error:
            refused.append(error)
        waits.set()

    late = threading.Thread(target=write)
    replace = os.replace

    def replacing(source: str, target: Path) -> None:
        late.start()
        assert waits.wait(240)
        replace(source, target)

    def waiting(_: float) -> None:
        waits.set()
        threading.Event().wait(0.001)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replacing)
        patch.setattr(time, "sleep", waiting)
        patch.setattr(atomic_file, "_TRIES", 10**6)
        first.write(PINNED)
        late.join()
    assert "somebody else" in str(refused[0])
    assert ChangesFile(tmp_path / "c.json").read() == PINNED
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_a_directory_that_somebody_keeps_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    holder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(NotKept, match="cannot be kept"):
            ChangesFile(tmp_path / "c.json").write(PINNED)
    finally:
        os.close(holder)
    assert list(tmp_path.iterdir()) == []
