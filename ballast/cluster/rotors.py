"""The rotor of a tensor-parallel group: every rank brings its parts of a layer by itself.

Ranks meet within a layer, so that one whose part is late keeps the others waiting there. Pages are
mapped on all ranks before they turn, and all are quiet before the group has settled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ballast.core.clock import Clock
from ballast.core.rotation import Rotation
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.transport.tensor_parallel.rank_connections import RankConnection
from ballast.transport.tensor_parallel.rank_messages import (
    ForgetLayersMsg,
    RemapLayersMsg,
    SettleLayersMsg,
)
from ballast.weights.link_rotor import LinkRotor
from ballast.weights.rotor import NOBODY, ArrivalPlan


class GroupRotor(LinkRotor):
    """The first rank's, which has the others do as it does. Loads and stalls are its own."""

    def __init__(
        self,
        model: str,
        copies: Sequence[Copy],
        link: HostLink,
        clock: Clock,
        settled: Callable[[], None],
        others: Sequence[RankConnection],
    ) -> None:
        """`settled`: called when all ranks are, by any thread; `quiet` is to be told of others."""
        super().__init__(model, copies, link, clock, self._arrived)
        self._model, self._others, self._group_settled = model, others, settled
        self._theirs: list[tuple[int, ...]] = []
        """What slots of the ranks that have settled hold."""
        self._awaited = 0
        """Ranks that have yet to settle."""
        self._count = threading.Lock()

    @property
    def held(self) -> tuple[int, ...]:
        """Where it is there on all ranks."""
        return tuple(
            layer if all(theirs[slot] == layer for theirs in self._theirs) else NOBODY
            for slot, layer in enumerate(super().held)
        )

    def settle(self) -> None:
        self._theirs, self._awaited = [], 1 + len(self._others)
        for other in self._others:
            other.call(SettleLayersMsg(self._model))
        super().settle()

    def turn(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        told = RemapLayersMsg(self._model, rotation, tuple(held), tuple(missing))
        for other in self._others:
            other.call(told)
        super().turn(rotation, held, missing)

    def forget(self) -> None:
        for other in self._others:
            other.call(ForgetLayersMsg(self._model))
        super().forget()

    def bring(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        """The others do not tell how far their parts have come."""
        return False

    def quiet(self, held: tuple[int, ...]) -> None:
        """Another rank has settled; by any thread."""
        with self._count:
            self._theirs.append(held)
        self._arrived()

    def _arrived(self) -> None:
        with self._count:
            self._awaited -= 1
            last = self._awaited == 0
        if last:
            self._group_settled()
