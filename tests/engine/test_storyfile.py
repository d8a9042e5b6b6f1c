"""The story's file: lines as they come, and no harm where there is no room for them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ballast.engine.storyfile import StoryFile


def test_entries_are_lines(tmp_path: Path) -> None:
    file = StoryFile(str(tmp_path / "story"))
    file.write({"at": 1.0})
    file.write({"at": 2.0})
    file.close()
    lines = (tmp_path / "story").read_text().splitlines()
    assert [json.loads(line)["at"] for line in lines] == [1.0, 2.0]


def test_the_next_worker_goes_on_with_the_story_of_one_that_died(tmp_path: Path) -> None:
    died = StoryFile(str(tmp_path / "story"))
    died.write({"at": 1.0})
    after = StoryFile(str(tmp_path / "story"))
    after.write({"at": 0.5})
    lines = (tmp_path / "story").read_text().splitlines()
    assert [json.loads(line)["at"] for line in lines] == [1.0, 0.5]
    died.close()
    after.close()


def test_a_full_disk_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    file = StoryFile("/dev/full")
    with caplog.at_level(logging.ERROR):
        for _ in range(10_000):
            file.write({"at": 1.0})
        file.close()
    assert len(caplog.records) == 1
    assert "/dev/full" in caplog.text
