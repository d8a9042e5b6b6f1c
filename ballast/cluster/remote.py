"""One further rank of a group as the first one has it: its process and its connections."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack

from ballast.core.event import TransferDone
from ballast.core.settings import FleetSettings
from ballast.transport.tensor_parallel.rank_connections import RankConnection, RankGone
from ballast.transport.tensor_parallel.rank_messages import LayersSettledEvent, TransferLandedEvent

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "ballast.cluster.rank")
_CONNECTIONS = ("memory", "models", "jobs", "events")
_LAST_SECONDS = 5.0
"""For a rank to end once its connections are closed; it is killed then."""


def start_ranks(fleet: FleetSettings) -> list[RemoteRank]:
    """The processes that the first device of `fleet` has besides the one that calls this."""
    device = fleet.device
    return [RemoteRank(rank, device.name) for rank in range(1, device.tensor_parallel)]


class RemoteRank:
    """One of the other ranks: its process and its connections."""

    def __init__(self, rank: int, device: str) -> None:
        """Starts it. It ends with the thread that does so."""
        self.rank = rank
        self._lost: Callable[[RemoteRank], None] | None = None
        self._landed: Callable[[TransferDone], None] | None = None
        self._quiet: Callable[[LayersSettledEvent], None] | None = None
        with ExitStack() as theirs:
            pairs = {name: socket.socketpair() for name in _CONNECTIONS}
            for _, end in pairs.values():
                theirs.callback(end.close)  # so that its end is noticed
            options = [
                text for n, (_, end) in pairs.items() for text in (f"--{n}", str(end.fileno()))
            ]
            self._process = subprocess.Popen(
                (*COMMAND, "--parent", str(os.getpid()), *options),
                stdin=subprocess.DEVNULL,
                pass_fds=[end.fileno() for _, end in pairs.values()],
            )
        ours = {name: RankConnection(end) for name, (end, _) in pairs.items()}
        self.memory, self.models, self.jobs = ours["memory"], ours["models"], ours["jobs"]
        self._events = ours["events"]
        name = f"rank{rank} of {device}"
        self._listener = threading.Thread(target=self._listen, name=name, daemon=True)

    def listen(
        self,
        landed: Callable[[TransferDone], None],
        quiet: Callable[[LayersSettledEvent], None],
        lost: Callable[[RemoteRank], None],
    ) -> None:
        """From now on `landed` is told of transfers that end there, `quiet` when loads of layers
        have, and `lost` when it has ended itself, after `close` too; by a thread."""
        self._landed, self._quiet, self._lost = landed, quiet, lost
        self._listener.start()

    def epitaph(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            return "it runs"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """It ends by itself, or is killed."""
        for connection in (self.jobs, self.models, self.memory, self._events):
            connection.close()
        try:
            self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("rank %d is killed", self.rank)
            self._process.kill()
            self._process.wait()
        if self._listener.is_alive():
            self._listener.join()

    def _listen(self) -> None:
        try:
            while True:
                told = self._events.receive()
                if isinstance(told, TransferLandedEvent) and self._landed is not None:
                    self._landed(told.done)
                elif isinstance(told, LayersSettledEvent) and self._quiet is not None:
                    self._quiet(told)
        except RankGone:
            if self._lost is not None:
                self._lost(self)
