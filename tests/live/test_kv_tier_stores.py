"""What is stored of a borrowed page is not read once its block is void, or the device closes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction
from ballast.core.units import MiB
from ballast.engine.kv_tiers import BlockToStore
from ballast.kv.tier_shelf import KvBlock
from ballast.live.kv_tiers import LiveKvTiers
from ballast.live.own_store import OwnConnection
from ballast.memory.copies import Copy
from ballast.memory.transfer import CopyGate, HostLink
from tests.kv.test_directory import memory_only

N_BYTES = 4096


class LateLink:
    """A link whose copies are made when `copy` is called."""

    def __init__(self) -> None:
        self.gates: list[CopyGate] = []
        self._transfers: list[tuple[int, Sequence[Copy], Callable[[TransferDoneEvent], None]]] = []

    def start(
        self,
        number: int,
        copies: Sequence[Copy],
        stream: str,
        direction: Direction,
        on_done: Callable[[TransferDoneEvent], None],
        gate: CopyGate,
    ) -> None:
        self.gates.append(gate)
        self._transfers.append((number, copies, on_done))

    def copy(self) -> None:
        for gate, (number, copies, done) in zip(self.gates, self._transfers, strict=True):
            if not gate.is_shut:
                for copy in copies:
                    ctypes.memmove(copy.dst, copy.src, copy.n_bytes)
            done(TransferDoneEvent(number, 0, 0.0, "shut" if gate.is_shut else None))


def stored(what: Callable[[LiveKvTiers], object]) -> tuple[list[bool], set[bytes]]:
    """Store an own block and two borrowed ones, and do something before the copies are made; return
    which copies were stopped, and the names of the blocks that are kept."""
    store, link = memory_only(8 * MiB), LateLink()
    tiers = LiveKvTiers(OwnConnection(store), cast("HostLink", link), lambda event: None)
    memory = ctypes.create_string_buffer(N_BYTES)
    names = [bytes([i]) * 32 for i in range(3)]
    blocks = [
        BlockToStore(i, ctypes.addressof(memory), KvBlock(name, b"", N_BYTES, "m"), i > 0)
        for i, name in enumerate(names)
    ]
    tiers.store("m", blocks)
    what(tiers)
    stopped = [gate.is_shut for gate in link.gates]
    link.copy()
    tiers._lands.shutdown(wait=True)
    tiers.close()
    found = {name for name in names if store.look_up("m", [name]) == "h"}
    return stopped, found


def store_again(tiers: LiveKvTiers) -> None:
    """Store blocks while they are stored: `void` still reaches the copy that is made of one."""
    tiers.store("m", [store.block for store in tiers._storing.values()])


@pytest.mark.parametrize(
    ("what", "stopped", "kept"),
    [
        (lambda tiers: None, [False] * 3, {0, 1, 2}),
        (lambda tiers: tiers.void("m", 0), [False] * 3, {1, 2}),
        (lambda tiers: tiers.void("m", 1), [False, True, False], {0, 2}),
        (lambda tiers: (store_again(tiers), tiers.void("m", 0)), [False] * 3, {1, 2}),
    ],
)
def test_a_borrowed_block_that_is_void_is_read_no_more(
    what: Any, stopped: list[bool], kept: set[int]
) -> None:
    assert stored(what) == (stopped, {bytes([i]) * 32 for i in kept})


def test_a_device_that_closes_stops_all_copies() -> None:
    stopped, kept = stored(LiveKvTiers.close)
    assert stopped == [True] * 3
    assert kept == set()
