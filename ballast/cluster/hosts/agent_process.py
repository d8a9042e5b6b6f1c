"""Run the agent of a host: `python -m ballast.cluster.hosts.agent_process --parent PID`.

Started on each host by what places devices there (an actor of Ray). It makes its keys, writes the
public one to standard output, and reads the server's address and key, a line of JSON, from standard
input: no secret leaves the process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys

import msgspec

from ballast.cluster.hosts.agent import HostAgent
from ballast.cluster.logs import FORMAT_VARIABLE, set_up_logs
from ballast.cluster.worker.local_process import COMMAND
from ballast.isolation.orphan import die_with
from ballast.transport.curve import CurveKeys, CurveLink


class Server(msgspec.Struct, frozen=True):
    """Where the server is."""

    address: str
    key: str
    """Its public key."""


def main() -> None:
    """Run until the connection to the server is lost, or the parent ends."""
    parser = argparse.ArgumentParser(prog="ballast.cluster.hosts.agent_process")
    parser.add_argument("--parent", type=int, required=True, help="process id of its parent")
    parser.add_argument("--worker", nargs=argparse.REMAINDER, help="command of its workers")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its parent decides
    set_up_logs("agent", os.environ.get(FORMAT_VARIABLE, "text"), "warning")
    own = CurveKeys.new()
    print(own.public, flush=True)
    line = sys.stdin.readline()
    if not line:
        return
    server = msgspec.json.decode(line, type=Server)

    async def run() -> None:
        await HostAgent(
            CurveLink(server.address, server.key, own), arguments.worker or COMMAND
        ).run()

    asyncio.run(run())
    logging.getLogger(__name__).warning("the server is gone; all workers of this host have ended")


if __name__ == "__main__":
    main()
