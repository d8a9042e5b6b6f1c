"""KV tiers in virtual time: a conversation whose model was evicted finds its history again."""

from __future__ import annotations

from dataclasses import replace

from ballast.core.event import FinishedOutput, Output
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.units import MiB
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import Simulated, simulate
from tests.sim.test_simulate import COSTS, fleet, spec


def turns(n: int) -> list[Submission]:
    """Conversations with two models in turns, where only one of them has room."""
    made = []
    for i in range(n):
        model = "ab"[i % 2]
        prompt = tuple(1 + (7 * k + i % 2) % 300 for k in range(100 + 50 * (i // 2)))
        made.append(
            Submission(id=f"q{i}", model=model, prompt=prompt, max_tokens=4, arrival=2.0 * i)
        )
    return made


def run(host_bytes: int) -> tuple[Simulated, dict[str, int]]:
    specs = [spec("a"), spec("b")]
    profile = MachineProfile(
        costs={"a": COSTS, "b": COSTS}, link=LinkRates.even(1e8), overhead=1e-4
    )
    settings = fleet("swap", specs, 60)
    settings = replace(settings, kv=KvTierSettings(host_bytes=host_bytes))
    cached: dict[str, int] = {}

    def said(now: float, output: Output) -> None:
        if isinstance(output, FinishedOutput):
            cached[output.request_id] = output.cached_tokens

    result = simulate(settings, specs, turns(8), profile, said)
    result.state.validate()
    return result, cached


def test_history_is_fetched_after_evictions() -> None:
    _, without = run(0)
    assert set(without.values()) == {0}
    result, kept = run(8 * MiB)
    assert list(kept) == [f"q{i}" for i in range(8)]
    assert [n > 0 for n in kept.values()] == [i > 1 for i in range(8)]
    assert result.state.tiers.fetched_tokens.total() == sum(kept.values())
    assert result.state.tiers.failed == 0
    again, same = run(8 * MiB)
    assert (again.seconds, same) == (result.seconds, kept)
