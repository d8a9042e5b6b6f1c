"""The ranks of a model as threads of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ballast.core.job import SequenceWork
from ballast.models.parallel.exchanges import GlooExchange, SharedExchange
from ballast.models.parallel.model import ParallelModel
from ballast.weights.sharding import Shard
from tests.models.tiny import Served


class Group:
    """`ranks` parts of the model at `path`; `first` runs jobs, and the others with it. They meet
    through gloo at the file `meeting`, or if there is none in shared memory."""

    def __init__(
        self,
        path: Path,
        meeting: Path | None,
        ranks: int,
        **settings: Any,
    ) -> None:
        self._threads = [ThreadPoolExecutor(1, initializer=alone) for _ in range(ranks)]
        self._running: list[Future[None]] = []
        settings = {"model_impl": "auto", "linear": "auto", **settings}

        shared = os.memfd_create("meeting")

        def make(rank: int) -> Served:
            shard = Shard(rank, ranks)
            exchange = (
                SharedExchange(shared, shard, 1 << 22)
                if meeting is None
                else GlooExchange(meeting, shard)
            )
            joined: dict[str, Any] = {"exchange": exchange}
            if rank == 0:
                joined["followers"] = self
            return Served(path, shard=shard, ranks=joined, **settings)

        coming = [t.submit(make, rank) for rank, t in enumerate(self._threads)]
        self.first, *self.others = [c.result() for c in coming]
        os.close(shared)

    def begin(self, model: str, work: Sequence[SequenceWork], *, head: bool) -> None:
        for thread, rank in zip(self._threads[1:], self.others, strict=True):
            assert isinstance(rank.model, ParallelModel)
            self._running.append(thread.submit(rank.model.compute, work, head=head))

    def end(self) -> None:
        for job in self._running:
            job.result()
        self._running.clear()

    def broken(self, error: BaseException) -> None:
        raise AssertionError("ranks are out of step") from error

    def each(self, do: Callable[[int, Any], Any]) -> list[Any]:
        """What `do` returns of each rank's number and model, on all of them at the same time."""
        models = [rank.model for rank in (self.first, *self.others)]
        outcome = [
            thread.submit(do, rank, model)
            for rank, (thread, model) in enumerate(zip(self._threads, models, strict=True))
        ]
        return [t.result() for t in outcome]

    def close(self) -> None:
        for rank in (self.first, *self.others):
            rank.close()
        for thread in self._threads:
            thread.shutdown()


def alone() -> None:
    torch.set_num_threads(1)
