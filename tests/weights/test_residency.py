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
from ballast.weights.residency import WeightsOnDevice
from ballast.weights.rotor import ArrivalPlan, Loads

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
    """A rotor that writes down which loads it was to start, and starts those if told so."""

    def __init__(self, follows: bool = True) -> None:
        self.follows = follows
        self.loads, self.held = Loads(), ()
        self.brought: list[tuple[int, list[Copy], ArrivalPlan]] = []

    def start_load(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        if self.follows:
            self.brought.append((transfer_id, list(copies), coming))
        return self.follows

    def settle(self) -> None: ...

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None: ...

    def forget(self) -> None: ...


def followed(rotor: Following) -> tuple[WeightsOnDevice, Notebook]:
    vm, link = NullVm(64 * KiB, 8), Notebook()
    hosts = [1000, 2000, 3000, 4000]
    pool = Pool(vm, 8)
    return WeightsOnDevice(
        make_spec(), pool, vm, link, hosts, make_rotor=lambda spec, copies: rotor
    ), link


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
            ctypes.memset(other.base, 0x55, 6 * 64 * KiB)
            other.release(0, 6)
        result = [(d.transfer_id, d.error, d.n_bytes) for d in done]
        assert result == [(i, None, sum(SEGMENTS)) for i in range(2)]
        pool.validate()
    finally:
        link.close()
        other.close()
        weights.close()
        vm.close()
