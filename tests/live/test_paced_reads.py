"""Passes that read weights in place wait for a paced link, for what they read and no more."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.errors import DeviceError
from ballast.core.link import LinkRates, LinkSettings
from ballast.core.settings import FleetSettings
from ballast.core.units import MiB
from ballast.live.inbox import MonotonicClock
from ballast.live.paced_reads import PacedReads
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.models.executor import ModelExecutor
from ballast.models.fused.model import FusedModel
from ballast.models.transformers import TransformersModel
from benchmarks.families import config, make
from tests.engine.checkpoints import VOCAB, make_llama
from tests.live.test_live_device import asked, fleet

RATE = 4.0 * MiB
COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")
"""Keys of configurations that say how many experts a layer has."""


@contextmanager
def reads_of(server: InProcess) -> Iterator[list[int]]:
    """Bytes that passes have the link carry without a copy, in order."""
    found: list[int] = []
    link: Any = server.device.machine.link
    start = link.start

    def noted(number: int, copies: Any, *rest: Any, in_place: bool = False, **more: Any) -> None:
        assert in_place, "nothing is copied"
        found.append(sum(c.n_bytes for c in copies))
        start(number, copies, *rest, in_place=in_place, **more)

    link.start = noted
    yield found
    link.start = start


def on_a_link(paths: dict[str, Path]) -> FleetSettings:
    link = LinkSettings(bytes_per_second=RATE)
    return replace(fleet(paths, preset="c2cserve"), link=link, options={"promote": 0})


def test_a_pass_reads_every_layer_once_at_the_links_pace(tmp_path: Path) -> None:
    paths = {"a": make_llama(tmp_path / "a", 0, num_hidden_layers=3)}
    (request,) = asked(1, models=("a",))
    request = replace(request, max_tokens=3)
    with InProcess(fleet(paths)) as server:
        alone = server.generate([request])
    with InProcess(on_a_link(paths)) as server, reads_of(server) as reads:
        began = time.monotonic()
        answers = server.generate([request])
        seconds = time.monotonic() - began
        sizes = server.device.state.models["a"].spec.segment_bytes
    assert reads == [sizes[1], sizes[2], sizes[3] + sum(sizes[4:])] * 3
    assert seconds > sum(reads) / RATE - 0.05
    assert answers[request.id].tokens == alone[request.id].tokens


def test_over_a_link_too_slow_for_its_pace_a_model_comes_whole_if_there_is_room(
    tmp_path: Path,
) -> None:
    """And an idle one makes way; its KV stays."""
    paths = {n: make_llama(tmp_path / n, i, num_hidden_layers=6) for i, n in enumerate("ab")}
    requests = [replace(r, max_tokens=6) for r in asked(1, models=("a", "b"))]
    with InProcess(fleet(paths)) as server:
        alone = server.generate(requests)
        m = server.device.state.models["a"]
        weights, kv = m.weights.pages, m.kv.layout.slab_pages
    # A tenth of the pages stays free.
    settings = fleet(paths, pages=round(1.2 * weights) + 4 * kv, preset="c2cserve")
    rate = LinkSettings(bytes_per_second=2.0 * MiB)
    with InProcess(replace(settings, link=rate)) as server:
        models = server.device.state.models
        for i in range(2):
            for request in requests:
                answer = server.generate([replace(request, id=f"{request.id}/{i}")])
                assert answer[f"{request.id}/{i}"].tokens == alone[request.id].tokens
                here = models[request.model].weights.plan
                assert (here.in_place, here.absent) == ({0}, set()), "embeddings stay"
        assert models["a"].weights.plan.absent
        server.drain()
        server.device.state.validate()


@pytest.mark.parametrize(
    ("family", "executor"),
    [
        ("mixtral", FusedModel),
        ("qwen2_moe", TransformersModel),
        ("gpt_oss", TransformersModel),
        ("glm4_moe", TransformersModel),
    ],
)
def test_experts_that_no_token_chose_are_not_read(
    tmp_path: Path, family: str, executor: type[ModelExecutor]
) -> None:
    """Of the generic path too, whose modules may have dense layers and shared experts besides."""
    paths = {"a": tmp_path / "a"}
    made = config(family, vocab_size=VOCAB)
    make(paths["a"], made)
    (request,) = asked(1, models=("a",))
    request = replace(request, max_tokens=2)
    with InProcess(fleet(paths)) as server:
        alone = server.generate([request])
    with InProcess(on_a_link(paths)) as server, reads_of(server) as reads:
        answers = server.generate([request])
        m = server.device.state.models["a"]
        (run,) = server.device.executors["a"]
        assert type(run) is executor
        sizes, n = m.spec.segment_bytes, m.spec.n_layers
        experts = [run.expert_bytes(i) for i in range(n)]
    assert any(experts)
    assert all(all_ < whole for all_, whole in zip(experts, sizes[1:], strict=False))
    least = sum(sizes[1:]) - sum(experts)
    # The last pass has one row, which reads its layers, and the experts that it chose.
    count = next(getattr(made, k) for k in COUNTS if hasattr(made, k))
    chosen = m.spec.experts_per_token
    assert 0 < chosen < count
    decode = reads[-n - sum(n_bytes > 0 for n_bytes in experts) :]
    assert sum(decode) == least + sum(experts) // count * chosen
    assert sum(reads) <= 2 * least + sum(experts) + sum(experts) // count * chosen
    assert answers[request.id].tokens == alone[request.id].tokens


def test_a_link_that_fails_fails_the_request_alone(tmp_path: Path) -> None:
    paths = {"a": make_llama(tmp_path / "a", 0, num_hidden_layers=3)}
    (request,) = asked(1, models=("a",))
    with InProcess(on_a_link(paths)) as server:
        link = server.device.machine.link
        start, broken = link.start, [True]

        def failing(*arguments: Any, **more: Any) -> None:
            if broken:
                broken.pop()
                raise DeviceError("link", "it broke")
            start(*arguments, **more)

        link.start = failing  # type: ignore[method-assign]
        assert "it broke" in str(server.generate([request])[request.id].end)
        again = server.generate([replace(request, id="again", max_tokens=2)])
        assert len(again["again"].tokens) == 2
        server.drain()
        server.device.state.validate()


class Unpaced:
    """Barriers of a model of which nothing streams."""

    def begin_pass(self, work: object = ()) -> tuple[int, ...]:
        return ()

    def finish(self) -> None:
        """Nothing is in flight."""


class CopiedReads:
    """Three layers, of which a pass reads copies in slots of its own."""

    name, reserved = "copied", 0.0

    def __init__(self, size: int) -> None:
        self.slots = ctypes.create_string_buffer(2 * size)
        self._layers = ctypes.create_string_buffer(b"x" * 3 * size, 3 * size)
        self._size = size

    def begin_pass(self, work: object) -> range:
        return range(3)

    def read_bytes(self, layer: int) -> int:
        return 0

    def copies(self, layer: int) -> tuple[Copy, ...]:
        target = ctypes.addressof(self.slots) + layer % 2 * self._size
        source = ctypes.addressof(self._layers) + layer * self._size
        return (Copy(target, source, self._size),)


def test_a_pass_that_breaks_off_leaves_no_copy_into_its_slots_in_flight() -> None:
    """Nor do the slots go while the link has a copy to make, whoever lets go of them."""
    size, copied, go_on = 4096, list[int](), threading.Event()

    def held(dst: int, src: int, n_bytes: int) -> None:
        assert go_on.wait(240)
        ctypes.memmove(dst, src, n_bytes)
        copied.append(n_bytes)

    clock = MonotonicClock()
    link = HostLink(clock, lambda done: None, LinkRates.even(1e9), copy_bytes=held)
    reads = CopiedReads(size)
    slots = weakref.ref(reads)
    barriers = PacedReads(Unpaced(), link, clock, reads)  # type: ignore[arg-type]
    assert barriers.begin_pass() == [0, 1, 2]
    ended = threading.Thread(target=barriers.finish)  # as after a layer that raised
    ended.start()
    del reads, barriers
    gc.collect()
    assert slots() is not None
    assert ended.is_alive(), "two layers are read ahead, and none has been copied"
    go_on.set()
    ended.join(240)
    assert copied == [size, size]
    link.close()


def test_a_read_that_cannot_be_begun_is_not_waited_for() -> None:
    clock = MonotonicClock()
    link = HostLink(clock, lambda done: None, LinkRates.even(1e9))
    barriers = PacedReads(Unpaced(), link, clock, CopiedReads(4096))  # type: ignore[arg-type]

    def failing(*arguments: Any, **more: Any) -> None:
        raise MemoryError("there is none")

    link.start = failing  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        barriers.begin_pass()
    barriers.finish()
    link.close()
