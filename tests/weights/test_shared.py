"""Segments of several models: copied once, mapped into each, gone with the last; in any order."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.model import ModelSpec, weight_pages
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.units import KiB
from ballast.memory.copies import Copy
from ballast.memory.pool import Pool
from ballast.memory.vm import Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm
from ballast.weights.residency import WeightsOnDevice
from ballast.weights.shared import find_shared
from ballast.weights.weight_stream import Loads
from tests.effort import tries
from tests.engine.counted import count
from tests.memory.seen_once import system_seen_once

PAGE = 64 * KiB
SIZES = {"e": 2 * PAGE, "x": PAGE + 1, "y": 100, "z": PAGE, "t": 5}
"""Bytes of each distinct segment, by its digest."""
MODELS = {"a": "ext", "b": "eyt", "twin": "ext", "own": "z", "echo": "eey"}
PAGES = {key: -(-n // PAGE) for key, n in SIZES.items()}


def make_spec(name: str, parts: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        n_layers=1,
        n_heads=1,
        kv_heads=1,
        head_dim=4,
        hidden=4,
        intermediate=4,
        vocab=10,
        dtype="float32",
        max_model_len=64,
        block_tokens=16,
        segment_bytes=tuple(SIZES[p] for p in parts),
        fingerprint=name,
        segment_digests=tuple(p * 64 for p in parts),
    )


class SlowLink:
    """A link that carries its oldest transfer when told to."""

    bytes_per_second = 1e9

    def __init__(self, real: bool = False) -> None:
        self.waiting: list[tuple[int, tuple[Copy, ...]]] = []
        self.real = real
        self.broken = False

    def start(self, transfer_id: int, copies: Sequence[Copy]) -> None:
        if self.broken:
            raise DeviceError("link", "it is closed")
        self.waiting.append((transfer_id, tuple(copies)))

    def carry(self, fail: bool = False) -> tuple[int, tuple[Copy, ...]]:
        transfer, copies = self.waiting.pop(0)
        # One that fails stops half way.
        for copy in copies[: len(copies) // 2] if fail else copies:
            if self.real:
                ctypes.memmove(copy.dst, copy.src, copy.n_bytes)
        return transfer, copies

    def close(self) -> None:
        self.broken = True


class Device:
    """Models that share segments, on one pool."""

    def __init__(self, n_pages: int, names: Sequence[str] = tuple(MODELS), real: bool = False):
        self.vm: Vm = MemfdVm(PAGE, n_pages) if real else NullVm(PAGE, n_pages)
        self.pool = Pool(self.vm, n_pages)
        self.link = SlowLink(real)
        rng = np.random.default_rng(0)
        self.host = {key: rng.integers(0, 256, n, np.uint8) for key, n in SIZES.items()}
        specs = [make_spec(name, MODELS[name]) for name in names]
        self.shared = find_shared(specs, self.pool, PAGE)
        self.models = {
            s.name: WeightsOnDevice(
                s,
                self.pool,
                self.vm,
                self.link,
                [self.host[p].ctypes.data for p in MODELS[s.name]],
                self.shared,
            )
            for s in specs
        }
        self.transfers = 0

    def activate(self, name: str) -> Short | None:
        self.transfers += 1
        return self.models[name].activate(self.transfers)

    def validate(self) -> None:
        self.pool.validate()
        with system_seen_once():
            backed = {name: m.range.os_backed() for name, m in self.models.items()}
        for name, m in self.models.items():
            m.validate()
            result = self.pool.ledger.owned(m.owner) + self.pool.ledger.holders.held(m.owner)
            assert backed[name] == result

    def check_bytes(self, name: str) -> None:
        m = self.models[name]
        for segment, part in zip(m.segments, MODELS[name], strict=True):
            found = ctypes.string_at(segment.address, segment.n_bytes)
            assert found == self.host[part].tobytes()


def test_only_what_occurs_twice_is_shared() -> None:
    device = Device(20)
    assert {d[0] for d in device.shared} == {"e", "x", "y", "t"}
    assert device.models["own"].shared == ()
    echo = device.models["echo"]
    assert (echo.pages, echo.own_pages, echo.range.range.n_pages) == (3, 0, 5)
    assert echo.pages == echo.spec.weight_pages(PAGE)
    assert weight_pages([m.spec for m in device.models.values()], PAGE) == sum(PAGES.values())
    alone = Device(20, ["a", "own"])
    assert alone.shared == {}


def test_digests_of_unlike_sizes_are_a_broken_promise() -> None:
    device = Device(20)
    odd = make_spec("odd", "z")
    other = ModelSpec(
        **{f: getattr(odd, f) for f in odd.__slots__ if f != "segment_bytes"}, segment_bytes=(1,)
    )
    with pytest.raises(BrokenPromise, match="unlike sizes"):
        find_shared([odd, other], device.pool, PAGE)


def test_the_second_name_of_a_model_costs_no_page_and_no_copy() -> None:
    device = Device(6, ["a", "twin"])
    assert device.activate("a") is None
    device.link.carry()
    assert device.models["a"].transfer_landed()
    owners = {"shared:eeeeeeeeeeee": 2, "shared:xxxxxxxxxxxx": 2, "shared:tttttttttttt": 1}
    assert device.pool.ledger.owners() == owners
    twin = device.models["twin"]
    assert device.activate("twin") is None
    assert (twin.filled, device.link.waiting, device.pool.ledger.owners()) == (True, [], owners)
    assert device.pool.ledger.holders.held("weights:twin") == 5
    device.validate()
    device.models["a"].evict()
    assert device.pool.ledger.owners() == owners
    assert twin.filled
    twin.evict()
    assert device.pool.free == 6
    device.validate()


def test_what_another_model_is_copying_is_waited_for() -> None:
    device = Device(20, real=True)
    a, b, twin = (device.models[n] for n in ("a", "b", "twin"))
    assert device.activate("a") is None
    assert device.activate("b") is None
    assert device.activate("twin") is None
    (_, first), (_, second), (_, third) = device.link.waiting
    assert [c.n_bytes for c in first] == [SIZES[p] for p in "ext"]
    assert [c.n_bytes for c in second] == [SIZES["y"]]
    assert third == ()
    assert not any(model.filled for model in (a, b, twin))
    for model in (a, b, twin):
        device.link.carry()
        assert model.transfer_landed()
    for name in ("a", "b", "twin"):
        device.check_bytes(name)
    device.validate()
    device.vm.close()


def test_where_the_copy_of_another_fails_it_is_made_again() -> None:
    device = Device(20, real=True)
    b, twin = device.models["b"], device.models["twin"]
    for name in ("a", "b", "twin"):
        assert device.activate(name) is None
    device.link.carry(fail=True)
    device.models["a"].evict()
    device.validate()
    device.link.carry()
    assert not b.transfer_landed()
    b.fill(11)
    device.link.carry()
    assert not twin.transfer_landed()
    twin.fill(12)
    result = [[c.n_bytes for c in copies] for _, copies in device.link.waiting]
    assert result == [[SIZES["e"], SIZES["t"]], [SIZES["x"]]]
    for model in (b, twin):
        device.link.carry()
        assert model.transfer_landed()
    device.check_bytes("b")
    device.check_bytes("twin")
    device.vm.close()


def test_a_short_pool_changes_nothing() -> None:
    device = Device(6, ["a", "b", "twin"])
    taken = device.pool.allocate("other", 2)
    assert isinstance(taken, tuple)
    assert device.activate("a") == Short(1)
    assert (device.pool.ledger.owners(), device.link.waiting) == ({"other": 2}, [])
    device.validate()
    device.pool.give_back("other", taken[:1])
    assert device.activate("a") is None
    assert device.activate("b") == Short(1)
    assert device.activate("twin") is None
    device.validate()


def test_a_link_or_a_map_that_fails_costs_nothing() -> None:
    device = Device(20)
    device.activate("a")
    before = device.pool.ledger.owners()
    device.link.broken = True
    with pytest.raises(DeviceError):
        device.activate("b")
    assert device.pool.ledger.owners() == before
    device.validate()
    device.link.broken = False
    real = device.vm.map

    def refusing(*args: object, **how: object) -> None:
        if how.get("alias"):
            raise DeviceError("mmap", "too many mappings")
        real(*args, **how)  # type: ignore[arg-type]

    device.vm.map = refusing  # type: ignore[method-assign]
    with pytest.raises(DeviceError):
        device.activate("echo")
    device.vm.map = real  # type: ignore[method-assign]
    assert device.pool.ledger.owners() == before
    device.validate()
    assert device.activate("echo") is None
    device.models["a"].close()
    device.models["echo"].close()
    assert device.pool.free == 20


def test_pages_promised_to_a_model_bring_what_it_shares() -> None:
    device = Device(5, ["a", "twin"])
    assert device.pool.promise("weights:a", 5) is None
    assert device.activate("twin") == Short(5)
    assert device.activate("a") is None
    assert device.pool.ledger.reservations.promised == 0
    device.validate()


names = st.sampled_from(tuple(MODELS))


class Sharing(RuleBasedStateMachine):
    """Models come and go on a pool that is too small for all; copies end late, some in failure."""

    real: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.device = Device(6, real=self.real)
        self.flying: list[str] = []
        """Models whose transfers wait on the link, in its order."""
        self.ready: set[str] = set()

    def teardown(self) -> None:
        self.device.vm.close()

    def _there(self) -> set[str]:
        return self.ready | set(self.flying)

    def _wanted(self, present: set[str]) -> int:
        parts = {p for name in present for p in MODELS[name]}
        return sum(PAGES[p] for p in parts)

    @rule(name=names)
    def activate(self, name: str) -> None:
        if name in self._there():
            return
        more = self._wanted(self._there() | {name}) - self._wanted(self._there())
        short = max(0, more - self.device.pool.free)
        known = len(self.device.link.waiting)
        assert self.device.activate(name) == (Short(short) if short else None)
        if short:
            return
        if len(self.device.link.waiting) > known:
            self.flying.append(name)
        else:
            self.ready.add(name)

    @precondition(lambda self: self.flying)
    @rule(fails=st.sampled_from((False, False, False, True)))
    def a_transfer_ends(self, fails: bool) -> None:
        name = self.flying.pop(0)
        m = self.device.models[name]
        self.device.link.carry(fails)
        if fails:
            m.evict()
        elif m.transfer_landed():
            self.ready.add(name)
        else:
            self.device.transfers += 1
            m.fill(self.device.transfers)
            self.flying.append(name)

    @precondition(lambda self: self.ready)
    @rule(which=st.integers(0, 99))
    def evict(self, which: int) -> None:
        name = sorted(self.ready)[which % len(self.ready)]
        self.ready.remove(name)
        self.device.models[name].evict()

    @invariant()
    def books_and_system_agree(self) -> None:
        self.device.validate()
        assert self.device.pool.free == 6 - self._wanted(self._there())
        for name, m in self.device.models.items():
            assert m.backed == (name in self._there())
            assert m.filled or name not in self.ready

    @invariant()
    def ready_models_have_their_bytes(self) -> None:
        if self.real:
            for name in self.ready:
                self.device.check_bytes(name)


class RealSharing(Sharing):
    real = True


TestNull = Sharing.TestCase
TestNull.settings = settings(max_examples=tries(12, all=30), stateful_step_count=30)
TestReal = RealSharing.TestCase
TestReal.settings = settings(max_examples=tries(4, all=8), stateful_step_count=30)


class Quiet:
    """A `WeightStream` that has nothing to bring."""

    def __init__(self) -> None:
        self.loads = Loads()
        self.held: Sequence[int] = ()

    def add_weights(self, copies: Sequence[Copy]) -> None: ...

    def settle(self) -> None: ...

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        self.held = rotation.layers[: rotation.slots]

    def forget(self) -> None: ...


def test_every_change_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    count(monkeypatch, calls)
    spec = replace(make_spec("m", "exxzz"), n_layers=4, segment_digests=("e", "v", "w", "z", "t"))
    pool = Pool(NullVm(PAGE, 40), 40)
    m, other = (
        WeightsOnDevice(s, pool, pool.vm, SlowLink(), [0] * 5, stream=Quiet())
        for s in (spec, replace(spec, name="other"))
    )
    shared = find_shared([spec, other.spec], pool, PAGE)
    assert m.activate(1) is None
    assert m.remap(Rotation((0, 1), 1)) is None
    assert m.remap(WHOLE) is None
    for weights in (m, other):
        weights.share({"e": shared["e"]})
    assert other.segments[0].shared is m.segments[0].shared is not None
    seen = other.version.n
    m.announce_eviction()
    assert m.shared[0].staying == ()
    assert other.version.n > seen, "it sees who holds what they share"
    m.evict()
    assert {name: calls[f"WeightsOnDevice.{name}"] for name in ("activate", "remap", "share")} == {
        "activate": 1,
        "remap": 2,
        "share": 2,
    }
    for weights in (m, other):
        weights.validate()
        weights.close()
    pool.validate()
    assert pool.free == pool.total


def test_a_model_that_read_a_segment_in_place_is_no_leaving_holder_of_it_later() -> None:
    device = Device(40)
    a, b = (device.models[name] for name in list(device.models)[:2])
    assert a.activate(101, in_place=range(len(a.segments))) is None
    assert a.filled
    assert a.present_pages == device.pool.ledger.owned(a.owner) == 0
    device.validate()
    a.announce_eviction()
    a.evict()
    for w, transfer in ((a, 102), (b, 103)):
        assert w.activate(transfer) is None
        device.link.carry()
        w.transfer_landed()
    both = [s for s in a.shared if s in b.shared]
    assert both
    assert all(set(s.staying) == {a.spec.name, b.spec.name} for s in both)
    a.announce_eviction()
    assert all(s.staying == (b.spec.name,) for s in both)
    device.validate()
