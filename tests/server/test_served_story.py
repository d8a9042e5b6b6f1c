"""The story of a served fleet replays, the lives before and after a crash alike; a drain completes
the streams in flight."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from ballast.bench.story_report import report_story
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.server.process import DEADLINE, ServerProcess, server
from tests.server.test_api import usage
from tests.server.test_crash import KINDS, MODELS, TOKENS, Stream, streamed_amid
from tests.server.test_end_to_end import LONG, long_streams

N = 4
"""Choices of each of two streams."""


def test_the_lives_before_and_after_a_crash_replay(fleet_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "story.jsonl"
    with_story = fleet_file.with_name("with_story.yaml")
    with_story.write_text(f"story: {path}\n{fleet_file.read_text()}")
    with server(with_story, "--drain", str(DEADLINE)) as running:

        async def ask() -> list[list[str]]:
            streams = [Stream(model, *kind) for model in MODELS for kind in KINDS]
            return await streamed_amid(running, streams, running.kill_worker)

        assert all(len(tokens) == TOKENS for tokens in asyncio.run(ask()))
        running.client.completions.create(
            model=MODELS[0], prompt="A ship", max_tokens=5, extra_body={"ignore_eos": True}
        )
        asyncio.run(drained_amid_streams(running))
        assert running.wait() == 0
        assert "Traceback" not in running.output
    lives = read_device_stories(path)
    assert [life.over for life in lives] == [False, True]
    for life in lives:
        found = replay(life)
        assert found.difference is None, found.difference
        assert found.stray is None
        assert found.events > 0
    before, after = ([e for e in life.entries if e.get("event") == "Arrival"] for life in lives)
    assert not any("ended" in e for e in lives[0].entries), (
        "all were open when the worker was killed"
    )
    assert len(after) == len(MODELS) * len(KINDS) + 1 + 2 * N
    assert 1 <= sum(bool(e.get("resumed")) for e in after) <= len(before)
    report = report_story(lives, "served").report
    assert report.total.answered == report.total.requests == len(after)
    assert {r.output_tokens for r in report.records} == {TOKENS, 5, LONG}
    # With their spaces: the letters alone are found by chance in the digests of blocks.
    written = path.read_text().lower()
    assert "a ship" not in written
    assert "ship " not in written


async def drained_amid_streams(running: ServerProcess) -> None:
    """Streams end as they would have without the signal that comes in their midst."""
    async with running.async_client() as client:
        streams = await long_streams(client, N)
        running.signal(signal.SIGTERM)
        for stream in streams:
            chunks = [c async for c in stream]
            reasons = [c.choices[0].finish_reason for c in chunks[:-1]]
            assert reasons.count("length") == N
            assert usage(chunks[-1]).completion_tokens == N * LONG
