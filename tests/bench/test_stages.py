"""Bars of stages."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from ballast.bench.stages import Stages


def test_a_stage_shows_its_name_and_note_and_keeps_its_time() -> None:
    shown = StringIO()
    with Stages(Console(file=shown, force_terminal=True, width=80)) as stages:
        with stages.stage("measuring"):
            pass
        with stages.stage("training", 2) as advance:
            advance()
            advance("a model, loss 3.10")
    assert "measuring" in shown.getvalue()
    assert "training" in shown.getvalue()
    assert list(stages.seconds) == ["measuring", "training"]
    assert all(seconds >= 0 for seconds in stages.seconds.values())


def test_a_stage_that_fails_has_no_time() -> None:
    with (
        pytest.raises(ValueError, match="no"),
        Stages(Console(file=StringIO())) as stages,
        stages.stage("training"),
    ):
        raise ValueError("no")
    assert stages.seconds == {}
