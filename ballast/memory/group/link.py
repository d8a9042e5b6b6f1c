"""Transfer bytes on all ranks of a tensor-parallel group, as one `Link`.

Every rank transfers its shard; used by the group's machine on the first rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction, LinkRates
from ballast.memory.copies import Copy
from ballast.memory.transfer import ACTIVATIONS, Link


class GroupLink:
    """Implements `Link`: a transfer has landed when all ranks have their parts."""

    def __init__(
        self,
        own: Link,
        on_done: Callable[[TransferDoneEvent], None],
        carry: Callable[[int, Sequence[Copy], str], None],
        ranks: int,
    ) -> None:
        """`carry` starts the transfer on the other ranks; each end of theirs is passed to
        `landed`."""
        self._own, self._on_done, self._carry, self._ranks = own, on_done, carry, ranks
        self._ends: dict[int, list[TransferDoneEvent]] = {}
        self._lock = threading.Lock()

    paced = True

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of one rank's part: the loop knows all sizes of one rank."""
        return self._own.bytes_per_second

    def start(
        self,
        transfer_id: int,
        copies: Sequence[Copy],
        stream: str = ACTIVATIONS,
        direction: Direction = Direction.TO_DEVICE,
    ) -> None:
        if direction is not Direction.TO_DEVICE:
            raise DeviceError("link", "a group's ranks carry weights, and to the device alone")
        with self._lock:
            self._ends[transfer_id] = []
        self._carry(transfer_id, copies, stream)
        self._own.start(transfer_id, copies, stream)

    def landed(self, done: TransferDoneEvent) -> None:
        """Record that a transfer has ended on one rank. From any thread."""
        with self._lock:
            ends = self._ends[done.transfer_id]
            ends.append(done)
            if len(ends) < self._ranks:
                return
            del self._ends[done.transfer_id]
        errors = [e.error for e in ends if e.error is not None]
        seconds = max(e.seconds for e in ends)
        self._on_done(
            TransferDoneEvent(
                done.transfer_id, done.n_bytes, seconds, errors[0] if errors else None
            )
        )

    def stop(self, transfer_id: int) -> None:
        """Do nothing: the parts of the other ranks would go on."""

    def close(self) -> None:
        self._own.close()


def share_of(whole: LinkRates, ranks: int) -> LinkRates:
    """Return the rates of a rank's equal part of a link."""
    return LinkRates(
        whole.to_device / ranks,
        whole.to_host / ranks,
        whole.to_device_mixed / ranks,
        whole.to_host_mixed / ranks,
    )
