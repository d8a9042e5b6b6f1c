"""KV and weights go to and fro while models serve: no token changes, and the books stay right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.errors import ConfigError
from ballast.core.rotation import WHOLE
from ballast.core.settings import FleetSettings
from ballast.live.device import LiveDevice
from ballast.policy.base import MemoryPolicy
from ballast.policy.memory.kvswap import KvSwap
from ballast.policy.presets import Preset
from benchmarks.kv_swaps import RandomSwaps
from benchmarks.rotations import RandomRotations
from tests.engine.checkpoints import make_llama
from tests.engine.test_rotating import with_path
from tests.live.test_live_device import NAMES, asked, fleet


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {n: make_llama(root / n, i, num_hidden_layers=4 + i) for i, n in enumerate(NAMES)}


def swapping(settings: FleetSettings, **options: float) -> FleetSettings:
    return replace(settings, preset="kvswap", options={"pooled": 1, **options})


@pytest.mark.parametrize(
    ("model_impl", "linear", "dirty", "lanes", "weights"),
    [
        ("generic", "plain", 0, 1, True),
        ("fused", "packed", 0, 1, False),
        ("fused", "packed", 1, 1, True),
        ("fused", "packed", 0, 2, True),
    ],
)
def test_swapped_kv_changes_no_token(
    paths: dict[str, Path], model_impl: str, linear: str, dirty: int, lanes: int, weights: bool
) -> None:
    """`weights`: they stream as well, in the same passes."""
    asked_for = [*asked(3), *(replace(r, id=f"{r.id}-warm") for r in asked(2, 0.8))]
    requests = [replace(r, max_tokens=20) for r in asked_for]
    settings = with_path(fleet(paths), model_impl, linear)
    with InProcess(settings) as server:
        alone = server.generate(requests)
    several = replace(settings.device, lanes=lanes, threads=2 if lanes > 1 else None)
    settings = replace(settings, device=several)
    with InProcess(swapping(settings, dirty=dirty)) as server:
        loop = server.device.loop
        policy: MemoryPolicy = RandomSwaps(KvSwap(pooled=1, dirty=dirty))
        if weights:
            policy = RandomRotations(policy, every=0.002)
        loop.use_preset(Preset("random", policy, loop.preset.compute, loop.preset.order))
        rotations = set()
        server.listen = lambda now, output: rotations.update(
            (m.kv.rotation, m.rotation) for m in server.device.state.models.values()
        )
        answers = server.generate(requests)
    assert len({kv for kv, _ in rotations}) > 4
    both = [r for r in rotations if WHOLE not in r]
    assert len(both) > 4 if weights else not both
    for id, answer in answers.items():
        assert answer.tokens == alone[id].tokens, id
        assert answer.logprobs == pytest.approx(alone[id].logprobs, abs=1e-4)


def test_where_kv_is_short_it_is_swapped_and_nobody_starts_again(paths: dict[str, Path]) -> None:
    requests = asked(6, models=NAMES[:1])
    one = {NAMES[0]: paths[NAMES[0]]}
    with InProcess(swapping(fleet(one))) as server:
        alone = server.generate(requests)
        (m,) = server.device.state.models.values()
        # Of the six requests, which are 41 blocks in the end, the first to end is one of 3.
        pages = m.weights.pages + m.kv.most_pages(20)
    with InProcess(swapping(fleet(one, pages), cap=0)) as server:
        answers = server.generate(requests)
        server.drain()
        state = server.device.state
        result = [
            d for d in server.device.decisions() if d["action"] == "Reside" and "kv" in d["plan"]
        ]
        assert result
        m = state.models[NAMES[0]]
        m.kv.validate([])
        state.pool.validate()
        assert m.kv.os_backed() == len(m.kv.slabs) * m.kv.layout.whole_pages
    for id, answer in answers.items():
        assert answer.tokens == alone[id].tokens, id


def test_devices_of_several_ranks_cannot_swap_yet(paths: dict[str, Path]) -> None:
    settings = swapping(fleet(paths))
    device = replace(settings.device, tensor_parallel=2)
    with pytest.raises(ConfigError):
        LiveDevice(replace(settings, device=device), lambda outputs: None)
