"""A server for tests, run as a script: without the clients that tests have, which take a second to
import."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

HELD_WORKER = "held_worker.py"
INSTANT = 'import sys; sys.stdin.read(0); print(\'{"event":"result","result":{}}\')'
"""A simulation's program that answers at once."""


def held_file(fleet_file: Path) -> Path:
    """While it is there, workers of real models hold their jobs."""
    return fleet_file.with_suffix(".held")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("fleet", type=Path)
    parser.add_argument("--echo", action="store_true", help="a device that repeats the prompt")
    parser.add_argument("--h11", action="store_true", help="as where httptools is missing")
    parser.add_argument("--spare", action="store_true", help="a spare worker, as by default")
    parser.add_argument("--ping", type=float, help="seconds of silence before a ping")
    parser.add_argument("--drain", type=float, default=30.0)
    parser.add_argument("--changes", type=Path, help="where they are kept")
    parser.add_argument("--hosts-http", type=int, help="two hosts, which answer at this port")
    arguments = parser.parse_args()
    if arguments.h11:
        sys.modules["uvicorn.protocols.http.httptools_impl"] = None  # type: ignore[assignment]
    logging.basicConfig(level=logging.WARNING)

    from ballast.control import migrations
    from ballast.core.settings import FleetSettings
    from ballast.fleet.fleet_source import FleetSource
    from ballast.policy.presets import PRESETS
    from ballast.server.admin import simulations
    from ballast.server.serve import serve

    def adjust(fleet: FleetSettings) -> FleetSettings:
        settings = replace(
            fleet.server,
            drain_seconds=arguments.drain,
            spare_worker=arguments.spare,  # costs processor time, and most tests need none
            send_seconds=240.0,  # who reads on later is not gone
        )
        if arguments.ping is not None:
            settings = replace(settings, ping_seconds=arguments.ping)
        return replace(fleet, server=settings)

    # A device that had no time to answer keeps its requests, which tests wait for to migrate.
    migrations.ANSWER_SECONDS = 240.0
    here = Path(__file__).parent
    worker = here.parent / "cluster" / "fake_device.py" if arguments.echo else here / HELD_WORKER
    os.environ["BALLAST_TEST_HELD"] = str(held_file(arguments.fleet))
    if arguments.echo:  # a simulation that takes no time
        simulations.COMMAND = (sys.executable, "-S", "-c", INSTANT)
    ray = None
    if arguments.hosts_http is not None:
        sys.path.insert(0, str(here.parents[1]))
        from ballast.cluster.hosts import hosted_workers
        from ballast.transport import curve
        from tests.cluster.hosts.http_hosts import HttpHosts

        curve.LOST_SECONDS = 240.0
        hosted_workers.RayCluster = lambda *_: HttpHosts()  # type: ignore[assignment, misc]
        ray = hosted_workers.RayHosts("", arguments.hosts_http)
    return serve(
        FleetSource(arguments.fleet, presets=PRESETS, changes=arguments.changes, adjust=adjust),
        port=0,
        worker_command=(sys.executable, str(worker)),
        own_process=True,
        ray=ray,
    )


if __name__ == "__main__":
    sys.exit(main())
