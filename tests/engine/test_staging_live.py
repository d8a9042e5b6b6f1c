"""KV blocks go to the host and back while models serve: no token changes, the books stay right."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.actions import Action, Decision, Stage
from ballast.core.view import DeviceView
from ballast.policy import presets
from ballast.policy.memory.balloon import Balloon
from ballast.policy.requirements import Requirements
from tests.engine.checkpoints import make_llama
from tests.engine.test_rotating import with_path
from tests.live.test_live_device import NAMES, asked, fleet


@dataclass(frozen=True)
class RandomStages(Balloon):
    """Serves as `balloon`, and has random numbers of blocks staged."""

    rng: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def requires(self) -> Requirements:
        return Requirements(kv_staging=True)

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = super().__call__(view, memo)
        actions: list[Action] = list(decision.actions)
        for m in view.models:
            blocks = sum(r.computed // m.spec.block_tokens for r in m.running)
            if blocks:
                actions.append(Stage(m.name, self.rng.randint(0, blocks), "at random"))
        return replace(decision, actions=tuple(actions), wake_at=view.now + 0.003)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {n: make_llama(root / n, i, num_hidden_layers=4 + i) for i, n in enumerate(NAMES)}


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a preset that stages blocks at random."""
    kinds = {**presets._KINDS, "staging": presets._Kind(RandomStages)}
    monkeypatch.setattr(presets, "_KINDS", kinds)
    monkeypatch.setattr(presets, "PRESETS", tuple(kinds))
    return "staging"


@pytest.mark.parametrize(
    ("model_impl", "linear", "lanes"),
    [("generic", "plain", 1), ("fused", "packed", 1), ("fused", "packed", 2)],
)
def test_staged_blocks_change_no_token(
    paths: dict[str, Path], model_impl: str, linear: str, lanes: int, staging: str
) -> None:
    asked_for = [*asked(3), *(replace(r, id=f"{r.id}-warm") for r in asked(2, 0.8))]
    requests = [replace(r, max_tokens=20) for r in asked_for]
    settings = with_path(fleet(paths), model_impl, linear)
    with InProcess(settings) as server:
        alone = server.generate(requests)
    several = replace(settings.device, lanes=lanes, threads=2 if lanes > 1 else None)
    with InProcess(replace(settings, device=several, preset=staging)) as server:
        seen = set()
        server.listen = lambda now, output: seen.update(
            (name, len(m.kv.staged)) for name, m in server.device.state.models.items()
        )
        answers = server.generate(requests)
        server.drain()
        server.device.state.validate()
        assert all(
            not m.kv.staged and not m.kv.staged.pages for m in server.device.state.models.values()
        )
    assert len(seen) > 8
    for id, answer in answers.items():
        assert len(answer.tokens) > 0
        assert answer.tokens == alone[id].tokens, id
        assert answer.logprobs == pytest.approx(alone[id].logprobs, abs=1e-4)


def test_a_context_longer_than_the_devices_kv_has_the_same_tokens(
    paths: dict[str, Path], staging: str
) -> None:
    """Prefill in chunks over history on the host, and decodes over it, beside other requests."""
    name = NAMES[2]
    settings = with_path(fleet({name: paths[name]}), "fused", "packed")
    long = replace(asked(1, models=(name,))[0], id="long", max_tokens=30)
    long = replace(long, prompt=tuple((5 * k + 3) % 90 for k in range(210)))
    requests = [long, *(replace(r, max_tokens=10) for r in asked(2, models=(name,)))]
    with InProcess(settings) as server:
        alone = server.generate(requests)
        (m,) = server.device.state.models.values()
        own = m.kv.most_pages(-(-160 // m.spec.block_tokens))
        pages = server.device.state.arena.pages + m.weights.pages + own
        assert m.kv.most_pages(-(-240 // m.spec.block_tokens)) > own
    device = replace(settings.device, budget_bytes=pages * settings.device.page_bytes)
    short = replace(settings, device=device)
    with InProcess(short) as server:
        assert "insufficient_memory" in str(server.generate([long])["long"])
    with InProcess(replace(short, preset=staging)) as server:
        answers = server.generate(requests)
        server.drain()
        server.device.state.validate()
    for id, answer in answers.items():
        assert len(answer.tokens) > 0
        assert answer.tokens == alone[id].tokens, id
