"""The story's file: lines as they come, and no harm where there is no room for them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ballast.engine import storyfile
from ballast.engine.storyfile import StoryFile


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_entries_are_lines(tmp_path: Path) -> None:
    file = StoryFile(tmp_path / "story", "cpu:0")
    file.write([{"at": 1.0}, {"at": 2.0}])
    file.write([{"at": 3.0}])
    file.close()
    assert lines(tmp_path / "story") == [{"device": "cpu:0", "at": float(i)} for i in (1, 2, 3)]


def test_the_next_worker_goes_on_with_the_story_of_one_that_died(tmp_path: Path) -> None:
    died = StoryFile(tmp_path / "story", "d")
    died.write([{"at": 1.0}])
    after = StoryFile(tmp_path / "story", "d")
    after.write([{"at": 0.5}])
    assert [line["at"] for line in lines(tmp_path / "story")] == [1.0, 0.5]
    died.close()
    after.close()


def test_the_next_worker_begins_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "story"
    path.write_text('{"device":"d","at":1.0}\n{"device":"d","at":')
    after = StoryFile(path, "d")
    after.write([{"at": 0.5}])
    after.close()
    assert json.loads(path.read_text().splitlines()[-1])["at"] == 0.5


def test_a_full_disk_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    file = StoryFile("/dev/full", "d")
    with caplog.at_level(logging.ERROR):
        for _ in range(10_000):
            file.write([{"at": 1.0}])
        file.close()
    assert len(caplog.records) == 1
    assert "/dev/full" in caplog.text


def test_a_disk_that_was_full_leaves_word_of_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "story"
    file = StoryFile(path, "d")
    write = storyfile.os.write
    room = [20]

    def scant(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        n = write(fd, data[: room[0]])
        room[0] -= n
        return n

    monkeypatch.setattr(storyfile.os, "write", scant)
    file.write([{"at": 1.0}, {"at": 2.0}])
    file.write([{"at": 3.0}])
    monkeypatch.setattr(storyfile.os, "write", write)
    file.write([{"at": 4.0}])
    file.close()
    cut, *rest = path.read_text().splitlines()
    assert len(cut) == 20
    assert [json.loads(line) for line in rest] == [
        {"device": "d", "missing": 3},
        {"device": "d", "at": 4.0},
    ]
