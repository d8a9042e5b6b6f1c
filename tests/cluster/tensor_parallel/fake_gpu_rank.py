"""A further rank of a group of GPUs that are none, in this process: its start takes no time."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import NoReturn

import pytest

from ballast.cluster.tensor_parallel import rank_process
from ballast.cluster.tensor_parallel.cuda_rank_machine import CudaRankMachine
from ballast.cluster.tensor_parallel.rank_machine import MakeRankMachine
from ballast.cluster.tensor_parallel.remote_rank import RemoteRank
from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.link import LinkRates
from ballast.core.settings import DeviceSettings
from ballast.transport.tensor_parallel.rank_connections import LeaderConnection, RankConnection
from ballast.weights.sharding import Shard
from tests.engine.gpus import OnHost
from tests.memory.fake_cuda import FakeDriver

GPUS = 2


def make(
    device: DeviceSettings,
    shard: Shard,
    pace: LinkRates | None,
    clock: Clock,
    post: Callable[[Event], None],
) -> CudaRankMachine:
    """Implements `MakeRankMachine`. Every rank has a driver of its own, which shows both GPUs."""
    driver = FakeDriver(n_bytes=1 << 30, devices=GPUS)
    return CudaRankMachine(device, shard, pace, clock, post, driver, OnHost())


class Ends:
    """What threads of a rank end its process with: here it ends those threads, and no more."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.recorded = threading.Semaphore(0)

    def __call__(self, code: int) -> NoReturn:
        self.codes.append(code)
        self.recorded.release()
        raise SystemExit


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    made = Ends()
    monkeypatch.setattr(os, "_exit", made)
    return made


class RankOnThreads(RemoteRank):
    """Its threads answer as the process would."""

    def __init__(self, make: MakeRankMachine, ends: Ends) -> None:
        self.rank, self._ends = 1, ends
        self._lost = self._transfer_landed = self._layers_settled = None
        pairs = [socket.socketpair() for _ in range(4)]
        self.memory, self.models, self.jobs, self._events = (RankConnection(a) for a, _ in pairs)
        self._theirs = [LeaderConnection(b.detach()) for _, b in pairs]
        self._listener = threading.Thread(target=self._listen, daemon=True)
        threading.Thread(
            target=rank_process.serve_first_rank, args=(*self._theirs, make), daemon=True
        ).start()

    def exit_reason(self) -> str:
        return "a thread"

    def close(self) -> None:
        for connection in (self.jobs, self.models, self.memory):
            connection.close()
            self._ends.recorded.acquire()
        self._events.close()
        for theirs in self._theirs:
            theirs._connection.close()
        self._listener.join()
