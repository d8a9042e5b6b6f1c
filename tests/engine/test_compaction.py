"""Compaction in mid-generation: real KV bytes move, and no token changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.actions import Compact, Decision
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, MiB
from ballast.core.view import DeviceView
from ballast.policy.base import MemoryPolicy
from ballast.policy.memory.balloon import Balloon
from ballast.policy.presets import Preset
from tests.engine.checkpoints import VOCAB, make_llama


class Compacting(MemoryPolicy):
    """`balloon`, and every model's blocks moved together as often as possible."""

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = Balloon()(view, memo)
        actions = [Compact(m.name, m.kv_pages) for m in view.models if m.loose_pages]
        return replace(decision, actions=(*decision.actions, *actions))


@pytest.fixture
def fleet(tmp_path: Path) -> FleetSettings:
    path = make_llama(tmp_path / "m", 5)
    device = DeviceSettings(
        budget_bytes=64 * MiB, page_bytes=64 * KiB, step_tokens=64, prefix_cache=False, threads=1
    )
    return FleetSettings(
        models=(ModelSettings(name="m", path=str(path), dtype="float32", block_tokens=8),),
        device=device,
    )


def test_blocks_move_and_tokens_stay(fleet: FleetSettings) -> None:
    requests = [
        Submission(
            id=f"r{i}",
            model="m",
            prompt=tuple((11 * i + 5 * k) % VOCAB for k in range(20 + 3 * i)),
            max_tokens=120 if i % 4 == 0 else 8 + 5 * i,
            ignore_eos=True,
        )
        for i in range(16)
    ]
    with InProcess(fleet) as server:
        loop = server.device.loop
        loop.use_preset(Preset("compacting", Compacting(), loop.preset.compute, loop.preset.order))
        moved = server.generate(requests)
        entries = list(server.device.story.entries)
        server.device.state.models["m"].kv.validate([])
    done = [e for e in entries if e.get("action") == "Compact" and "refused" not in e]
    assert done, "nothing was compacted: the test proves nothing"
    with InProcess(fleet) as server:
        for r in requests:
            assert server.generate([r])[r.id].tokens == moved[r.id].tokens
