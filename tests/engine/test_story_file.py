"""The story's file: lines as they come, and no harm where there is no room for them."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from ballast.engine import story_file
from ballast.engine.story_file import StoryFile, first_part_is_gone, parts


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


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
    write = story_file.os.write
    room = [20]

    def scant(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        n = write(fd, data[: room[0]])
        room[0] -= n
        return n

    monkeypatch.setattr(story_file.os, "write", scant)
    file.write([{"at": 1.0}, {"at": 2.0}])
    file.write([{"at": 3.0}])
    monkeypatch.setattr(story_file.os, "write", write)
    file.write([{"at": 4.0}])
    file.close()
    cut, *rest = path.read_text().splitlines()
    assert len(cut) == 20
    assert [json.loads(line) for line in rest] == [
        {"device": "d", "missing": 3},
        {"device": "d", "at": 4.0},
    ]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_files_are_for_their_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "story"
    file = StoryFile(path, "d", most_bytes=1, parts=3)
    for i in range(3):
        file.write([{"at": i}])
    file.close()
    assert [mode(part) for part in (*parts(path), path)] == [0o600] * 3


def test_a_file_that_grows_beyond_its_bound_becomes_a_part(tmp_path: Path) -> None:
    path = tmp_path / "a [1] story"
    (tmp_path / "a 1 story.7").touch()  # somebody else's
    (tmp_path / "a [1] story.bak").touch()
    for life in range(2):  # the second worker goes on with the numbers of the first
        file = StoryFile(path, "d", most_bytes=100, parts=1000)
        for i in range(40):
            file.write([{"at": 40 * life + i}] * (1 + i % 4))
        file.close()
    found = [line["at"] for part in (*parts(path), path) for line in lines(part)]
    assert found == [at for at in range(80) for _ in range(1 + at % 4)]
    numbers = [int(part.suffix[1:]) for part in parts(path)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 10
    assert max(part.stat().st_size for part in (*parts(path), path)) <= 100


def test_the_newest_parts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "story"
    file = StoryFile(path, "d", most_bytes=50, parts=3)
    for i in range(20):
        file.write([{"at": i}, {"at": i}])
        assert first_part_is_gone(path) == (i > 3)
    file.close()
    assert [lines(part)[0]["at"] for part in (*parts(path), path)] == [16, 17, 18, 19]


def test_one_write_may_be_larger_than_a_part(tmp_path: Path) -> None:
    path = tmp_path / "story"
    file = StoryFile(path, "d", most_bytes=30, parts=5)
    file.write([{"at": 1}] * 20)
    file.write([{"at": 2}])
    file.close()
    assert [len(lines(part)) for part in (*parts(path), path)] == [20, 1]


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "story"
    file = StoryFile(path, "d", most_bytes=1000, parts=5)
    file.write([{"at": 1}])
    path.rename(tmp_path / "elsewhere")
    file.write([{"at": 2}])
    file.close()
    assert [line["at"] for line in lines(path)] == [2]


def test_several_devices_rotate_one_file_and_lose_nothing(tmp_path: Path) -> None:
    path, n = tmp_path / "story", 300

    def write(device: str) -> None:
        file = StoryFile(path, device, most_bytes=700, parts=1000)
        for i in range(n):
            file.write([{"at": i}])
        file.close()

    devices = [f"d{i}" for i in range(4)]
    threads = [threading.Thread(target=write, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [line for part in (*parts(path), path) for line in lines(part)]
    for device in devices:
        assert [line["at"] for line in found if line["device"] == device] == [*range(n)]
    assert len(parts(path)) >= 4 * n * len('{"device":"d0","at":1}\n') // 700 - 1
    assert not first_part_is_gone(path)


def test_a_file_that_another_device_rotates_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "story"
    with monkeypatch.context() as looked:
        looked.setattr(Path, "is_file", lambda self: True)  # it was there a moment ago
        file = StoryFile(path, "cpu:0")
    file.write([{"at": 1}])
    file.close()
    assert lines(path) == [{"device": "cpu:0", "at": 1}]


def test_a_file_that_cannot_be_rotated_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(source: object, target: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "story"
    file = StoryFile(path, "d", most_bytes=30, parts=5)
    monkeypatch.setattr(story_file.os, "rename", refuse)
    with caplog.at_level(logging.ERROR):
        for i in range(10):
            file.write([{"at": i}])
    file.close()
    assert [line["at"] for line in lines(path)] == [*range(10)]
    assert len(caplog.records) == 1
    assert "cannot be rotated" in caplog.text


def test_what_is_no_file_does_not_rotate() -> None:
    file = StoryFile("/dev/null", "d", most_bytes=1, parts=5)
    for i in range(3):
        file.write([{"at": i}])
    file.close()
    assert Path("/dev/null").is_char_device()
