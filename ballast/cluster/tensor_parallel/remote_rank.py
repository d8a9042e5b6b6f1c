"""Start a further rank's process, and hold the first rank's connections to it.

Used by the worker's process, which starts the ranks early, and by `GroupMachine`.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack

from ballast.core.event import TransferDoneEvent
from ballast.core.settings import FleetSettings
from ballast.isolation.environment import child_environment
from ballast.transport.tensor_parallel.rank_connections import RankConnection, RankGone
from ballast.transport.tensor_parallel.rank_messages import LayersSettledEvent, TransferLandedEvent

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "ballast.cluster.tensor_parallel.rank_process")
_CONNECTIONS = ("memory", "models", "jobs", "events")
_END_SECONDS = 30.0
"""Time for a rank to end once its connections are closed; then it is killed."""


def start_ranks(fleet: FleetSettings) -> list[RemoteRank]:
    """Start the further ranks of the fleet's first device; the first rank is this process."""
    device = fleet.device
    return [RemoteRank(rank, device.name) for rank in range(1, device.tensor_parallel)]


class RemoteRank:
    """Owns the process of a further rank, and the connections to it."""

    def __init__(self, rank: int, device: str) -> None:
        """Start the process, which ends with the calling thread."""
        self.rank = rank
        self._lost: Callable[[RemoteRank], None] | None = None
        self._transfer_landed: Callable[[TransferDoneEvent], None] | None = None
        self._layers_settled: Callable[[LayersSettledEvent], None] | None = None
        with ExitStack() as remote_ends:
            pairs = {name: socket.socketpair() for name in _CONNECTIONS}
            for _, end in pairs.values():
                remote_ends.callback(end.close)  # else the process's death would go unnoticed
            options = [
                text for n, (_, end) in pairs.items() for text in (f"--{n}", str(end.fileno()))
            ]
            self._process = subprocess.Popen(
                (*COMMAND, "--parent", str(os.getpid()), *options),
                stdin=subprocess.DEVNULL,
                pass_fds=[end.fileno() for _, end in pairs.values()],
                env=child_environment(),
            )
        connections = {name: RankConnection(end) for name, (end, _) in pairs.items()}
        self.memory, self.models, self.jobs = (
            connections["memory"],
            connections["models"],
            connections["jobs"],
        )
        self._events = connections["events"]
        name = f"rank{rank} of {device}"
        self._listener = threading.Thread(target=self._listen, name=name, daemon=True)

    def listen(
        self,
        transfer_landed: Callable[[TransferDoneEvent], None],
        layers_settled: Callable[[LayersSettledEvent], None],
        lost: Callable[[RemoteRank], None],
    ) -> None:
        """Start a thread that calls `transfer_landed` and `layers_settled` on the rank's events,
        and `lost` once the process has ended, also after `close`."""
        self._transfer_landed, self._layers_settled = transfer_landed, layers_settled
        self._lost = lost
        self._listener.start()

    def exit_reason(self) -> str:
        """Describe how the process ended."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it runs"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Close the connections, upon which the process ends, and kill it if it does not."""
        for connection in (self.jobs, self.models, self.memory, self._events):
            connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("rank %d is killed", self.rank)
            self._process.kill()
            self._process.wait()
        if self._listener.is_alive():
            self._listener.join()

    def _listen(self) -> None:
        try:
            while True:
                event = self._events.receive()
                if isinstance(event, TransferLandedEvent) and self._transfer_landed is not None:
                    self._transfer_landed(event.done)
                elif isinstance(event, LayersSettledEvent) and self._layers_settled is not None:
                    self._layers_settled(event)
        except RankGone:
            if self._lost is not None:
                self._lost(self)
