"""Which requests of a model are late, and what its jobs have taken, in virtual time."""

from __future__ import annotations

from ballast.core.link import LinkRates
from ballast.core.model import AdapterSpec
from ballast.core.request import Submission
from ballast.core.settings import Slo
from ballast.engine.state import DeviceState
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.sim.test_simulate import COSTS, fleet, spec

LONG = 100.0


def seen(slo: Slo, tuned: Slo, names: list[str]) -> dict[float, int]:
    """How many are late, by time, when one request at a time is served."""
    adapter = AdapterSpec(name="tuned", fingerprint="1", rank=1, slo=tuned)
    model = spec("m", max_running=1, slo=slo, adapters=(adapter,))
    found: dict[float, int] = {}

    def observe(now: float, state: DeviceState) -> None:
        found[now] = state.models["m"].late(now)

    arrivals = [
        Submission(id=f"r{i}", model=name, prompt=(1,) * 20, max_tokens=50, ignore_eos=True)
        for i, name in enumerate(names)
    ]
    profile = MachineProfile(costs={"m": COSTS}, link=LinkRates.even(1e8), overhead=0.0)
    simulate(
        fleet("balloon", [model], 400),
        [model],
        arrivals,
        profile,
        lambda at, output: None,
        observe=observe,
        leaps=False,
    )
    return found


def test_who_waits_is_late_from_half_of_the_time_on() -> None:
    slack = Slo(ttft=LONG, tpot=LONG)
    for names, late in ((["m"] * 3, 2), (["m", "tuned", "m"], 1), (["m", "tuned"], 0)):
        found = seen(Slo(ttft=0.2, tpot=LONG), slack, names)
        assert {n for at, n in found.items() if at <= 0.1} == {0}
        assert max(found.values()) == late, names


def test_who_runs_is_late_while_its_tokens_come_too_slowly() -> None:
    slack = Slo(ttft=LONG, tpot=LONG)
    hasty = Slo(ttft=LONG, tpot=COSTS.base / 2)
    assert max(seen(hasty, slack, ["m"]).values()) == 1
    assert max(seen(slack, slack, ["m"]).values()) == 0
    assert max(seen(hasty, slack, ["tuned"]).values()) == 0


def test_the_lane_is_a_models_while_its_jobs_run() -> None:
    model = spec("m")
    profile = MachineProfile(costs={"m": COSTS}, link=LinkRates.even(1e8), overhead=1e-3)
    arrivals = [Submission(id="r", model="m", prompt=(1,) * 20, max_tokens=9, ignore_eos=True)]
    settings = fleet("balloon", [model], 400)
    leapt = simulate(settings, [model], arrivals, profile, lambda at, output: None)
    stepped = simulate(settings, [model], arrivals, profile, lambda at, output: None, leaps=False)
    result = [e["seconds"] for e in stepped.story.entries if e.get("event") == "JobDone"]
    assert len(result) == 9
    assert stepped.state.models["m"].lane_seconds == sum(result)
    assert leapt.state.models["m"].lane_seconds == sum(result)
