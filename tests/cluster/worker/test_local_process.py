"""A worker's process, as its owner ends it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from ballast.cluster.worker.local_process import LocalProcess


def test_a_process_that_ends_as_it_is_killed_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been reaped, and who waits for it has not run yet."""
    process = LocalProcess([sys.executable, "-c", "import time; time.sleep(60)"])

    async def scenario() -> None:
        await process.spawn(ended=lambda: None)
        assert process._process is not None
        kill = process._process.kill

        def gone() -> None:
            kill()
            raise ProcessLookupError

        monkeypatch.setattr(process._process, "kill", gone)
        await process.close(0.0)
        assert process.exit_reason() == "killed by signal 9"
        assert process.in_flight() == frozenset()

    asyncio.run(scenario())
