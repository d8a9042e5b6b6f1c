"""KV outlives its model's eviction and its device in host memory, and no token changes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.actions import EvictCommand, ScrubKv
from ballast.core.cost import UNMEASURED
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.request import Sampling, Submission
from ballast.core.settings import FleetSettings
from ballast.core.units import MiB
from ballast.kv.directory import Tier
from ballast.kv.tiered_store import TieredStore
from ballast.live.own_store import OwnConnection, own_connection
from tests.engine.checkpoints import VOCAB, make_llama
from tests.kv.test_directory import memory_only
from tests.live.test_command_executor import ordered
from tests.live.test_live_device import fleet

FIRST = tuple((7 * k * k + 3) % VOCAB for k in range(150))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> FleetSettings:
    root = tmp_path_factory.mktemp("models")
    paths = {n: make_llama(root / n, i, num_hidden_layers=2) for i, n in enumerate("ab")}
    return fleet(paths)


def turn(id: str, prompt: tuple[int, ...], tenant: str = "") -> Submission:
    sampling = Sampling(temperature=0.8, seed=5, logprobs=0)
    salt = f"key:{tenant}" if tenant else ""
    return Submission(
        id=id,
        model="a",
        prompt=prompt,
        max_tokens=24,
        sampling=sampling,
        ignore_eos=True,
        salt=salt,
        tenant=tenant,
    )


def until(condition: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def with_store(settings: FleetSettings, store: TieredStore | None) -> InProcess:
    """A device with costs by which every fetch pays."""
    kv = KvTierSettings(host_bytes=0 if store is None else 1)
    connection = None if store is None else OwnConnection(store)
    costs = dict.fromkeys("ab", UNMEASURED)
    return InProcess(replace(settings, kv=kv), costs=costs, kv_store=connection)


def second(first: Answer) -> tuple[int, ...]:
    return (*FIRST, *first.tokens, 5, 6, 7)


def check(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_kv_survives_eviction_and_its_device(settings: FleetSettings) -> None:
    with with_store(settings, None) as server:
        first = server.generate([turn("1", FIRST)])["1"]
        expected = server.generate([turn("2", second(first))])["2"]
    store = memory_only(8 * MiB)
    with with_store(settings, store) as server:
        size = server.device.specs["a"].block_tokens
        check(server.generate([turn("1", FIRST)])["1"], first)
        full = (len(FIRST) + 23) // size
        until(lambda: store.counts.stored == full)
        assert ordered(server, EvictCommand("a")).code is None
        again = server.generate([turn("2", second(first))])["2"]
        check(again, expected)
        assert again.finished.cached_tokens == full * size
        assert again.finished.fetched == (("host", full * size),)
        assert server.device.state.tiers.fetched_tokens.total() == full * size
        server.drain()
        server.device.state.validate()
    with with_store(settings, store) as server:  # another device
        again = server.generate([turn("3", second(first))])["3"]
        check(again, expected)
        assert again.finished.cached_tokens >= full * size
    store.validate()


def test_damaged_and_deleted_tiers_cost_time_alone(
    settings: FleetSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kv = KvTierSettings(host_bytes=8 * MiB, disk_path=str(tmp_path / "kv"), disk_bytes=8 * MiB)
    connection = own_connection(kv)
    store = connection._store
    costs = dict.fromkeys("ab", UNMEASURED)
    shelves = store.directory.shelves
    with InProcess(replace(settings, kv=kv), costs=costs, kv_store=connection) as server:
        first = server.generate([turn("1", FIRST)])["1"]
        size = server.device.specs["a"].block_tokens
        full = (len(FIRST) + 23) // size
        expected = server.generate([turn("2", second(first))])["2"]

        def again(id: str) -> int:
            """Answer it again after an eviction; return the tokens that were found."""
            assert ordered(server, EvictCommand("a")).code is None
            found = server.generate([turn(id, second(first))])[id]
            check(found, expected)
            return found.finished.cached_tokens

        until(lambda: len(shelves[Tier.DISK]) > full)
        store.cells.write(list(store._held.values())[3].runs, b"torn")
        assert again("3") == 3 * size
        assert store.counts.corrupt == 1
        with connection._lock:
            store.resize(0)
            store.resize(8 * MiB)
        assert again("4") >= full * size
        assert server.device.state.tiers.fetched_tokens[Tier.DISK] >= full * size
        shutil.rmtree(tmp_path / "kv")
        server.generate([turn("5", FIRST[::-1])])
        until(lambda: bool(store.disk_fault))
        with connection._lock:
            store.resize(0)
        assert again("6") == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2, caplog.text
    store.validate()


@pytest.mark.parametrize("whole", [True, False])
def test_what_the_tiers_have_lost_is_stored_again_when_it_is_used(
    settings: FleetSettings, whole: bool
) -> None:
    """`whole`: the device has all of the prompt's prefix; else its end is computed."""
    store = memory_only(8 * MiB)
    with with_store(settings, store) as server:
        first = server.generate([turn("1", FIRST)])["1"]
        size = server.device.specs["a"].block_tokens
        full = (len(FIRST) + 23) // size
        until(lambda: store.counts.stored == full)
        connection = server.device.state.tiers.copies._connection  # type: ignore[union-attr]
        with connection._lock:
            store.resize(0)
            assert not store._held
            store.resize(8 * MiB)
        again = server.generate([turn("2", FIRST if whole else second(first))])["2"]
        here = (len(FIRST) - 1) // size if whole else full
        assert again.finished.cached_tokens == here * size
        until(lambda: store.counts.stored >= full + here)
        assert ordered(server, EvictCommand("a")).code is None
        found = server.generate([turn("3", second(first))])["3"]
        assert found.finished.fetched[0][1] >= here * size
        if not whole:
            check(found, again)
        server.drain()
        server.device.state.validate()
    store.validate()


def test_keys_do_not_share(settings: FleetSettings) -> None:
    store = memory_only(8 * MiB)
    with with_store(settings, store) as server:
        first = server.generate([turn("1", FIRST, "one")])["1"]
        size = server.device.specs["a"].block_tokens
        full = (len(FIRST) + 23) // size
        until(lambda: store.counts.stored == full)
        assert ordered(server, EvictCommand("a")).code is None
        other = server.generate([turn("2", second(first), "two")])["2"]
        assert other.finished.cached_tokens == 0
        found = server.generate([turn("one", second(first), "one")])["one"]
        assert found.finished.cached_tokens == full * size
        assert ordered(server, ScrubKv(tenant="one")).code is None
        assert store.scrub(tenant="one") >= full
        again = server.generate([turn("3", second(first), "one")])["3"]
        assert again.finished.cached_tokens == 0
        check(again, other)
    store.validate()
