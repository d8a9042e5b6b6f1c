"""Which model is loaded next, who waits for it, and how long it will take."""

from __future__ import annotations

import asyncio

from ballast.core.clock import Clock
from ballast.core.settings import AdapterSettings, DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import MiB
from ballast.server.model_loads import FIXED_BYTES, ModelLoads


class ManualClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


def loads_of(*models: ModelSettings, clock: Clock | None = None) -> ModelLoads:
    fleet = FleetSettings(models=models, device=DeviceSettings(name="cpu:0", budget_bytes=MiB))
    loads = ModelLoads(clock or ManualClock())
    loads.queue(fleet, {m.name: MiB for m in models})
    loads.assign({m.name: ["cpu:0"] for m in models})
    return loads


def model(name: str, *, preload: bool = False, pinned: bool = False) -> ModelSettings:
    return ModelSettings(name=name, path=name, preload=preload, pinned=pinned)


def test_models_that_requests_wait_for_come_first_then_preloaded_ones() -> None:
    loads = loads_of(model("a"), model("b", preload=True), model("c"), model("d", pinned=True))
    assert [x.name for x in loads] == ["b", "d", "a", "c"]
    for name in ("c", "a", "c"):
        load = loads.find(name)
        assert load is not None
        loads.want(load)
    assert [x.name for x in loads] == ["c", "a", "b", "d"]
    first = loads.next("cpu:0")
    assert first is not None
    loads.begin(first, "cpu:0")
    following = loads.next("cpu:0")
    assert following is not None
    assert (first.name, following.name) == ("c", "a")
    assert loads.next("cpu:1") is None


def test_a_request_waits_by_any_name_of_a_model_or_its_adapters() -> None:
    adapter = AdapterSettings(name="tuned", path="tuned", aliases=("fine",))
    loads = loads_of(ModelSettings(name="a", path="a", aliases=("first",), adapters=(adapter,)))
    found = {name: loads.find(name) for name in ("a", "first", "tuned", "fine", "b")}
    assert found.pop("b") is None
    assert {load.name for load in found.values() if load is not None} == {"a"}

    async def main() -> list[bool]:
        load = loads.find("fine")
        assert load is not None
        early = await loads.wait(load, 0.0)
        waiting = asyncio.ensure_future(loads.wait(load))
        every = asyncio.ensure_future(loads.wait_for_all())
        await asyncio.sleep(0)
        loads.end(["a", "tuned"])
        await every
        return [early, await waiting]

    assert asyncio.run(main()) == [False, True]
    assert loads.find("fine") is None
    assert len(loads) == 0


def test_the_time_that_is_left_follows_from_what_the_models_before_took() -> None:
    """The first one counts for nothing: it may have waited for kernels to be compiled."""
    clock = ManualClock()
    loads = loads_of(*map(model, "abcd"), clock=clock)
    for seconds in (100.0, 2.0):
        load = loads.next("cpu:0")
        assert load is not None
        loads.begin(load, "cpu:0")
        clock.seconds += seconds
        assert loads.now(load).left is None
        loads.end([load.name])
    c, d = loads
    assert (loads.now(c).left, loads.now(d).left) == (2.0, 4.0)
    loads.begin(c, "cpu:0")
    clock.seconds += 1.5
    assert (loads.now(c).left, loads.now(d).left) == (0.5, 2.5)
    assert loads.now(c).state == "loading"
    assert loads.now(d).state == "queued"
    assert loads.progress() == "2 of 4 models, 2MiB of 4MiB, now c, 2 s left"
    assert c.cost == MiB + FIXED_BYTES


def test_nobody_waits_any_longer_when_the_server_stops() -> None:
    loads = loads_of(model("a"))

    async def main() -> bool:
        load = loads.find("a")
        assert load is not None
        waiting = asyncio.ensure_future(loads.wait(load))
        await asyncio.sleep(0)
        loads.give_up()
        return await waiting

    assert asyncio.run(main())
    assert loads.find("a") is not None
