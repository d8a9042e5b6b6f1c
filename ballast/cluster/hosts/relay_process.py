"""Run the HTTP relay of a host: `python -m ballast.cluster.hosts.relay_process --parent PID ...`.

Started on each host by what places devices there (an actor of Ray). It writes where it listens and
its public key, a line of JSON, to standard output, and reads the address and key of each server
that is to answer its clients, a line of JSON each, from standard input. It ends by itself once no
server has come for `ABANDONED_SECONDS`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal

import msgspec

from ballast.cluster.hosts.http_relay import HttpRelay
from ballast.cluster.hosts.server_inbox import ServerInbox
from ballast.cluster.logs import FORMAT_VARIABLE, set_up_logs
from ballast.core.errors import BallastError
from ballast.isolation.orphan import die_with
from ballast.transport.curve import CurveKeys, CurveLink

log = logging.getLogger(__name__)

ABANDONED_SECONDS = 600.0
"""Time without a server after which the relay ends."""


class RelayStarted(msgspec.Struct, frozen=True):
    """What a relay reports once it listens, or cannot."""

    port: int = 0
    key: str = ""
    """Its public key."""
    error: str = ""


async def run(host: str, port: int, files: int) -> None:
    """Relay until no server comes any more. `files`: as of `HttpRelay`."""
    relay, own = HttpRelay(files), CurveKeys.new()
    try:
        await relay.listen(host, port)
        started = RelayStarted(relay.address[1], own.public)
    except OSError as error:
        started = RelayStarted(error=f"{host}:{port}: {error.strerror or error}")
    print(msgspec.json.encode(started).decode(), flush=True)
    if started.error:
        return
    inbox = ServerInbox()
    while (server := await inbox.take(ABANDONED_SECONDS)) is not None:
        try:
            await relay.serve(CurveLink(server.address, server.key, own))
        except BallastError as error:
            log.warning("a server cannot be understood: %s", error)
    relay.close()


def main() -> None:
    """Run until no server comes any more, or the parent ends."""
    parser = argparse.ArgumentParser(prog="ballast.cluster.hosts.relay_process")
    parser.add_argument("--parent", type=int, required=True, help="process id of its parent")
    parser.add_argument("--host", required=True, help="address to listen at")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its parent decides
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files = 1 << 20 if most == resource.RLIM_INFINITY else most
    set_up_logs("relay", os.environ.get(FORMAT_VARIABLE, "text"), "warning")
    asyncio.run(run(arguments.host, arguments.port, files))


if __name__ == "__main__":
    main()
