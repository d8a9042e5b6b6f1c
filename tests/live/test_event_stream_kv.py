"""The stream of a GPU over a driver that does work as late as it may."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ballast.core.errors import DeviceError
from ballast.core.job import SequenceWork
from ballast.core.rotation import Rotation
from ballast.kv.blocks import KvCache
from ballast.live.event_stream import EventStream
from ballast.memory.copies import Copy
from ballast.memory.cuda.pinning import PinnedMemory
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.pool import Pool
from tests.kv.test_blocks import make_spec
from tests.memory.fake_cuda import FakeDriver

PAGE = 64 << 10
LAYERS, TOKENS = 8, 4
SECONDS = 1e-3
"""Of a layer, as the device counts."""


class World:
    """A cache, a lane that computes nothing but a byte of every token's key, and what each is."""

    def __init__(self) -> None:
        self.driver = driver = FakeDriver(bandwidth=1e8, n_bytes=1 << 27)
        self.context = driver.retain_context(0)
        driver.set_current(self.context)
        self.vm = CudaVm(driver, 0, PAGE, 200)
        self.lane = driver.new_stream()
        self.vm.watch(self.lane)
        self.pool = Pool(self.vm, 200)
        spec = replace(make_spec(head_dim=256), n_layers=LAYERS, block_tokens=TOKENS)
        self.kv = KvCache(spec, self.pool, self.vm, host_blocks=100)
        self.pins = PinnedMemory(driver, 0)
        self.stream = EventStream(driver, self.context, lambda: self.lane, lambda: None, self.pins)
        self.stream.add_staging(self.kv)
        self.tables: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}
        self.wrong: list[tuple[int, str, int]] = []
        self.stalled = 0.0
        self.early: random.Random | None = None
        """Whether streams do some of their work before anybody waits for it."""

    def value(self, layer: int, name: str, token: int) -> int:
        return 1 + (layer * 31 + ord(name) * 7 + token) % 251

    def begin(self, counts: dict[str, int], stores: int = 0, homes: int = 0) -> list[SequenceWork]:
        """So many tokens more of each sequence, and as many moves as their blocks allow."""
        work = []
        for name, n in counts.items():
            table, start = self.tables.setdefault(name, []), self.done.setdefault(name, 0)
            assert self.kv.grow(table, start + n) is None
            work.append(SequenceWork(name, [1] * n, start, tuple(table), None))
        here = [b for w in work for b in w.blocks[: w.end // TOKENS] if b >= 0][:stores]
        away = [b for w in work for b in w.blocks if b < 0][:homes]
        self.stream.carry_blocks(self.kv.staging.begin_moves(here, away))
        return work

    def run_pass(self, counts: dict[str, int], stores: int = 0, homes: int = 0) -> None:
        """A pass that reads all tokens before its own, and writes its own."""
        work = self.begin(counts, stores, homes)
        layout, places = self.kv.layout, self.stream.places(work)
        row = layout.layer_bytes // 2 // TOKENS
        stops = self.stream.begin_pass(work)
        for layer in range(LAYERS):
            if layer in stops:
                self.stream.wait(layer)
            elsewhere: dict[int, int] = {}
            if places is not None:
                elsewhere = dict(zip(places.blocks, places.offsets[layer].tolist(), strict=True))

            def compute(layer: int = layer, elsewhere: dict[int, int] = elsewhere) -> None:
                self.read_weights(layer)
                for w in work:
                    for token in range(w.end):
                        block = w.blocks[token // TOKENS]
                        whole = block * layout.stride_bytes + layer * layout.layer_bytes
                        at = self.kv.base + elsewhere.get(block, whole) + token % TOKENS * row
                        value = self.value(layer, w.request_id, token)
                        if token >= w.start:
                            ctypes.memset(at, value, 1)
                        elif ctypes.string_at(at, 1)[0] != value:
                            self.wrong.append((layer, w.request_id, token))

            self.driver.put(self.lane, compute, [], seconds=SECONDS)
            if layer in stops:
                self.stream.used(layer)
            if self.early is not None:
                stream = self.early.choice(list(self.driver.streams))
                self.driver.run(stream, self.early.randint(1, 9))
        self.stream.finish()
        self.end_job(done=True)
        for w in work:
            self.done[w.request_id] = w.end

    def read_weights(self, layer: int) -> None:
        """Do nothing: weights do not stream."""

    def end_job(self, *, done: bool) -> None:
        """As the runner: waits for the lane's stream alone."""
        self.driver.finish(self.lane)
        self.rested()
        self.stalled = self.stream.stalled()
        self.kv.staging.end_moves(self.tables.values(), done=done)
        self.kv.validate(self.tables.values())

    def rested(self) -> None:
        idle = [s for s in self.driver.streams if not self.driver.streams[s]]
        assert len(idle) == len(self.driver.streams), "something is on its way between jobs"

    def close(self) -> None:
        assert not self.wrong
        for table in self.tables.values():
            self.kv.free(table)
        self.kv.validate([])
        self.stream.close()
        self.kv.close()
        self.pins.close()
        self.vm.close()
        self.driver.destroy_stream(self.lane)
        self.driver.release_context(0)
        assert self.driver.is_clean()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_every_key_is_there_when_it_is_read(world: World) -> None:
    world.run_pass({"a": 11, "b": 9})
    world.run_pass({"a": 1, "b": 1}, stores=3)
    assert len(world.kv.staged) == 3
    world.run_pass({"a": 1, "c": 30})
    world.run_pass({"a": 1, "b": 1}, stores=1, homes=2)
    world.run_pass({"c": 1})
    world.run_pass({"a": 1, "b": 1}, homes=9)
    assert not world.kv.staged
    world.run_pass({"a": 1, "b": 1, "c": 1})
    assert not world.pins.n_bytes


@pytest.mark.parametrize("seed", range(4))
def test_blocks_go_to_and_fro_between_passes(world: World, seed: int) -> None:
    rng = random.Random(seed)
    world.early = rng if seed % 2 else None
    for _ in range(8):
        counts = {name: rng.randint(1, 9) for name in rng.sample("abcd", 2)}
        world.run_pass(counts, rng.choice((0, 2, 9)), rng.choice((0, 2, 9)))
    assert "copy_to_host" in world.driver.calls


def test_a_pass_that_breaks_off_leaves_nothing_on_its_way(world: World) -> None:
    world.run_pass({"a": 9}, stores=2)
    first, *_ = world.stream.begin_pass(world.begin({"a": 1}, homes=1))
    world.stream.wait(first)
    world.stream.finish()
    world.end_job(done=False)
    world.run_pass({"a": 2})


def test_a_move_that_breaks_off_leaves_nothing_on_its_way(world: World) -> None:
    world.run_pass({"a": 9})
    world.begin({"a": 1}, stores=2)
    world.driver.fail("copy_to_host", after=1)
    with pytest.raises(DeviceError):
        world.stream.move()
    world.end_job(done=False)
    assert not world.kv.staged
    world.run_pass({"a": 2})


def test_what_passes_wait_for_is_what_they_take_beyond_their_work(world: World) -> None:
    world.run_pass({"a": 40}, stores=9)
    began = world.driver.now
    world.run_pass({"a": 1})
    assert world.stalled > 0
    assert world.driver.now - began == pytest.approx(LAYERS * SECONDS + world.stalled)


def test_kv_on_the_host_need_not_be_page_locked(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.driver.fail("pin")
    world.run_pass({"a": 40}, stores=9)
    world.run_pass({"a": 1})
    assert "not page-locked" in caplog.text


class Both(World):
    """The same, and weights of a page a layer that stream in the same passes."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        driver = self.driver
        self.base = driver.reserve(LAYERS * PAGE, PAGE)
        self.handles = [driver.create(0, PAGE) for _ in range(LAYERS)]
        for i, handle in enumerate(self.handles):
            driver.map(self.base + i * PAGE, PAGE, handle)
        driver.set_access(self.base, LAYERS * PAGE, 0)
        slots = rotation.slot_of
        self.at = [self.base + slots.get(i, i) * PAGE for i in range(LAYERS)]
        self.tier = (ctypes.c_char * (LAYERS * PAGE))()
        sources = [ctypes.addressof(self.tier) + i * PAGE for i in range(LAYERS)]
        for i, source in enumerate(sources):
            ctypes.memset(source, i + 1, PAGE)
        self.stream.add_weights([Copy(self.at[i], sources[i], PAGE) for i in range(LAYERS)])
        home = [i for i in range(LAYERS) if i not in slots]
        self.stream.remap(rotation, [-1] * rotation.slots, home)

    def read_weights(self, layer: int) -> None:
        if ctypes.string_at(self.at[layer], 1)[0] != layer + 1:
            self.wrong.append((layer, "weights", 0))

    def rested(self) -> None:
        """Loads of weights may go on into the next pass."""

    def close(self) -> None:
        self.stream.rest()
        self.driver.unmap(self.base, LAYERS * PAGE)
        self.driver.free(self.base, LAYERS * PAGE)
        for handle in self.handles:
            self.driver.release(handle)
        super().close()


@pytest.mark.parametrize("seed", range(3))
def test_weights_and_kv_stream_in_the_same_passes(seed: int) -> None:
    rng = random.Random(seed)
    world = Both(Rotation((0, 1, 3, 5), rng.choice((1, 2))))
    world.run_pass({"a": 11, "b": 9})
    for _ in range(5):
        counts = {name: rng.randint(1, 9) for name in rng.sample("abc", 2)}
        world.run_pass(counts, rng.choice((1, 9)), rng.choice((0, 1)))
    assert world.stream.loads.n > 12
    world.run_pass({"a": 1})
    world.close()
