"""Run the agent of a host: `python -m ballast.cluster.hosts.agent_process --parent PID`.

Started on each host by what places devices there (an actor of Ray). It makes its keys, writes the
public one to standard output, and reads the address and key of each server, a line of JSON, from
standard input: no secret leaves the process. It ends with `ABANDONED` once no server comes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Sequence

from ballast.cluster.hosts.agent import HostAgent
from ballast.cluster.hosts.server_inbox import ServerInbox
from ballast.cluster.logs import FORMAT_VARIABLE, set_up_logs
from ballast.cluster.worker.early_process import COMMAND
from ballast.core.errors import BallastError
from ballast.isolation.orphan import die_with
from ballast.transport.curve import CurveKeys

log = logging.getLogger(__name__)


ABANDONED = 3
"""Exit code of an agent whose server is gone, and for whose devices no other has come."""
FIRST_SECONDS = 300.0
"""Time for the first server to come."""


async def run(own: CurveKeys, command: Sequence[str]) -> int:
    """Serve one server after the other, until one ends the agent (0) or no more comes."""
    inbox, agent = ServerInbox(), HostAgent(own, command)
    seconds = FIRST_SECONDS
    try:
        while (server := await inbox.take(seconds)) is not None:
            try:
                seconds = await agent.serve(server)
            except BallastError as error:
                log.warning("a server cannot be understood: %s", error)
                return 1
            if not seconds:
                return 0
            log.warning("the server is gone; its devices are kept for %g s", seconds)
        return ABANDONED
    finally:
        await agent.close()


def main() -> None:
    """Run until no server comes any more, or the parent ends."""
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
    code = asyncio.run(run(own, arguments.worker or COMMAND))
    log.warning("the server is gone; all workers of this host have ended")
    logging.shutdown()
    os._exit(code)  # a thread still reads


if __name__ == "__main__":
    main()
