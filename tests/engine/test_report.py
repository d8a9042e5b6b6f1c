"""What a device says of itself while it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.actions import Reside
from ballast.core.event import Output, TokenOutput
from ballast.core.report import DeviceReport, ModelReport
from ballast.core.rotation import WHOLE, Rotation
from ballast.engine.apply import apply
from tests.engine.checkpoints import make_llama
from tests.live.test_live_device import asked, fleet

LAYERS = 6


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"a": make_llama(root / "a", 0, num_hidden_layers=LAYERS)}


def test_layers_that_rotate_and_what_they_cost(paths: dict[str, Path]) -> None:
    """Two neighbours share a slot: each of them is waited for in every pass."""
    wanted: dict[int, Rotation | None] = {10: Rotation((1, 2), 1), 30: WHOLE, 36: None}
    with InProcess(fleet(paths)) as server:
        state = server.device.state
        seen: dict[int, DeviceReport] = {}

        def act(now: float, output: Output) -> None:
            if isinstance(output, TokenOutput) and output.request_id == "a0":
                seen[output.index] = server.device.snapshot()
                if output.index in wanted:
                    rotation, plan = wanted[output.index], state.models["a"].plan
                    after = plan.without(None) if rotation is None else plan.turned(rotation)
                    assert apply(state, Reside("a", after), []) is None

        server.listen = act
        server.generate(asked(1, models=("a",)))
        slots, back = state.models["a"].weights.slots, server.device.snapshot()
        layer_pages, layer_bytes = slots.layer_pages, slots.layer_bytes
        whole = state.models["a"].weights.pages
    for report in seen.values():
        assert sum(report.owners.values()) == report.total - report.free - report.reclaiming

    def of(report: DeviceReport) -> ModelReport:
        (found,) = report.models
        return found

    def counts(m: ModelReport) -> tuple[int, ...]:
        return m.layers, m.resident_layers, m.rotating_layers, m.absent_layers, m.lent_pages

    everything = (LAYERS, LAYERS, 0, 0, 0)
    assert counts(of(seen[9])) == everything
    assert (of(seen[9]).loads, of(seen[9]).stall_seconds) == (0, 0.0)
    rotating = of(seen[29])
    assert counts(rotating) == (LAYERS, LAYERS - 2, 2, 1, layer_pages)
    assert rotating.weight_pages == whole - layer_pages
    assert seen[29].owners["slots:a"] == layer_pages
    assert rotating.loads >= 2 * (29 - 12)
    assert rotating.loaded_bytes == rotating.loads * layer_bytes
    assert rotating.copy_seconds > 0
    assert rotating.stall_seconds > 0
    assert counts(of(seen[35])) == everything
    assert "slots:a" not in seen[35].owners
    assert counts(of(back)) == everything
    assert of(back).evictions == 1
    assert of(back).loads >= rotating.loads
    assert of(seen[9]).traffic.rate > 0
    assert of(back).traffic.output_tokens == of(back).output_tokens, "one request has ended"


def test_a_model_that_is_not_here_has_no_layers_here(paths: dict[str, Path]) -> None:
    with InProcess(fleet(paths)) as server:
        (m,) = server.device.snapshot().models
    assert (m.layers, m.resident_layers, m.absent_layers) == (LAYERS, 0, LAYERS)
