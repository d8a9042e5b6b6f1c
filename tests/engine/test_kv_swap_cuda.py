"""KV goes to the host and back on a GPU's memory, while graphs are replayed: over stand-ins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.units import MiB
from ballast.policy.memory.kvswap import KvSwap
from benchmarks.random_stages import RandomStages
from tests.engine.gpus import AtOnce, OnHost, on_gpu, serving
from tests.engine.test_kv_swap_live import paths, swapping  # noqa: F401
from tests.engine.test_rotating import with_path
from tests.live.test_live_device import asked, fleet
from tests.models.fake_graphs import Recorders, StaticAttention

BANDWIDTH = 1e13
"""Bytes a second, on the stand-in's clock: stalls are there, and nothing beside real seconds."""


@pytest.mark.slow
def test_swapped_kv_changes_no_token_on_a_gpu(paths: dict[str, Path]) -> None:  # noqa: F811
    asked_for = [*asked(2), *(replace(r, id=f"{r.id}-warm") for r in asked(2, 0.8))]
    requests = [replace(r, max_tokens=15) for r in asked_for]
    settings = with_path(fleet(paths), "generic", "plain")
    with InProcess(settings) as server:
        alone = server.generate(requests)
    driver = AtOnce(n_bytes=1 << 30, bandwidth=BANDWIDTH)
    compute = OnHost(StaticAttention, Recorders(driver))
    gpu = on_gpu(swapping(settings), graphs=16 * MiB)
    budget = gpu.device.budget_bytes + 160 * MiB  # for the arena and graphs
    gpu = replace(gpu, device=replace(gpu.device, budget_bytes=budget))
    with serving(gpu, driver, compute) as server:
        loop = server.device.loop
        loop.use_preset(replace(loop.preset, memory=RandomStages(KvSwap())))
        staged: set[tuple[str, int]] = set()
        server.listen = lambda now, output: staged.update(
            (name, len(m.kv.staged)) for name, m in server.device.state.models.items()
        )
        answers = server.generate(requests)
        server.drain()
        server.device.state.validate()
    assert any(blocks > 0 for _, blocks in staged)
    assert "copy_to_host" in driver.calls
    assert driver.is_clean()
    for id, answer in answers.items():
        assert answer.tokens == alone[id].tokens, id
        assert answer.logprobs == pytest.approx(alone[id].logprobs, abs=1e-4)
