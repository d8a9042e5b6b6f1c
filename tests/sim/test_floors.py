"""What the preset `ballast` owes every model and request, beside others that can be in time: the
bounds of docs/presets.md."""

from __future__ import annotations

from dataclasses import replace

from ballast.core.event import FinishedOutput, Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import LinkSettings, Slo
from ballast.policy.market.starvation import LONGEST_WAIT
from ballast.policy.memory.arbiter import STARVES_AFTER
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.sim.test_simulate import COSTS, PAGE, fleet, spec

STREAM = 40.0
"""Seconds for which requests come that can be in time."""
LEVELS = Slo(ttft=0.5, tpot=2.6e-3)
"""Levels that a request keeps if nothing makes it pause: a step takes 2.3 ms."""
NEVER = Slo(ttft=1e-4, tpot=1e-4)
"""Levels that no request can keep."""
LINK = 2e6
"""Bytes per second: weights take longer to come than `LEVELS` allow."""
SERVED = 4.0
"""Seconds in which a request is served once its turn has come: others' answers end, its weights
come over the link, and it is computed."""


def asked(id: str, model: str, at: float, prompt: int, output: int) -> Submission:
    tokens = tuple((len(id) + 7 * i) % 500 + 1 for i in range(prompt))
    return Submission(id=id, model=model, prompt=tokens, max_tokens=output, arrival=at)


def stream(model: str) -> list[Submission]:
    """Requests of which nearly always one runs."""
    return [asked(f"{model}-{i}", model, 0.85 * i, 20, 400) for i in range(int(STREAM / 0.85))]


def waits(specs: list[ModelSpec], requests: list[Submission], pages: int) -> dict[str, float]:
    """Seconds until the first token of each request, all of which end with their whole answers."""
    first: dict[str, float] = {}
    ended: set[str] = set()

    def received(now: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            first.setdefault(output.request_id, now)
        assert isinstance(output, TokenOutput | FinishedOutput)
        ended.update([output.request_id] if isinstance(output, FinishedOutput) else [])

    link = LinkRates.even(LINK)
    profile = MachineProfile(costs={s.name: COSTS for s in specs}, link=link, overhead=1e-4)
    setting = replace(fleet("ballast", specs, pages), link=LinkSettings(bytes_per_second=LINK))
    requests = sorted(requests, key=lambda s: s.arrival)
    simulate(setting, specs, requests, profile, received).state.validate()
    assert ended == {s.id for s in requests}
    return {s.id: first[s.id] - s.arrival for s in requests}


def test_a_hopeless_model_has_its_turn_beside_an_endless_stream() -> None:
    """No request of the stream loses as little as its requests gain: by price it never comes."""
    busy, lost = (
        replace(spec(name, 40), slo=slo, segment_bytes=tuple(n * PAGE for n in (8, 16, 16)))
        for name, slo in (("busy", LEVELS), ("lost", NEVER))
    )
    wanting = asked("lost-0", "lost", 1.5, 20, 4)
    found = waits([busy, lost], [*stream("busy"), wanting], 66)
    assert LONGEST_WAIT < found["lost-0"] <= STARVES_AFTER + SERVED
    kept = [wait <= LEVELS.ttft for id, wait in found.items() if id.startswith("busy")]
    assert sum(kept) > 0.8 * len(kept), "the stream is in time but for that turn"
