"""`ballast serve FLEET --ray ADDRESS` whose workers are all connected over TCP.

On one machine every node of Ray is the server's own host, to which it needs no encryption.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ballast.cluster.hosts.hosted_workers import RayHosts
from ballast.cluster.logs import set_up_logs
from ballast.fleet.fleet_source import FleetSource
from ballast.policy.presets import PRESETS
from ballast.server.serve import serve


def main() -> int:
    """Called `serve FILE --port N --ray ADDRESS`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("fleet", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ray", required=True)
    asked = parser.parse_args()
    set_up_logs("server", "text", "info")  # as `ballast serve` does: requests are logged
    source = FleetSource(asked.fleet, presets=PRESETS)
    return serve(source, port=asked.port, ray=RayHosts(asked.ray, local=False))


if __name__ == "__main__":
    sys.exit(main())
