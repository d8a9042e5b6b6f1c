"""Models move to devices where their pages are worth less, in virtual time."""

from __future__ import annotations

from dataclasses import replace

from ballast.core.event import Output, TokenOutput
from ballast.core.fleet import FleetAction, Place
from ballast.core.settings import Slo
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, parse_kinds
from tests.sim.test_cluster import spec
from tests.sim.test_elastic_lending_runs import burst

TTFT = 3.0


def served(placement: str | None) -> tuple[float, list[FleetAction]]:
    """Two models that take turns on one L4, while a third one has no requests on another: the share
    of first tokens that are late, and what the fleet policy has done."""
    names = ("m0", "m1", "m2")
    models = [replace(spec(n, like="Llama-3-8b"), slo=Slo(ttft=TTFT, tpot=0.2)) for n in names]
    first: dict[str, float] = {}
    done: list[FleetAction] = []

    def record(device: str, at: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            first.setdefault(output.request_id, at)

    def record_action(at: float, action: FleetAction, refused: str | None) -> None:
        assert refused is None
        done.append(action)

    preset = resolve("ballast", placement=placement)
    cluster = Cluster(parse_kinds("2xL4"), models, preset, record, on_move=record_action)
    homes = cluster.controller.homes()
    (crowded,) = {on for on in homes.values() if list(homes.values()).count(on) > 1}
    hot = [m for m, on in homes.items() if on == crowded]
    asked = [replace(*burst(m, 1, 1.0 * t), max_tokens=40) for t in range(15) for m in hot]
    asked = [replace(s, prompt=s.prompt[:200]) for s in asked]
    cluster.run(asked)
    assert len(first) == len(asked)
    for device in cluster.devices.values():
        device.state.validate()
    late = sum(first[s.id] > s.arrival + TTFT for s in asked)
    return late / len(asked), done


def test_a_model_that_waits_for_its_turn_moves_to_where_pages_are_free() -> None:
    fixed, _ = served("work")
    late, done = served(None)
    assert late <= fixed / 2
    place, *others = [a for a in done if isinstance(a, Place)]
    assert not others, "and does not move again"
    assert "expected late requests" in place.why
