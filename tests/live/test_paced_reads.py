"""Passes that read weights in place wait for a paced link, for what they read and no more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ballast.bench.inprocess import InProcess
from ballast.core.errors import DeviceError
from ballast.core.link import LinkSettings
from ballast.core.settings import FleetSettings
from ballast.core.units import MiB
from ballast.models.fused.model import FusedModel
from benchmarks.families import config, make
from tests.engine.checkpoints import VOCAB, make_llama
from tests.live.test_live_device import asked, fleet

RATE = 4.0 * MiB


@contextmanager
def reads_of(server: InProcess) -> Iterator[list[int]]:
    """Bytes that passes have the link carry without a copy, in order."""
    found: list[int] = []
    link = server.device.machine.link
    start = link.start

    def noted(number: int, copies: Any, *rest: Any, in_place: bool = False, **more: Any) -> None:
        assert in_place, "nothing is copied"
        found.append(sum(c.n_bytes for c in copies))
        start(number, copies, *rest, in_place=in_place, **more)

    link.start = noted  # type: ignore[method-assign]
    yield found
    link.start = start  # type: ignore[method-assign]


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


def test_experts_that_no_token_chose_are_not_read(tmp_path: Path) -> None:
    paths = {"a": tmp_path / "a"}
    make(paths["a"], config("mixtral", num_local_experts=8, vocab_size=VOCAB))
    (request,) = asked(1, models=("a",))
    request = replace(request, max_tokens=2)
    with InProcess(fleet(paths)) as server:
        alone = server.generate([request])
    with InProcess(on_a_link(paths)) as server, reads_of(server) as reads:
        answers = server.generate([request])
        m = server.device.state.models["a"]
        (executor,) = server.device.executors["a"]
        assert isinstance(executor, FusedModel)
        sizes, n = m.spec.segment_bytes, m.spec.n_layers
        experts = [executor.expert_bytes(i) for i in range(n)]
    assert all(0 < all_ < whole for all_, whole in zip(experts, sizes[1:], strict=False))
    least = sum(sizes[1:]) - sum(experts)
    # The last pass has one row.
    chosen = m.spec.experts_per_token
    assert 0 < chosen < 8
    decode = reads[-2 * n :]
    assert sum(decode) == least + sum(experts) // 8 * chosen
    assert sum(reads) <= 2 * least + sum(experts) + sum(experts) // 8 * chosen
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
