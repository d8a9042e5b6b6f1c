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
from ballast.policy.memory.kvswap import KvSwap
from benchmarks.random_stages import RandomStages
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


@pytest.mark.parametrize(("model_impl", "linear"), [("generic", "plain"), ("fused", "packed")])
def test_weights_and_kv_stream_and_change_no_token(
    paths: dict[str, Path], model_impl: str, linear: str
) -> None:
    asked_for = [*asked(3), *(replace(r, id=f"{r.id}-warm") for r in asked(2, 0.8))]
    requests = [replace(r, max_tokens=20) for r in asked_for]
    settings = with_path(fleet(paths), model_impl, linear)
    with InProcess(settings) as server:
        alone = server.generate(requests)
    with InProcess(swapping(settings)) as server:
        loop = server.device.loop
        policy = RandomRotations(RandomStages(KvSwap()), every=0.002)
        loop.use_preset(replace(loop.preset, memory=policy))
        seen = set()
        server.listen = lambda now, output: seen.update(
            (len(m.kv.staged), m.rotation) for m in server.device.state.models.values()
        )
        answers = server.generate(requests)
        server.drain()
        server.device.state.validate()
    assert len({(n, rotation) for n, rotation in seen if n and rotation != WHOLE}) > 4
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
        pages = m.weights.pages + m.kv.layout.pages(20)
    with InProcess(swapping(fleet(one, pages), cap=0)) as server:
        answers = server.generate(requests)
        server.drain()
        state = server.device.state
        assert any(d["action"] == "Stage" for d in server.device.decisions())
        state.validate()
    for id, answer in answers.items():
        assert answer.tokens == alone[id].tokens, id


def test_devices_of_several_ranks_cannot_swap_yet(paths: dict[str, Path]) -> None:
    settings = swapping(fleet(paths))
    device = replace(settings.device, tensor_parallel=2)
    with pytest.raises(ConfigError):
        LiveDevice(replace(settings, device=device), lambda outputs: None)
