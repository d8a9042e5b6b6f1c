"""Layers rotate while models serve: no token changes, and the books stay right."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.settings import FleetSettings
from ballast.policy.presets import Preset
from benchmarks.families import config, make
from benchmarks.rotations import RandomRotations
from tests.engine.checkpoints import VOCAB, make_llama
from tests.live.test_live_device import NAMES, asked, fleet, need


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {n: make_llama(root / n, i, num_hidden_layers=6 + i) for i, n in enumerate(NAMES)}


def disturb(server: InProcess, seed: int) -> RandomRotations:
    """Have its layers rotate at random from the first request on."""
    loop = server.device.loop
    policy = RandomRotations(loop.preset.memory, every=0.002, rng=random.Random(seed))
    loop.use_preset(Preset("random", policy, loop.preset.compute, loop.preset.order))
    return policy


def calm(server: InProcess, policy: RandomRotations) -> None:
    """No more changes: the loop is at rest when this returns."""
    for _ in range(200):
        policy.due = 1e9  # the loop may have set it at the same moment
        server.generate(asked(1, models=NAMES[:1]))  # a turn, at least
        if not server.device.state.in_flight:
            return
    pytest.fail("something is on its way for ever")


def with_path(settings: FleetSettings, model_impl: str, linear: str) -> FleetSettings:
    models = (replace(m, model_impl=model_impl, linear=linear) for m in settings.models)
    return replace(settings, models=tuple(models))


@pytest.mark.parametrize(("model_impl", "linear"), [("generic", "plain"), ("fused", "packed")])
def test_rotating_layers_change_no_token(
    paths: dict[str, Path], model_impl: str, linear: str
) -> None:
    check_rotating(paths, model_impl, linear)


def test_rotating_layers_of_experts_change_no_token(tmp_path: Path) -> None:
    """All of a layer's experts are one segment; of some models' layers not all have experts."""
    families = dict(zip(NAMES, ("mixtral", "qwen3_moe", "mixtral"), strict=True))
    paths = {name: tmp_path / name for name in NAMES}
    for i, (name, family) in enumerate(families.items()):
        changes = {"num_hidden_layers": 6 + i, "vocab_size": VOCAB}
        make(paths[name], config(family, **changes), seed=i)
    check_rotating(paths, "fused", "packed")


def check_rotating(paths: dict[str, Path], model_impl: str, linear: str) -> None:
    """The same requests alone and while layers rotate, in memory that is too small for all."""
    requests = [*asked(4), *(replace(r, id=f"{r.id}-warm") for r in asked(3, 0.8))]
    settings = with_path(fleet(paths), model_impl, linear)
    with InProcess(settings) as server:
        alone = server.generate(requests)
    tight = with_path(fleet(paths, need(paths)), model_impl, linear)
    with InProcess(tight) as server:
        policy = disturb(server, 1)
        answers = server.generate(requests)
        calm(server, policy)
        server.drain()
        state = server.device.state
        loads = [m.weights.stream.loads for m in state.models.values() if m.weights.stream]
        state.pool.validate()
        for m in state.models.values():
            m.weights.validate()
            assert m.weights.range.os_backed() == m.weights.range.backed + m.weights.range.aliased
    assert sum(one.n for one in loads) > 0
    for id, answer in answers.items():
        assert answer.tokens == alone[id].tokens, id
        assert answer.logprobs == pytest.approx(alone[id].logprobs, abs=1e-4)
