"""The story of a served fleet replays, the lives before and after a crash alike."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from ballast.bench.story_report import report_story
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.server.process import server
from tests.server.test_crash import KINDS, MODELS, TOKENS, Stream


def test_the_lives_before_and_after_a_crash_replay(fleet_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "story.jsonl"
    result = fleet_file.with_name("told.yaml")
    result.write_text(f"story: {path}\n{fleet_file.read_text()}")
    with server(result) as running:

        async def ask() -> None:
            streams = [Stream(model, *kind) for model in MODELS for kind in KINDS]
            async with running.async_client() as client, asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(stream.run(client))
                for stream in streams:
                    await stream.begun.wait()
                running.kill_worker()
            assert all(len(stream.tokens) == TOKENS for stream in streams)

        asyncio.run(ask())
        running.client.completions.create(
            model=MODELS[0], prompt="A ship", max_tokens=5, extra_body={"ignore_eos": True}
        )
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    lives = read_device_stories(path)
    assert [life.over for life in lives] == [False, True]
    for life in lives:
        found = replay(life)
        assert found.difference is None, found.difference
        assert found.stray is None
        assert found.events > 0
    arrivals = [e for e in lives[1].entries if e.get("event") == "Arrival"]
    resumed = [e for e in arrivals if e.get("resumed")]
    ended = sum(len(e.get("ended", ())) for e in lives[0].entries)
    # On a busy machine some have ended before the kill comes.
    assert len(MODELS) * len(KINDS) - ended <= len(resumed) <= len(MODELS) * len(KINDS)
    assert resumed
    report = report_story(lives, "served").report
    assert report.total.answered == report.total.requests == len(MODELS) * len(KINDS) + 1
    assert {r.output_tokens for r in report.records} == {TOKENS, 5}
    assert "ship" not in path.read_text().lower()
