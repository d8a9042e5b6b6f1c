"""`ballast serve` whose workers are killed by any job with the magic tokens in it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ballast.cluster.segment_broker import SegmentClient
from ballast.cluster.worker import process
from ballast.cluster.worker.device_thread import Outbox, Progress, Record, WorkerDevice
from ballast.core.event import JobResult
from ballast.core.job import SequenceWork
from ballast.core.settings import FleetSettings
from ballast.policy.presets import PRESETS

MAGIC = [7, 7, 7]
"""Token ids at the beginning of a job's part; a prompt of many, as a part may be shorter."""
_WORKER = "worker"

Run = Callable[[Sequence[SequenceWork]], list[JobResult]]


def deadly(run: Run) -> Run:
    """`run`, but for jobs that kill."""

    def guarded(work: Sequence[SequenceWork]) -> list[JobResult]:
        if any(list(w.tokens[: len(MAGIC)]) == MAGIC for w in work):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(work)

    return guarded


def device(
    fleet: FleetSettings,
    outbox: Outbox,
    record: Record,
    progress: Progress,
    segments: SegmentClient | None,
) -> WorkerDevice:
    """The real one, with executors that kill."""
    from ballast.live.device import LiveDevice  # late, as in the real worker

    live = LiveDevice(fleet, outbox, record=record, progress=progress, exchange=segments)
    for executor in (lane for lanes in live.executors.values() for lane in lanes):
        executor.run = deadly(executor.run)  # type: ignore[method-assign, assignment]
    return live


def main() -> int:
    """As a worker or, called `serve FILE --port N`, as the server."""
    if sys.argv[1:2] == [_WORKER]:
        process.main(sys.argv[2:], device)
    from ballast.cluster.logs import set_up_logs
    from ballast.fleet.fleet_source import FleetSource
    from ballast.server.serve import serve

    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("fleet", type=Path)
    parser.add_argument("--port", type=int, required=True)
    asked = parser.parse_args()
    set_up_logs("server", "text", "error")
    command = (sys.executable, "-m", "benchmarks.poisonable", _WORKER)
    fleet = FleetSource(asked.fleet, presets=PRESETS)
    return serve(fleet, port=asked.port, worker_command=command)


if __name__ == "__main__":
    sys.exit(main())
