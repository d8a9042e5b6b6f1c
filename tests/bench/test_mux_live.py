"""MuxServe live: rows share memory and cores alike, and what is said of a run is what happened."""

from __future__ import annotations

import pytest

from ballast.bench.record import RequestRecord
from ballast.bench.report import Report
from ballast.core.settings import ModelSettings, Slo
from ballast.policy.presets import resolve
from benchmarks import mux_live
from benchmarks.mux_live import COMPARED, WARM_UP, Setting, back_and_forth, interference
from benchmarks.mux_sim import TERMS
from tests.bench.test_bench_report import record

SETTING = Setting(
    models=tuple(ModelSettings(name=n, path=n) for n in "abcd"),
    budget=100 << 20,
    page=1 << 18,
    cores=2,
    kv_bytes=10 << 20,
    token=1024,
)


def test_rows_have_equal_options() -> None:
    values = [resolve(c.preset, COMPARED.options(row)).values for row, c in COMPARED.rows.items()]
    for option in {o for of in values for o in of}:
        assert len({of[option] for of in values if option in of}) == 1, option
    for of in values:
        assert {o: of[o] for o in TERMS if o in of} == {o: v for o, v in TERMS.items() if o in of}


@pytest.mark.parametrize("row", COMPARED.rows)
def test_rows_have_the_same_memory_cores_and_models(row: str) -> None:
    fleet = SETTING.fleet(row)
    devices = (fleet.device, *fleet.others)
    assert sum(d.budget_bytes for d in devices) == SETTING.budget
    assert sum(d.threads or 0 for d in devices) == SETTING.cores
    assert [m.name for m in fleet.models] == SETTING.names
    served = {d.name: [m.name for m in fleet.models if m.devices == (d.name,)] for d in devices}
    assert sorted(n for names in served.values() for n in names) == SETTING.names
    if row == "spatial":
        assert served == {"cpu:0": ["a", "d"], "cpu:1": ["b", "c"]}
    assert {d.step_tokens for d in devices} == {mux_live.STEP_TOKENS}


def test_models_go_back_and_forth() -> None:
    goes = back_and_forth(3)
    assert [next(goes) for _ in range(8)] == [0, 1, 2, 2, 1, 0, 0, 1]


def test_gaps_that_a_prefill_lies_beside_are_told_apart() -> None:
    def made(id: int, model: str, sent: float, times: list[float]) -> RequestRecord:
        return RequestRecord(
            id=id,
            model=model,
            at=sent,
            sent=sent,
            first_token=times[0],
            end=times[-1],
            prompt_tokens=8,
            output_tokens=len(times),
            token_times=times,
        )

    stream = made(0, "a", 0.0, [0.5, 1.0, 1.1, 1.2, 1.6, 1.7, 1.8])
    prompt = made(1, "b", 1.25, [1.55])
    after = made(2, "b", 9.0, [12.0])
    found = interference([stream, prompt, after])
    assert found.beside == pytest.approx(0.4)
    assert found.apart == pytest.approx(0.1)
    assert found.longest == pytest.approx(0.4)
    assert found.prefill == pytest.approx(0.3), "one that comes when it has ended does not count"
    assert found.ratio == pytest.approx(4.0)


def test_requests_of_the_warm_up_do_not_count() -> None:
    records = [record(int(WARM_UP) - 1), record(int(WARM_UP)), record(int(WARM_UP) + 1, "b")]
    report = Report.of(records, {"a": Slo(), "b": Slo(), "c": Slo(), "d": Slo()}, 10.0)
    found = mux_live.result_of(SETTING, report, 4.0)
    assert set(found.attainment) == {"a", "b"}
    assert found.preemptions == sum(r.preemptions for r in records[1:])
