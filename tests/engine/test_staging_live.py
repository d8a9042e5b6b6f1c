"""KV blocks go to the host and back while models serve: no token changes, the books stay right."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from tests.engine.checkpoints import make_llama
from tests.engine.test_failed_jobs import Fragile
from tests.engine.test_rotating import with_path
from tests.live.test_live_device import NAMES, asked, fleet
from tests.policy.random_stages import add_preset

OFTEN = {"every": 0.003}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {n: make_llama(root / n, i, num_hidden_layers=4 + i) for i, n in enumerate(NAMES)}


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a preset that stages blocks at random."""
    return add_preset(monkeypatch)


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
    with InProcess(replace(settings, device=several, preset=staging, options=OFTEN)) as server:
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
    assert any(blocks > 0 for _, blocks in seen)
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
        own = m.kv.layout.pages(-(-160 // m.spec.block_tokens))
        pages = server.device.state.arena.pages + m.weights.pages + own
        assert m.kv.layout.pages(-(-240 // m.spec.block_tokens)) > own
    device = replace(settings.device, budget_bytes=pages * settings.device.page_bytes)
    short = replace(settings, device=device)
    with InProcess(short) as server:
        assert "insufficient_memory" in str(server.generate([long])["long"])
    with InProcess(replace(short, preset=staging, options=OFTEN)) as server:
        answers = server.generate(requests)
        server.drain()
        server.device.state.validate()
    for id, answer in answers.items():
        assert len(answer.tokens) > 0
        assert answer.tokens == alone[id].tokens, id


def test_jobs_that_fail_while_blocks_move_lose_nothing(
    paths: dict[str, Path], staging: str
) -> None:
    """Both copies of a job's moves count only if it has succeeded."""
    requests = [replace(r, max_tokens=20) for r in asked(3, models=NAMES[:1])]
    settings = fleet({NAMES[0]: paths[NAMES[0]]})
    with InProcess(settings) as server:
        alone = server.generate(requests)
    rng = random.Random(3)
    with InProcess(replace(settings, preset=staging, options=OFTEN)) as server:
        fragile = Fragile(server, NAMES[0], lambda work: len(work) > 1 and rng.random() < 0.3)
        answers = server.generate(requests)
        server.drain()
        server.device.state.validate()
    assert any(failed for _, failed in fragile.jobs)
    for id, answer in answers.items():
        assert answer.tokens == alone[id].tokens, id
