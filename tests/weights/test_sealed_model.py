"""A model is its content: what is loaded again is what was served, whatever became of its files."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ballast.cluster.segment_broker import SegmentBroker
from ballast.core.errors import CheckpointError
from ballast.core.settings import AdapterSettings, ModelSettings
from ballast.weights import checkpoint
from ballast.weights.checkpoint import load_host_model
from ballast.weights.host import HostBytes, HostModel, HostTier
from ballast.weights.sharding import Shard
from benchmarks.adapters import random_adapter
from tests.cluster.test_segment_broker import tier
from tests.models.tiny import llama
from tests.weights.test_host import allocated, only_its_own  # noqa: F401 - a fixture

Damage = Callable[[Path], object]


def retrained(path: Path) -> None:
    """Other weights under the same names, as a download writes them."""
    file = path / "model.safetensors"
    other = file.with_name("other")
    save_file({n: t + 1 for n, t in load_file(file).items()}, other, {"format": "pt"})
    os.replace(other, file)


def overwritten(path: Path) -> None:
    """The same in place, with the times as they were."""
    file = path / "model.safetensors"
    before = file.stat()
    other = file.with_name("other")
    save_file({n: t + 1 for n, t in load_file(file).items()}, other, {"format": "pt"})
    with open(file, "r+b") as open_file:
        open_file.write(other.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def reshaped(path: Path) -> None:
    shutil.rmtree(path)
    llama(path, hidden_size=32, num_attention_heads=2)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "retrained": (retrained, "have changed"),
    "overwritten": (overwritten, "have changed"),
    "reshaped": (reshaped, "have changed"),
    "cut": (lambda path: os.truncate(path / "model.safetensors", 1000), "have changed"),
    "gone": (shutil.rmtree, "have gone"),
    "config": (lambda path: (path / "config.json").write_text("{"), "have changed"),
}


def contents_of(memory: HostBytes) -> list[bytes]:
    return [os.pread(fd, os.fstat(fd).st_size, 0) for fd in memory.files()]


def contents(host: HostModel) -> list[bytes]:
    return [content for part in (host, *host.adapters) for content in contents_of(part.memory)]


def in_turn(*steps: Callable[[HostTier], object]) -> None:
    """Run each step in a worker of its own, which then dies."""

    async def scenario() -> None:
        broker = SegmentBroker()
        for step in steps:
            with tier(broker) as (one, _):
                await asyncio.to_thread(step, one)
        broker.forget("m")
        assert len(broker) == 0

    asyncio.run(scenario())
    assert allocated() == 0


def asked(path: Path, *adapters: Path, **more: Any) -> ModelSettings:
    named = tuple(AdapterSettings(name=a.name, path=str(a)) for a in adapters)
    return ModelSettings(name="m", path=str(path), adapters=named, **more)


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_next_worker_has_what_the_dead_one_served(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, lora = tmp_path / "m", tmp_path / "lora"
    random_adapter(llama(path), lora, seed=1)
    before: list[object] = []
    change, words = DAMAGES[damage]

    def serve(one: HostTier) -> None:
        host = load_host_model(asked(path, lora), one)
        assert not host.failed
        before.extend((host.spec, contents(host)))
        change(path)
        if damage == "gone":
            shutil.rmtree(lora)
        host.close()  # as a process that ends; its place is taken by another one

    def serve_again(one: HostTier) -> None:
        with caplog.at_level(logging.ERROR):
            host = load_host_model(asked(path, lora), one)
        assert [host.spec, contents(host)] == before
        assert words in caplog.text
        host.close()

    in_turn(serve, serve_again, serve_again)


def test_nothing_is_read_and_nothing_logged_where_no_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llama(tmp_path)
    fingerprints = []

    def serve(one: HostTier) -> None:
        host = load_host_model(asked(tmp_path), one)
        fingerprints.append(host.spec.fingerprint)
        host.close()
        monkeypatch.setattr(checkpoint, "_fill", None)
        monkeypatch.setattr(checkpoint, "read_manifest", None)

    in_turn(serve, serve, serve)
    assert len(set(fingerprints)) == 1
    assert not caplog.text


def test_a_model_that_is_removed_and_added_is_read_anew(tmp_path: Path) -> None:
    llama(tmp_path)

    def serve(one: HostTier) -> None:
        host = load_host_model(asked(tmp_path), one)
        retrained(tmp_path)
        one.forget("m")
        host.close()
        other = load_host_model(asked(tmp_path), one)
        assert other.spec.fingerprint != host.spec.fingerprint
        other.close()

    in_turn(serve)


def test_another_device_that_lays_it_out_otherwise_refuses_changed_files(tmp_path: Path) -> None:
    llama(tmp_path)

    async def scenario() -> None:
        broker = SegmentBroker()
        with tier(broker) as (first, _), tier(broker) as (second, _):
            one = await asyncio.to_thread(load_host_model, asked(tmp_path), first)
            plain = asked(tmp_path, linear="plain")
            two = await asyncio.to_thread(load_host_model, plain, second)
            two.close()
            overwritten(tmp_path)
            same = await asyncio.to_thread(load_host_model, asked(tmp_path), second)
            assert same.spec == one.spec
            other = asked(tmp_path, dtype="bfloat16")
            with pytest.raises(CheckpointError, match="its files have changed since 'm'"):
                await asyncio.to_thread(load_host_model, other, second)
            for tier_of in (first, second):
                tier_of.forget("m")
            new = await asyncio.to_thread(load_host_model, other, second)
            for host in (one, same, new):
                host.close()
        broker.forget("m")

    asyncio.run(scenario())
    assert allocated() == 0


def test_files_that_change_while_they_are_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(tmp_path)
    fill = checkpoint._fill

    def changing(*how: Any) -> Any:
        found = fill(*how)
        time.sleep(0.01)
        os.utime(tmp_path / "model.safetensors")
        return found

    monkeypatch.setattr(checkpoint, "_fill", changing)
    with pytest.raises(CheckpointError, match="changed while they were read"):
        load_host_model(asked(tmp_path))
    assert allocated() == 0


def test_all_of_a_model_is_as_it_was(tmp_path: Path) -> None:
    """Every field of a model that is found again is that of the first."""
    llama(tmp_path, tie_word_embeddings=False)
    hosts: list[Any] = []

    def serve(one: HostTier) -> None:
        host = load_host_model(asked(tmp_path), one)
        config = host.config.to_dict()
        hosts.append((config, host.segments, host.windows, host.fused, host.recipe, host.tokenizer))
        host.close()

    in_turn(serve, serve)
    assert hosts[0] == hosts[1]


def test_a_group_of_ranks_reads_its_files_again_and_refuses_changed_ones(tmp_path: Path) -> None:
    """Ranks beside the first have no broker: what they would read may be of other weights."""
    llama(tmp_path)
    first = Shard(0, 2)
    fingerprints: list[str] = []

    def serve(one: HostTier) -> None:
        host = load_host_model(asked(tmp_path), one, shard=first)
        fingerprints.append(host.spec.fingerprint)
        host.close()

    def refuse(one: HostTier) -> None:
        overwritten(tmp_path)
        with pytest.raises(CheckpointError, match="its files have changed since 'm'"):
            load_host_model(asked(tmp_path), one, shard=first)

    in_turn(serve, serve, refuse)
    assert fingerprints[0] == fingerprints[1]
