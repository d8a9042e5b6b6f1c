"""Weights come wholly or not at all, where their addresses say, and leave nothing behind."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from ballast.core.actions import Short
from ballast.core.clock import VirtualClock
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.model import ModelSpec
from ballast.core.rotation import Rotation
from ballast.core.units import KiB
from ballast.memory.copies import Copy
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.transfer import HostLink
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm
from ballast.residency.arrival import ArrivalPlan
from ballast.weights.residency import WeightsOnDevice
from ballast.weights.weight_stream import Loads

SEGMENTS = (100, 64 * KiB, 64 * KiB + 1, 5)


def make_spec(segment_bytes: tuple[int, ...] = SEGMENTS) -> ModelSpec:
    return ModelSpec(
        name="m",
        n_layers=2,
        n_heads=1,
        kv_heads=1,
        head_dim=4,
        hidden=4,
        intermediate=4,
        vocab=10,
        dtype="float32",
        max_model_len=64,
        block_tokens=16,
        segment_bytes=segment_bytes,
        fingerprint="f",
    )


class Notebook:
    """A link that writes down what it is asked to carry."""

    bytes_per_second = 1e9

    def __init__(self) -> None:
        self.started: list[tuple[int, list[Copy]]] = []
        self.broken = False

    def start(self, transfer_id: int, copies: Sequence[Copy]) -> None:
        if self.broken:
            raise DeviceError("link", "it is closed")
        self.started.append((transfer_id, list(copies)))

    def close(self) -> None:
        self.broken = True


def make(n_pages: int = 8) -> tuple[WeightsOnDevice, Pool, Notebook]:
    vm = NullVm(64 * KiB, n_pages)
    pool = Pool(vm, n_pages)
    link = Notebook()
    return WeightsOnDevice(make_spec(), pool, vm, link, [1000, 2000, 3000, 4000]), pool, link


def test_segments_begin_at_pages_and_do_not_overlap() -> None:
    weights, _, _ = make()
    assert [(s.at, s.n_pages, s.n_bytes) for s in weights.segments] == [
        (0, 1, 100),
        (1, 1, 64 * KiB),
        (2, 2, 64 * KiB + 1),
        (4, 1, 5),
    ]
    assert weights.pages == 5 == weights.spec.weight_pages(64 * KiB)
    assert all(weights.segment_address(i) % (64 * KiB) == 0 for i in range(4))
    for before, after in itertools.pairwise(weights.segments):
        assert before.address + before.n_bytes <= after.address


def test_activation_backs_everything_and_copies_each_segment_once() -> None:
    weights, pool, link = make()
    assert not weights.backed
    assert weights.activate(7) is None
    assert weights.backed
    assert pool.ledger.owners() == {"weights:m": 5}
    ((transfer, copies),) = link.started
    assert transfer == 7
    assert copies == [
        Copy(weights.segment_address(i), 1000 * (i + 1), n) for i, n in enumerate(SEGMENTS)
    ]


class Following:
    """A stream that writes down which loads it was to start, and starts those if told so."""

    def __init__(self, follows: bool = True) -> None:
        self.follows = follows
        self.loads, self.held = Loads(), ()
        self.brought: list[tuple[int, list[Copy], ArrivalPlan]] = []

    def start_load(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        if self.follows:
            self.brought.append((transfer_id, list(copies), coming))
        return self.follows

    def add_weights(self, copies: Sequence[Copy]) -> None: ...

    def settle(self) -> None: ...

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None: ...

    def forget(self) -> None: ...


def followed(rotor: Following) -> tuple[WeightsOnDevice, Notebook]:
    vm, link = NullVm(64 * KiB, 8), Notebook()
    hosts = [1000, 2000, 3000, 4000]
    pool = Pool(vm, 8)
    return WeightsOnDevice(make_spec(), pool, vm, link, hosts, stream=rotor), link


@pytest.mark.parametrize("ahead", [1, 64 * KiB + 1, 64 * KiB + 2, 1 << 40])
def test_what_may_come_ahead_of_its_layers_is_all_that_is_none(ahead: int) -> None:
    rotor = Following()
    weights, link = followed(rotor)
    assert weights.activate(7, ahead) is None
    ((transfer, copies, coming),) = rotor.brought
    assert (transfer, link.started) == (7, [])
    assert [copy.src for copy in copies] == [1000, 4000, 2000, 3000]
    first, total = 105 + 64 * KiB, sum(SEGMENTS)
    assert coming.layers == {0: first, 1: total}
    assert coming.opens == max(first, total - ahead)


def test_a_load_that_nobody_follows_is_the_links() -> None:
    for follows, ahead in ((True, 0), (False, 100)):
        rotor = Following(follows)
        weights, link = followed(rotor)
        assert weights.activate(7, ahead) is None
        assert rotor.brought == []
        ((_, copies),) = link.started
        assert [copy.src for copy in copies] == [1000, 2000, 3000, 4000]


def test_eviction_gives_all_pages_back_and_addresses_stay() -> None:
    weights, pool, link = make()
    addresses = [weights.segment_address(i) for i in range(4)]
    for transfer in range(3):
        assert weights.activate(transfer) is None
        weights.evict()
        assert (weights.backed, pool.free) == (False, 8)
    assert [weights.segment_address(i) for i in range(4)] == addresses
    assert [t for t, _ in link.started] == [0, 1, 2]


def test_a_short_pool_changes_nothing() -> None:
    weights, pool, link = make(7)
    pool.allocate("other", 4)
    assert weights.activate(1) == Short(2)
    assert (weights.backed, pool.free, link.started) == (False, 3, [])


def test_a_link_that_refuses_costs_no_pages() -> None:
    weights, pool, link = make()
    link.close()
    with pytest.raises(DeviceError):
        weights.activate(1)
    assert (weights.backed, pool.free) == (False, 8)


def test_twice_is_a_broken_promise() -> None:
    weights, _, _ = make()
    with pytest.raises(BrokenPromise):
        weights.evict()
    weights.activate(1)
    with pytest.raises(BrokenPromise):
        weights.activate(2)
    weights.close()


def test_every_segment_needs_a_host_address() -> None:
    vm = NullVm(64 * KiB, 8)
    with pytest.raises(BrokenPromise, match="host addresses"):
        WeightsOnDevice(make_spec(), Pool(vm, 8), vm, Notebook(), [1, 2, 3])


def test_bytes_arrive_again_after_the_pages_were_written_by_another() -> None:
    host = [np.random.default_rng(i).integers(0, 256, n, np.uint8) for i, n in enumerate(SEGMENTS)]
    done: list[TransferDoneEvent] = []
    arrived = threading.Semaphore(0)

    def on_done(event: TransferDoneEvent) -> None:
        done.append(event)
        arrived.release()

    vm = MemfdVm(64 * KiB, 6)
    pool = Pool(vm, 6)
    link = HostLink(VirtualClock(), on_done)
    weights = WeightsOnDevice(make_spec(), pool, vm, link, [a.ctypes.data for a in host])
    other = BackedRange(pool, vm, "other", 6 * 64 * KiB)
    try:
        for transfer in range(2):
            assert weights.activate(transfer) is None
            assert arrived.acquire(timeout=240)
            for segment, array in zip(weights.segments, host, strict=True):
                assert ctypes.string_at(segment.address, array.size) == array.tobytes()
            weights.evict()
            assert other.back(0, 6) is None
            ctypes.memset(other.range.base, 0x55, 6 * 64 * KiB)
            other.release(0, 6)
        result = [(d.transfer_id, d.error, d.n_bytes) for d in done]
        assert result == [(i, None, sum(SEGMENTS)) for i in range(2)]
        pool.validate()
    finally:
        link.close()
        other.close()
        weights.close()
        vm.close()


PARTS = (64 * KiB, 128 * KiB, 128 * KiB, 5)
"""Embeddings, two layers, a head: 1, 2, 2 and 1 pages."""


def in_parts(n_pages: int = 8) -> tuple[WeightsOnDevice, Pool, Notebook, Following]:
    vm, link, rotor = NullVm(64 * KiB, n_pages), Notebook(), Following()
    pool = Pool(vm, n_pages)
    hosts = [1000, 2000, 3000, 4000]
    made = WeightsOnDevice(make_spec(PARTS), pool, vm, link, hosts, stream=rotor)
    return made, pool, link, rotor


def test_the_last_segments_go_first_and_only_they_come_back() -> None:
    weights, pool, link, _ = in_parts()
    assert weights.activate(1) is None
    assert weights.transfer_landed()
    weights.announce_eviction(weights.plan.without(1))
    assert (weights.leaving_pages, weights.leaves_whole) == (2, False)
    weights.evict()
    assert (weights.backed, weights.filled, weights.present_pages, pool.free) == (
        False,
        False,
        4,
        4,
    )
    weights.validate()
    weights.announce_eviction(weights.plan.without(3))
    weights.evict()
    assert (weights.plan.parts, pool.free) == ((1,), 7)
    link.started.clear()
    assert weights.activate(2) is None
    ((_, copies),) = link.started
    assert [copy.src for copy in copies] == [2000, 3000, 4000]
    assert not weights.filled
    assert weights.transfer_landed()
    weights.announce_eviction()
    assert (weights.leaving_pages, weights.leaves_whole) == (6, True)
    weights.evict()
    assert pool.free == 8
    pool.validate()


def test_a_job_that_finds_its_first_layers_need_not_wait_for_the_last() -> None:
    weights, _, _, rotor = in_parts()
    assert weights.activate(1) is None
    assert weights.transfer_landed()
    weights.announce_eviction(weights.plan.without(1))
    weights.evict()
    assert weights.activate(2, 1 << 40) is None
    ((_, copies, coming),) = rotor.brought
    assert [copy.src for copy in copies] == [3000]
    assert (coming.layers, coming.opens) == ({1: 128 * KiB}, 1)
    assert weights.transfer_landed()
    weights.announce_eviction(weights.plan.without(1))
    weights.evict()
    assert weights.activate(3, 1000) is None
    assert rotor.brought[-1][2].opens == 128 * KiB - 1000


def test_an_activation_that_cannot_be_leaves_the_parts_as_they_were() -> None:
    weights, pool, link, _ = in_parts(7)
    assert weights.activate(1) is None
    assert weights.transfer_landed()
    weights.announce_eviction(weights.plan.without(3))
    weights.evict()
    assert (weights.present_pages, pool.free) == (2, 5)
    taken = pool.allocate("other", 2)
    assert not isinstance(taken, Short)
    assert weights.activate(2) == Short(1)
    pool.give_back("other", taken)
    link.broken = True
    with pytest.raises(DeviceError, match="closed"):
        weights.activate(3)
    assert (weights.present_pages, pool.free) == (2, 5)
    weights.validate()
    pool.validate()
    link.broken = False
    assert weights.activate(4) is None
    assert [copy.src for copy in link.started[-1][1]] == [2000, 3000]
    assert weights.transfer_landed()
    weights.close()
    pool.validate()
    assert pool.free == 7


def test_rotating_layers_go_with_the_first_part() -> None:
    weights, pool, _, _ = in_parts()
    assert weights.activate(1) is None
    assert weights.transfer_landed()
    assert weights.remap(Rotation((0, 1), 1)) is None
    assert weights.plan.parts == (2, 1, 1)
    weights.announce_eviction(weights.plan.without(1))
    weights.evict()
    assert (weights.present_pages, pool.free, weights.slots.pages) == (2, 6, 0)
    weights.validate()
    pool.validate()
