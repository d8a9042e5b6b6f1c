"""MuxServe's scheduling in virtual time: prefills beside decodes, and quotas that hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ballast.bench.record import RequestRecord, RequestRecorder
from ballast.core.errors import BrokenPromise
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.engine.state import DeviceState
from ballast.policy import presets
from ballast.policy.compute.adbs import AdaptiveBatches
from ballast.sim.device import OnDeviceTurn
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import SimulatedRun, simulate
from ballast.workload.workload import WorkloadRequest
from tests.effort import some
from tests.sim.test_enough_memory import world
from tests.sim.test_leap import books, run
from tests.sim.test_orders import COSTS
from tests.sim.test_simulate import fleet, spec, submissions

KV_PAGES = 60


def serve(
    preset: str,
    specs: list[ModelSpec],
    requests: list[Submission],
    *,
    kv_pages: int = KV_PAGES,
    lanes: int = 1,
    observe: OnDeviceTurn | None = None,
    **options: float,
) -> tuple[dict[str, list[RequestRecord]], SimulatedRun]:
    """By model what became of its requests, and the device."""
    pages = kv_pages + sum(s.weight_pages(65536) for s in specs)
    settings = fleet(preset, specs, pages * 1, lanes=lanes, threads=4 if lanes > 1 else None)
    settings = replace(settings, options=options)
    profile = MachineProfile(
        costs=dict.fromkeys((s.name for s in specs), COSTS),
        link=LinkRates.even(1e12),
        overhead=1e-4,
    )
    recorder = RequestRecorder()
    for i, r in enumerate(requests):
        asked = WorkloadRequest(
            id=i,
            at=r.arrival,
            model=r.model,
            prompt_tokens=len(r.prompt),
            output_tokens=r.max_tokens,
        )
        recorder.sent(asked, r.id, r.arrival)
    done = simulate(settings, specs, requests, profile, recorder.record, observe=observe)
    done.state.pool.validate()
    by_model: dict[str, list[RequestRecord]] = {s.name: [] for s in specs}
    for record in recorder.records():
        by_model[record.model].append(record)
    return by_model, done


def stream(model: str, n: int, gap: float, prompt: int, output: int) -> list[Submission]:
    return [
        Submission(
            id=f"{model}-{i}",
            model=model,
            prompt=tuple((i * 7 + k) % 500 + 1 for k in range(prompt)),
            max_tokens=output,
            arrival=gap * i,
            ignore_eos=True,
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_one_prefill_is_in_flight_and_decodes_beside_it(lanes: int) -> None:
    seen: Counter[str] = Counter()

    def look(now: float, state: DeviceState) -> None:
        jobs = [job for job in state.lanes.jobs if job is not None]
        prefills = sum(job.prefills for job in jobs)
        assert prefills <= 1
        assert sum(job.parts or 0 for job in jobs) <= state.lanes.parts
        seen["beside"] += prefills == 1 and len(jobs) > 1

    specs = [spec(f"m{i}") for i in range(3)]
    requests = sorted(
        (r for s in specs for r in stream(s.name, 12, 0.05, 150, 20)), key=lambda r: r.arrival
    )
    records, _ = serve("muxserve", specs, requests, kv_pages=200, lanes=lanes, observe=look)
    assert all(r.answered for rs in records.values() for r in rs)
    assert (seen["beside"] > 10) is (lanes > 1), seen


def test_a_busy_model_does_not_starve_a_quiet_one_of_memory() -> None:
    """One pool, first come first served, does: the busy model's requests fill it."""
    specs = [spec("busy"), spec("quiet")]
    requests = stream("busy", 60, 0.01, 200, 100) + stream("quiet", 8, 0.4, 100, 8)
    requests.sort(key=lambda r: r.arrival)
    late: dict[str, float] = {}
    for preset in ("muxserve", "recompute"):
        options = {"late_last": 0.0, **({"fair_shares": 0.0} if preset == "recompute" else {})}
        records, _ = serve(preset, specs, requests, **options)
        assert all(r.answered for rs in records.values() for r in rs)
        late[preset] = max(r.ttft or 0.0 for r in records["quiet"])
    assert late["muxserve"] < late["recompute"] / 4, late


def test_a_model_gets_the_memory_that_others_do_not_use() -> None:
    specs = [spec("busy"), spec("quiet")]
    requests = stream("busy", 60, 0.05, 200, 100) + stream("quiet", 2, 4.0, 50, 8)
    requests.sort(key=lambda r: r.arrival)
    most: Counter[str] = Counter()
    ends: dict[str, float] = {}
    for preset in ("muxserve", "static"):

        def look(now: float, state: DeviceState, preset: str = preset) -> None:
            kv = state.models["busy"].kv
            assert kv.bounds.limit is not None
            assert kv.pages <= kv.bounds.limit
            limits = sum(m.kv.bounds.limit or 0 for m in state.models.values())
            assert limits <= KV_PAGES
            most[preset] = max(most[preset], kv.pages)

        options = {"adapt": 1.0} if preset == "muxserve" else {}
        records, _ = serve(preset, specs, requests, observe=look, **options)
        ends[preset] = max(r.end or 0.0 for r in records["busy"])
    assert most["static"] <= KV_PAGES // 2 < KV_PAGES * 0.8 < most["muxserve"]
    assert ends["muxserve"] < ends["static"]


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_leaps_change_nothing(lanes: int) -> None:
    for seed in some(range(6), 3):
        settings, specs, requests = world(seed, "muxserve", lanes)
        settings = replace(settings, options={"adapt": 0.2})
        result, done = run(settings, specs, requests, leaps=True)
        single, one = run(settings, specs, requests, leaps=False)
        assert result == single
        assert books(done) == books(one)


def test_an_order_that_begins_nothing_at_all_is_a_bug_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Never(AdaptiveBatches):
        def __call__(self, view: object, memo: object) -> None:
            return None

    monkeypatch.setattr(presets, "ORDERS", {**presets.ORDERS, "never": Never})
    with pytest.raises(BrokenPromise, match="'never' begins no job"):
        serve("static+never", [spec("m")], submissions(["m"], 1, 0))
