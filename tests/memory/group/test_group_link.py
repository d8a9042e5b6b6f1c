"""A group's transfer has landed when the last rank has its part, and failed if any has not."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import numpy as np
import pytest

from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction, LinkRates
from ballast.live.inbox import MonotonicClock
from ballast.memory.copies import Copy
from ballast.memory.group.link import GroupLink, share_of
from ballast.memory.transfer import HostLink


def test_it_lands_with_the_last_rank() -> None:
    result: list[TransferDoneEvent] = []
    carried: list[tuple[int, int]] = []

    def carry(transfer_id: int, copies: Sequence[Copy], stream: str) -> None:
        carried.append((transfer_id, len(copies)))

    source = np.ones(1 << 16, np.uint8)
    target = np.zeros_like(source)
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def own_landed(done: TransferDoneEvent) -> None:
        link.landed(done)
        ended.put(None)

    own = HostLink(MonotonicClock(), own_landed)
    link = GroupLink(own, result.append, carry, ranks=3)
    copy = Copy(target.ctypes.data, source.ctypes.data, source.nbytes)
    link.start(7, [copy])
    link.start(8, [copy])
    link.landed(TransferDoneEvent(7, 5, 60.0))
    link.landed(TransferDoneEvent(8, 5, 1.0, "torn"))
    for _ in range(2):
        ended.get(timeout=240)
    assert (result, carried) == ([], [(7, 1), (8, 1)])
    link.landed(TransferDoneEvent(8, 5, 2.0))
    link.landed(TransferDoneEvent(7, 5, 50.0))
    assert target.all()
    assert [(d.transfer_id, d.error) for d in result] == [(8, "torn"), (7, None)]
    assert result[1].seconds == 60.0
    link.close()


def test_it_carries_to_the_device_alone() -> None:
    link = GroupLink(HostLink(MonotonicClock(), print), print, print, ranks=2)
    with pytest.raises(DeviceError, match="to the device alone"):
        link.start(1, [], direction=Direction.TO_HOST)
    link.close()


def test_ranks_share_a_pace_equally() -> None:
    assert share_of(LinkRates.even(8e9, 12e9), 2) == LinkRates.even(4e9, 6e9)
