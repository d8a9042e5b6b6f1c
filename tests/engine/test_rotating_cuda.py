"""Layers rotate on a GPU's memory while graphs are replayed: over stand-ins, no token changes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.units import MiB
from ballast.live.event_stream import EventStream
from tests.engine.gpus import AtOnce, OnHost, serving
from tests.engine.test_rotating import calm, disturb, paths, with_path  # noqa: F401
from tests.engine.test_rotation_orders import TURNED, at_tokens
from tests.live.test_cuda_machine import tight
from tests.live.test_live_device import NAMES, asked, fleet
from tests.models.fake_graphs import Recorders, StaticAttention

GRAPHS = 256 * MiB
BANDWIDTH = 1e13
"""Bytes a second, on the stand-in's clock: stalls are there, and nothing beside real seconds."""


@pytest.mark.slow
def test_rotating_layers_change_no_token_on_a_gpu(paths: dict[str, Path]) -> None:  # noqa: F811
    requests = asked(2)
    with InProcess(with_path(fleet(paths), "generic", "plain")) as server:
        alone = server.generate(requests)
    driver = AtOnce(n_bytes=1 << 30, bandwidth=BANDWIDTH)
    settings = tight(paths, more=20)  # a slot has to be found in the midst of answers
    device = settings.device
    budget = device.budget_bytes + GRAPHS
    settings = replace(settings, device=replace(device, budget_bytes=budget, graphs=GRAPHS))
    recorders = Recorders(driver)
    with serving(settings, driver, OnHost(StaticAttention, recorders)) as server:
        # Plans drawn at random seldom come again; of those that stay, passes are replayed.
        at_tokens(server, {(f"{name}0", 3): (name, TURNED) for name in NAMES})
        first = server.generate(requests)
        while server.device.machine._graphs.wanted:  # type: ignore[attr-defined]
            threading.Event().wait(0.01)
        before = server.device.snapshot().graphs
        second = server.generate([replace(r, id=f"{r.id}-second") for r in requests])
        after = server.device.snapshot().graphs
        policy = disturb(server, 1)
        third = server.generate([replace(r, id=f"{r.id}-third") for r in requests])
        calm(server, policy)
        server.drain()
        state = server.device.state
        streams = [m.weights.stream for m in state.models.values()]
        state.pool.validate()
        for m in state.models.values():
            m.weights.validate()
    assert all(isinstance(stream, EventStream) for stream in streams)
    assert sum(stream.loads.n for stream in streams if stream is not None) > 0
    assert before is not None
    assert after is not None
    assert after.replays > before.replays
    for stream in streams:
        assert stream is not None
        assert stream.loads.copy_seconds >= stream.loads.n_bytes / BANDWIDTH * (1 - 1e-9)
    assert sum(stream.loads.stall_seconds for stream in streams if stream is not None) > 0
    for id, answer in alone.items():
        again = (second[f"{id}-second"], third[f"{id}-third"])
        assert first[id].tokens == answer.tokens == again[0].tokens == again[1].tokens
    assert driver.is_clean()
