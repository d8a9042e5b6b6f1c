"""What is left out of a fit does not enter its prediction, and where there are no tables."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sim_engines import (
    Errors,
    Known,
    engines_left_out,
    kernels_left_out,
    main,
    models_left_out,
)
from scripts.point_fits import Points

TABLES = Path(os.environ.get("BALLAST_TABLES", "../shared/profiles"))
needs_tables = pytest.mark.skipif(not TABLES.is_dir(), reason="the measurements are not at hand")
DEVICE = "A10"


def slower(points: Points) -> Points:
    """Let each job take twice as long."""
    return Points(points.batch, points.tokens, 2 * points.seconds)


def test_no_tables_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sim_engines", "--profiles", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "not at hand" in capsys.readouterr().out


def test_the_median_is_of_jobs_not_of_kernels() -> None:
    found = Errors()
    found.add("kernels", "a", "decode", [5.0])
    for row, off in (("a", 0.02), ("b", -0.04), ("c", 0.06)):
        found.add("model", row, "decode", [off, -off])
    summary = found.summary()
    assert summary["left_out_median_pct"] == pytest.approx(4.0)
    assert summary["model_decode_worst_pct"] == pytest.approx(6.0)
    assert summary["kernels_decode_median_pct"] == pytest.approx(500.0)


@needs_tables
def test_a_model_that_is_left_out_has_no_say_in_its_prediction() -> None:
    """Twice its seconds, and the prediction is as it was: half of what was measured."""
    known = Known(TABLES)
    before, after = Errors(), Errors()
    models_left_out(known, [DEVICE], before)
    (pair, *others) = [p for p in known.tables.decode if p[0] == DEVICE]
    for phase in (known.tables.decode, known.tables.prefill):
        phase[pair] = slower(phase[pair])
    models_left_out(known, [DEVICE], after)
    for phase in ("decode", "prefill"):
        own = after.rows["model"]["/".join(pair)][phase]
        assert own == pytest.approx(50.0, abs=before.rows["model"]["/".join(pair)][phase] / 2 + 0.1)
    moved = [
        after.rows["model"]["/".join(p)]["decode"] - before.rows["model"]["/".join(p)]["decode"]
        for p in others
    ]
    assert max(moved) > 5.0, "it has a say in that of others"


@needs_tables
def test_a_group_size_and_an_engine_that_are_left_out() -> None:
    known = Known(TABLES)
    before, after = Errors(), Errors()
    kernels_left_out(known, before)
    engines_left_out(known, before)
    device = "H100-80G"
    known.timed[device] = [
        replace(k, matrices=2 * k.matrices, others=2 * k.others) if k.tp == 8 else k
        for k in known.timed[device]
    ]
    kernels_left_out(known, after)
    for row, phases in before.rows["kernels"].items():
        if row.startswith(device) and row.endswith("tp8") and "decode" in phases:
            own = after.rows["kernels"][row]["decode"]
            assert own == pytest.approx(50.0, abs=phases["decode"] / 2 + 1e-6)
    for name in [p for p in known.tables.decode if p[0] == device]:
        known.tables.decode[name] = slower(known.tables.decode[name])
    engines_left_out(known, after)
    for row, phases in before.rows["engine"].items():
        if device in row:
            own = after.rows["engine"][row]["decode"]
            assert own == pytest.approx(50.0, abs=phases["decode"] / 2 + 1e-6)
