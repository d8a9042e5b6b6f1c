"""Random scenarios under `prism`: nobody fails for want of memory, and nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from tests.sim import scenarios
from tests.sim.scenarios import OPTIONS, Seeded, scenario
from tests.sim.watching import Run

STUCK = (203, 332)
"""A running request lacked pages of a model whose only request waited behind all others: late, or
late and more important."""


@pytest.mark.parametrize("seed", [*STUCK, *range(12)])
def test_every_request_is_served(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.OPTIONS, "prism", OPTIONS["balloon"])
    orders = ("", "+deadline", "+round-robin")
    Run(scenario(Seeded(random.Random(seed)), ("prism",), orders))()
