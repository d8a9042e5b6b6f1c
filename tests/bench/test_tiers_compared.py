"""`ballast bench --tiers both`: sessions of agents with a fleet's KV tiers, and without them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from ballast.bench.device_run import run_virtual
from ballast.bench.report import Report
from ballast.bench.run_options import by_tiers, with_suffix
from ballast.bench.simulation_setup import WorkloadOptions
from ballast.core.cost import StepCosts, activation_bytes
from ballast.core.errors import ConfigError
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.link import LinkRates
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, Slo
from ballast.core.units import MiB
from ballast.sim.machine_profile import MachineProfile
from tests.bench.test_virtual_replay import PAGE, spec

SESSIONS, TURNS, BLOCK = 8, 5, 16
SLO = Slo(ttft=1.0, tpot=0.1)


def trace(file: Path) -> Path:
    """Write sessions whose turns go on with what went before, and take turns with each other."""
    rows = []
    for s in range(SESSIONS):
        turns = [
            {
                "t": 8.0 * n,
                "type": "s",
                "model": "a",
                "in": BLOCK * (8 + 4 * n),
                "out": 4,
                "hash_ids": list(range(8 + 4 * n)),
            }
            for n in range(TURNS)
        ]
        rows.append(json.dumps({"id": f"s{s}", "block_size": BLOCK, "requests": turns}))
    file.write_text("\n".join(rows))
    return file


def fleet(kv: KvTierSettings) -> FleetSettings:
    """Room for the KV of about two sessions beside one model."""
    arena = activation_bytes(spec("a"), 128, 16)
    return FleetSettings(
        models=(),
        device=DeviceSettings(
            budget_bytes=60 * PAGE + arena + PAGE, page_bytes=PAGE, step_tokens=128, step_logits=16
        ),
        link=LinkSettings(bytes_per_second=1e9),
        preset="balloon",
        kv=kv,
    )


def compared(file: Path, kv: KvTierSettings) -> dict[str, Report]:
    asked = WorkloadOptions(f"agentic:{file}", 1.0, 60.0, 1024, 0, session_gap=1.0)
    work = asked.drawn(["a"], 0)
    profile = MachineProfile(
        costs={"a": StepCosts(2e-3, 4e-4, 2e-4, 1e-7, 1e-9)},
        link=LinkRates.even(1e9),
        overhead=1e-4,
    )
    reports = [
        report
        for suffix, chosen in by_tiers(fleet(kv), "both").items()
        for report in with_suffix(
            [run_virtual(chosen, [spec("a")], work, {"a": SLO}, profile).report], suffix
        )
    ]
    return {report.name: report for report in reports}


def test_sessions_come_back_to_what_the_host_has_kept(tmp_path: Path) -> None:
    found = compared(trace(tmp_path / "agents.jsonl"), KvTierSettings(host_bytes=64 * MiB))
    kept, bare = found["balloon"].total, found["balloon, no tiers"].total
    assert kept.answered == bare.answered == SESSIONS * TURNS
    assert kept.prompt_tokens == bare.prompt_tokens
    repeated = sum(r.repeated_tokens for r in found["balloon"].records)
    assert kept.recomputed_tokens < 0.2 * repeated < bare.recomputed_tokens

    def ttft(name: str) -> float:
        return mean(r.ttft for r in found[name].records if r.ttft is not None)

    assert ttft("balloon") < 0.8 * ttft("balloon, no tiers")


def test_there_must_be_tiers_to_be_compared() -> None:
    with pytest.raises(ConfigError, match="kv_host"):
        by_tiers(fleet(KvTierSettings()), "both")
