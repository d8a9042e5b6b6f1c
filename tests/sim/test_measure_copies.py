"""Bytes move beside the loop as long as wanted, and jobs' seconds tell what that costs."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ballast.core.link import LinkRates
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, MiB
from ballast.live.device import LiveDevice
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.measure_copies import STREAM, copying
from ballast.sim.story_costs import fit_jobs, jobs_of, slower_than
from tests.engine.checkpoints import make_llama
from tests.sim.test_story_costs import story


def test_weights_are_copied_again_and_again_until_it_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_llama(tmp_path / "m", 0)
    budget = DeviceSettings(budget_bytes=64 * MiB, page_bytes=64 * KiB, step_tokens=32, threads=1)
    models = (ModelSettings(name="m", path=str(path), dtype="float32"),)
    device = LiveDevice(FleetSettings(models=models, device=budget), lambda outputs: None)
    started: list[int] = []
    start = device.machine.link.start

    def counted(transfer_id: int, copies: Any, stream: str, **more: Any) -> None:
        assert stream == STREAM
        started.append(sum(copy.n_bytes for copy in copies))
        start(transfer_id, copies, stream, **more)

    monkeypatch.setattr(device.machine.link, "start", counted)
    try:
        with copying(device) as moving:
            assert moving
            end = time.monotonic() + 240
            while len(started) < 3 and time.monotonic() < end:
                time.sleep(0.001)
        n = len(started)
        assert n >= 3
        assert set(started) == {device.state.models["m"].spec.weight_bytes}
        time.sleep(0.05)
        assert len(started) == n
        assert device.inbox.take(0.0) == []  # the loop hears of none
    finally:
        device.close()


def test_what_jobs_take_longer_is_found_again() -> None:
    plain, slow = random.Random(1), random.Random(2)
    fit = fit_jobs(jobs_of(story(plain, 600)))
    assert slower_than(fit, jobs_of(story(slow, 300, lambda: 1.25))) == pytest.approx(0.25, rel=0.1)
    assert slower_than(fit, jobs_of(story(slow, 300, lambda: 0.9))) == 0.0
    assert slower_than(fit, []) == 0.0


def test_behind_a_slower_link_fewer_bytes_slow_jobs() -> None:
    fast = MachineProfile(costs={}, link=LinkRates.even(8e9), overhead=0.0, copies_slow=0.4)
    slow = LinkRates(2e9, 3e9, 1e9, 1e9)
    assert fast.over(slow) == replace(fast, link=slow, copies_slow=0.1)
    assert fast.over(LinkRates.even(16e9)).copies_slow == 0.4
