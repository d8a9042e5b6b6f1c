"""Stream layers of a tensor-parallel model: the first rank's stream, which commands the others.

Built by `GroupMachine`. Every rank loads its own parts of a layer over its own link. Ranks exchange
tensors within each layer, so a late part stalls all of them. Pages are mapped on all ranks before a
rotation changes, and the group has settled when all ranks have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ballast.core.clock import Clock
from ballast.core.rotation import Rotation
from ballast.live.host_stream import HostStream
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.residency.arrival import ArrivalPlan
from ballast.residency.buffer import NOBODY
from ballast.transport.tensor_parallel.rank_connections import RankConnection
from ballast.transport.tensor_parallel.rank_messages import (
    ForgetLayersMsg,
    RemapLayersMsg,
    SettleLayersMsg,
)


class GroupStream(HostStream):
    """The first rank's stream, whose commands are repeated on the further ranks.

    Its counts of loads and stalls are those of the first rank.
    """

    def __init__(
        self,
        model: str,
        link: HostLink,
        clock: Clock,
        on_settled: Callable[[], None],
        others: Sequence[RankConnection],
    ) -> None:
        """`on_settled`: called by any thread when all ranks have settled; those of `others` are
        reported by `rank_settled`."""
        super().__init__(model, link, clock, self._count_settled)
        self._others, self._on_group_settled = others, on_settled
        self._held_by_others: list[tuple[int, ...]] = []
        """For each further rank that has settled: the layer in each slot."""
        self._unsettled = 0
        """Ranks that have yet to settle."""
        self._settled_lock = threading.Lock()

    @property
    def held(self) -> tuple[int, ...]:
        """Layer in each slot, NOBODY where the ranks differ."""
        return tuple(
            layer if all(held[slot] == layer for held in self._held_by_others) else NOBODY
            for slot, layer in enumerate(super().held)
        )

    def settle(self) -> None:
        self._held_by_others, self._unsettled = [], 1 + len(self._others)
        for other in self._others:
            other.call(SettleLayersMsg(self._model))
        super().settle()

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        command = RemapLayersMsg(self._model, rotation, tuple(held), tuple(missing))
        for other in self._others:
            other.call(command)
        super().remap(rotation, held, missing)

    def forget(self) -> None:
        for other in self._others:
            other.call(ForgetLayersMsg(self._model))
        super().forget()

    def start_load(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        """Return False: the progress of other ranks' loads is not known here."""
        return False

    def rank_settled(self, held: tuple[int, ...]) -> None:
        """Note that a further rank has settled, and what its slots hold; by any thread."""
        with self._settled_lock:
            self._held_by_others.append(held)
        self._count_settled()

    def _count_settled(self) -> None:
        with self._settled_lock:
            self._unsettled -= 1
            last = self._unsettled == 0
        if last:
            self._on_group_settled()
