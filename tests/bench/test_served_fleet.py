"""Simulations of a fleet that is served: on its own devices, on others, of its own requests."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ballast.bench import served_fleet
from ballast.bench.model_sizes import sizes_of
from ballast.bench.served_fleet import answer
from ballast.core.errors import ConfigError
from ballast.core.settings import DeviceSettings
from ballast.core.units import GiB, MiB
from ballast.server.admin.simulation_job import SimulationJob
from ballast.server.observe.recent_requests import TracedRequest
from ballast.sim.profile import device_profile
from tests.bench.test_simulation import fleet

STORIES = Path(__file__).parents[1] / "sim" / "stories"
RECORDED = [TracedRequest(100.0 + i / 4, f"m{i % 2}", 200, 20) for i in range(24)]


def job(**changes: Any) -> SimulationJob:
    """A job as it comes from the server, through its encoding."""
    device = DeviceSettings(budget_bytes=40 * GiB, page_bytes=2 * MiB, step_tokens=2048)
    served = replace(fleet(2), device=device, preset="balloon")
    specs = sizes_of(served)
    made = SimulationJob(
        kind="simulate",
        fleet=served,
        specs=specs,
        costs={s.name: device_profile("H100-80G").costs(s) for s in specs},
        link_bytes_per_second={"cpu:0": 2e10},
        requests=RECORDED,
    )
    changed = msgspec.structs.replace(made, **changes)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(changed), type=SimulationJob)


def test_its_own_requests_are_asked_again_on_its_own_devices() -> None:
    seen: list[tuple[str, int, int]] = []
    found = answer(job(workload="recorded", presets="balloon,swap"), lambda *at: seen.append(at))
    assert [row["name"] for row in found["presets"]] == ["balloon", "swap"]
    assert all(row["requests"] == row["answered"] == 24 for row in found["presets"])
    assert set(found["presets"][0]["models"]) == {"m0", "m1"}
    # 26 GB each in 40 GiB: whole models take turns, and wait for 1.3 s at the rate that was seen.
    balloon, swap = (row["ttft"][1] for row in found["presets"])
    assert max(balloon, swap) > 1.3
    [device] = found["played"]["runs"][0]["devices"].values()
    assert device["budget"] == pytest.approx(40 * 1024, rel=0.01)
    assert found["played"]["runs"][0]["marks"]
    assert {what for what, _, _ in seen} == {"balloon", "swap"}
    assert msgspec.json.encode(found)


def test_of_its_requests_the_last_seconds_count_and_another_rate_squeezes_them() -> None:
    found = answer(job(workload="recorded", presets="balloon", seconds=5.0, rate=8.0))
    assert found["presets"][0]["requests"] == 21
    assert "rate x2" in found["workload"]
    assert "share nothing" in found["workload"]


def test_without_a_rate_as_much_is_asked_as_its_devices_can_do() -> None:
    """A machine of a tenth of the speed gets a tenth of the requests, within what was measured."""
    found = []
    for factor in (1.0, 10.0):
        costs = {
            name: replace(c, base=factor * c.base, per_token=factor * c.per_token)
            for name, c in job().costs.items()
        }
        asked = {"workload": "bursty", "seconds": 600.0, "presets": "swap"}
        found.append(answer(job(costs=costs, **asked))["presets"][0]["requests"])
    assert 8 <= found[0] / found[1] <= 12


def test_the_fewest_devices_of_a_kind() -> None:
    asked = {"devices": "H100-80G", "presets": "balloon", "workload": "poisson", "seconds": 4.0}
    found = answer(job(kind="plan", target=0.5, rate=1.0, **asked))
    [plan] = found["presets"]
    assert plan["devices"] >= 1
    assert plan["attainment"] >= 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": "../secrets.toml"},
        {"devices": "secrets.toml"},
        {"devices": "65xH100-80G"},
        {"devices": "33xH100-80G:tp2"},
        {"devices": "nonesuch"},
        {"presets": "a,b,c,d,e,f,g"},
        {"presets": "nonesuch"},
        {"devices": "here", "link_bytes_per_second": {}},
        {"workload": "poisson", "rate": 100.0, "seconds": 3600.0},
        {"kind": "plan", "devices": "here"},
        {"kind": "plan", "devices": "2xL4"},
    ],
)
def test_what_it_refuses(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        answer(job(**changes))


def test_a_story_is_played(tmp_path: Path) -> None:
    path = tmp_path / "story.jsonl"
    path.write_bytes(lzma.decompress((STORIES / "balloon-rr-1.jsonl.xz").read_bytes()))
    found = answer(job(kind="story", fleet=replace(job().fleet, story_path=str(path))))
    assert found["notes"] == []
    [run] = found["played"]["runs"]
    [device] = run["devices"].values()
    assert len(run["at"]) > 10
    assert {use for use, _, _ in device["bands"]} >= {"weights", "kv"}
    assert run["marks"]


def test_the_process_answers_with_a_result_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """All of `main` but what ends with a process: its limits and its parent."""
    for name in ("die_with", "_limit"):
        monkeypatch.setattr(served_fleet, name, lambda *_: None)
    for presets, last in (("balloon", "result"), ("nonesuch", "error")):
        asked = job(workload="recorded", presets=presets)
        monkeypatch.setattr(
            served_fleet, "_read", lambda asked=asked: msgspec.msgpack.encode(asked)
        )
        assert served_fleet.main() == 0
        *progress, final = capfdbinary.readouterr().out.splitlines()
        assert msgspec.json.decode(final)["event"] == last
        assert all(msgspec.json.decode(line)["event"] == "progress" for line in progress)
