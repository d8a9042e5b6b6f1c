"""Weights that a server hands to the one that takes its place in the same process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ballast.cluster.handed_weights import HandedWeights
from ballast.cluster.segment_broker import SegmentBroker
from ballast.core.settings import ModelSettings
from ballast.weights.host import HostBytes, HostTier
from ballast.weights.source_files import identity
from ballast.weights.tokenizer_files import digest_of
from tests.cluster.test_segment_broker import tier
from tests.weights.test_host import (  # noqa: F401 - one is a fixture
    allocated,
    contents,
    load,
    only_its_own,
    segments,
)

KIND = "0" * 64


def checkpoint(path: Path) -> ModelSettings:
    path.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (path / name).write_text(name)
    return ModelSettings(name="a", path=str(path))


async def handed_over(settings: ModelSettings, writable: bool = False) -> HandedWeights:
    """What a server leaves that has loaded a model."""
    broker = SegmentBroker(writable=writable)
    with tier(broker) as (worker, _):
        held = await asyncio.to_thread(load, worker, "a", embed=1, one=2)
        found = {"digests": held.digests, "tokenizer": digest_of(Path(settings.path))}
        record = msgspec.msgpack.encode(found)
        kept = asyncio.to_thread(worker.keep, "a", KIND, identity(settings), record)
        assert await kept
        await asyncio.to_thread(held.close)
    return broker.handed()


def as_it_was(path: Path) -> None:
    pass


def other_weights(path: Path) -> None:
    (path / "model.safetensors").write_text("others, of another size")


def other_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text("t0kenizer.json")


def gone(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def taken(worker: HostTier) -> HostBytes | None:
    """What a worker finds of the model."""
    record = worker.recall("a", KIND)
    assert worker.knows("a") == (record is not None)
    if record is None:
        return None
    digests = msgspec.msgpack.decode(record)["digests"]
    return HostBytes.again(segments("embed", "one"), digests, worker)


@pytest.mark.parametrize(
    ("change", "name", "kept"),
    [
        (as_it_was, "a", True),
        (as_it_was, "b", False),
        (other_weights, "a", False),
        (other_tokenizer, "a", False),
        (gone, "a", False),
    ],
)
def test_a_server_takes_over_what_it_would_read_and_nothing_else(
    tmp_path: Path, change: Callable[[Path], None], name: str, kept: bool
) -> None:
    async def scenario() -> None:
        settings = checkpoint(tmp_path / "a")
        handed = await handed_over(settings)
        change(tmp_path / "a")
        broker = SegmentBroker()
        now = ModelSettings(name=name, path=settings.path)
        drop = broker.adopt(handed, [now])
        assert len(broker) == 3 * kept
        with tier(broker) as (worker, _):
            held = await asyncio.to_thread(taken, worker)
            assert (held is not None) == kept
            drop()
            assert len(broker) == 3 * kept, "a worker has taken it"
            if held is not None:
                assert contents(held) == [1, 2]
                await asyncio.to_thread(held.close)
            await asyncio.to_thread(worker.forget, "a")

    asyncio.run(scenario())
    assert allocated() == 0


def test_what_no_worker_takes_is_freed_once_the_fleet_is_loaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = checkpoint(tmp_path / "a")
        broker = SegmentBroker()
        drop = broker.adopt(await handed_over(settings), [settings])
        assert len(broker) == 3
        drop()
        assert len(broker) == 0

    asyncio.run(scenario())


def test_memory_that_others_can_change_is_not_handed_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = checkpoint(tmp_path / "a")
        assert not list((await handed_over(settings, writable=True)).descriptors)
        handed = await handed_over(settings)
        loose = os.memfd_create("loose")
        handed.segments["f" * 64] = loose
        with pytest.raises(ValueError, match="not sealed"):
            SegmentBroker().adopt(handed, [settings])
        handed.close()

    asyncio.run(scenario())
