"""Run the process of a further rank: `python -m ballast.cluster.tensor_parallel.rank_process`.

Started by `RemoteRank`. It only carries out commands of the first rank, the worker. These come over
three connections, each with a thread of its own, so that neither a job nor a load delays operations
on memory. The process ends with the first rank.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from ballast.cluster.logs import FORMAT_VARIABLE, set_up_logs
from ballast.cluster.tensor_parallel.rank_server import DONE, RankServer
from ballast.core.errors import BallastError, BrokenPromise, DeviceError, DeviceLost
from ballast.core.event import Event, TransferDoneEvent
from ballast.isolation.calls import Isolation
from ballast.isolation.orphan import die_with
from ballast.transport.tensor_parallel.rank_connections import LeaderConnection, RankGone
from ballast.transport.tensor_parallel.rank_messages import (
    JoinGroupMsg,
    MeetRanksMsg,
    RankReply,
    RefusedReply,
    RunJobMsg,
    TransferLandedEvent,
)
from ballast.weights.manifest import fork_zygote

log = logging.getLogger(__name__)

PROCESS_NAME = "ballast-rank"
"""Name of the process, as operators see it."""


def _serve_connection(
    server: RankServer, connection: LeaderConnection, threads: int | None = None
) -> None:
    """Execute the commands of one connection, until the first rank ends, and this process with it.

    The process also ends after a fault to which there is no reply: after a fault in a job the ranks
    are out of step; any other is a bug. `threads`: of PyTorch; None: its
    default.
    """
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        while True:
            command = connection.receive()
            try:
                reply: RankReply = server.execute(command)
            except DeviceLost:
                raise
            except DeviceError as error:
                reply = RefusedReply(error.call, error.reason)
            except BallastError as error:
                if isinstance(command, RunJobMsg):
                    raise
                reply = RefusedReply(
                    None if isinstance(error, BrokenPromise) else "load", str(error)
                )
            connection.send(reply)
    except RankGone:
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - it ends the process
        _end_process(error)


def _end_process(error: BaseException) -> NoReturn:
    log.critical("this rank ends", exc_info=error)
    logging.shutdown()
    os._exit(1)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the process."""
    parser = argparse.ArgumentParser(prog="ballast.cluster.tensor_parallel.rank_process")
    parser.add_argument("--parent", type=int, required=True, help="process id of the first rank")
    for name in ("memory", "models", "jobs", "events"):
        parser.add_argument(f"--{name}", type=int, required=True, help="descriptor of a socket")
    arguments = parser.parse_args(argv)
    die_with(arguments.parent)
    Path("/proc/self/comm").write_text(PROCESS_NAME)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    set_up_logs("rank", os.environ.get(FORMAT_VARIABLE, "text"), "warning")
    isolation = fork_zygote()
    serve_first_rank(
        LeaderConnection(arguments.memory),
        LeaderConnection(arguments.models),
        LeaderConnection(arguments.jobs),
        LeaderConnection(arguments.events),
        isolation=isolation,
    )
    raise AssertionError("unreachable")


def serve_first_rank(
    memory: LeaderConnection,
    models: LeaderConnection,
    jobs: LeaderConnection,
    events: LeaderConnection,
    isolation: Isolation | None = None,
) -> None:
    """Join the group as the rank that the first rank assigns, and serve it until it ends, and this
    process with it."""
    server = _join(memory, events, isolation)
    for name, connection, threads in (
        ("models", models, None),
        ("jobs", jobs, server.device.threads),
    ):
        arguments = (server, connection, threads)
        target = _serve_connection
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()
    _serve_connection(server, memory)


def _join(
    memory: LeaderConnection,
    events: LeaderConnection,
    isolation: Isolation | None,
) -> RankServer:
    """Build the rank that the first rank assigns, and join the others; on a fault the process
    ends."""

    def transfer_landed(done: Event) -> None:
        assert isinstance(done, TransferDoneEvent)
        events.send(TransferLandedEvent(done))

    try:
        group = memory.receive()
        assert isinstance(group, JoinGroupMsg)
        try:
            server = RankServer(group, transfer_landed, events.send, isolation)
        except BallastError as error:
            if isinstance(error, DeviceError):
                memory.send(RefusedReply(error.call, error.reason))
            else:
                memory.send(RefusedReply("join", str(error)))
            memory.receive()  # raises RankGone when the first rank has read why
            raise
        memory.send(DONE)
        place = memory.receive()
        assert isinstance(place, MeetRanksMsg)
        server.meet(memory.receive_descriptor() if place.meeting is None else Path(place.meeting))
        memory.send(DONE)
        return server
    except RankGone:
        os._exit(0)
    except BaseException:
        # The other ranks may wait for this one without end: they notice its death.
        log.exception("this rank does not join")
        logging.shutdown()
        os._exit(1)


if __name__ == "__main__":
    main()
