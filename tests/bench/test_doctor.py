"""The doctor: right about a healthy machine, and about each ailment we can bring about."""

from __future__ import annotations

import io
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ballast.bench import doctor_fleet, doctor_machine, doctor_memory
from ballast.bench.doctor import examine, table
from ballast.bench.doctor_finding import Finding, Verdict
from ballast.bench.inprocess import InProcess
from ballast.bench.run import specs_of
from ballast.core.request import Submission
from ballast.core.units import GiB, KiB, MiB, ceil_div, format_bytes
from ballast.engine.sizing import largest_jobs
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.make import MadeFleet, make_fleet
from ballast.kernels.choice_file import VARIABLE, ChoiceFile, KernelChoice
from ballast.kv.layout import Layout
from ballast.live.inbox import MonotonicClock
from ballast.memory.host_memory import available


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeFleet:
    directory = tmp_path_factory.mktemp("fleet")
    return make_fleet(directory, n_models=2, size="tiny", steps=0, budget="32MiB")


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_this_machine_can_run_ballast() -> None:
    findings = list(examine(None, MonotonicClock()))
    failed = [f for f in findings if f.verdict is Verdict.FAIL]
    assert failed == []
    assert {"python", "torch", "memory", "mappings", "pages", "memory speed"} <= set(
        by_check(findings)
    )
    assert all(f.cure for f in findings if f.verdict is not Verdict.OK)


def test_a_budget_beyond_the_machine_fails() -> None:
    left, _ = available()
    assert doctor_memory.room(left // 2, "it").verdict is Verdict.OK
    assert doctor_memory.room(left - MiB, "it").verdict is not Verdict.OK
    finding = doctor_memory.room(100 * left, "it")
    assert finding.verdict is Verdict.FAIL
    assert "budget" in finding.cure


def test_too_many_small_pages_are_warned_of() -> None:
    assert doctor_memory.mappings(512 * MiB, 256 * KiB).verdict is Verdict.OK
    finding = doctor_memory.mappings(64 * GiB, 4 * KiB)
    assert finding.verdict is Verdict.WARN
    assert "vm.max_map_count=" in finding.cure


def test_a_bound_on_addresses_fails() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 46, hard))
        finding = by_check(list(doctor_machine.limits()))["addresses"]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert finding.verdict is Verdict.FAIL
    assert "ulimit -v unlimited" in finding.cure


def test_kernels_that_were_chosen_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(doctor_machine.kernels()) == []
    monkeypatch.setenv(VARIABLE, str(tmp_path / "choices.json"))
    assert list(doctor_machine.kernels()) == []
    file = ChoiceFile(tmp_path / "choices.json")
    for shape, rows in (
        ("bfloat16 64x64", 8),
        ("bfloat16 128x64 gated", 32),
        ("float32 1x1", None),
    ):
        file.keep(shape, KernelChoice(from_rows=rows, ratios={}))
    file.keep("bfloat16 640x64", KernelChoice(from_rows=None, ratios={}))
    (finding,) = doctor_machine.kernels()
    assert finding.verdict is Verdict.OK
    result = "bfloat16 by oneDNN from 8 to 32 rows on, 2 of 3 shapes; float32 by ours"
    assert finding.found.endswith(f" threads: {result}")


def test_a_fleet_that_fits(made: MadeFleet) -> None:
    fleet = load_fleet(made.file, presets=("ballast",), environ={})
    found = by_check(list(examine(fleet, MonotonicClock())))
    assert found["atlas-chat"].verdict is Verdict.OK
    assert "tokens if alone" in found["wren-mini"].found
    assert found["budget"].verdict is Verdict.OK


def test_activations_are_what_a_server_sets_aside(made: MadeFleet) -> None:
    """And what a run in virtual time has, beside one that is live."""
    fleet = load_fleet(made.file, presets=("ballast",), environ={})
    found = by_check(list(doctor_fleet.fleet(fleet)))["budget"].found
    with InProcess(fleet) as server:
        aside = largest_jobs(server.device.specs.values(), server.device.state.settings)
        assert server.device.state.arena.pages == ceil_div(aside, fleet.device.page_bytes)
        assert specs_of(fleet) == [*server.device.specs.values()]
    assert f"{format_bytes(aside)} for activations" in found


def test_each_device_is_judged_by_its_own_models(made: MadeFleet) -> None:
    fleet = load_fleet(made.file, presets=("ballast",), environ={})
    a, b = fleet.models
    small = replace(fleet.device, name="small", budget_bytes=made.models[1].weight_bytes)
    both = replace(
        fleet,
        models=(replace(a, devices=("cpu:0", "small")), replace(b, devices=("small",))),
        others=(small,),
        other_links=(fleet.link,),
    )
    found = by_check(list(examine(both, MonotonicClock())))
    assert found["atlas-chat on cpu:0"].verdict is Verdict.OK
    assert found["wren-mini on small"].verdict is Verdict.FAIL
    assert "`devices[1].budget`" in found["wren-mini on small"].cure
    assert {"budget on cpu:0", "budget on small"} <= set(found)
    assert found["lending"].found == "2 of 2 ways between devices"
    other = replace(both, others=(replace(small, page_bytes=128 * KiB),))
    unlike = by_check(list(examine(other, MonotonicClock())))["lending"]
    assert unlike.verdict is Verdict.OK
    assert "small cannot to cpu:0: their pages differ: 128KiB and 64KiB" in unlike.found
    assert not {"wren-mini on cpu:0", "wren-mini", "budget"} & set(found)


def test_a_gpu_that_uses_what_none_has_run_is_warned_of(made: MadeFleet) -> None:
    fleet = load_fleet(made.file, presets=("ballast",), environ={})
    gpu = replace(fleet.device, name="cuda:0", budget_bytes=1 << 30, page_bytes=2 << 20)
    assert "never run" not in by_check(list(doctor_fleet.fleet(replace(fleet, device=gpu))))
    lanes = replace(fleet, device=replace(gpu, lanes=2))
    assert "never run" not in by_check(list(doctor_fleet.fleet(lanes)))
    staged = replace(fleet, device=gpu, preset="swiftcache")
    found = by_check(list(doctor_fleet.fleet(staged)))["never run"]
    assert found.verdict is Verdict.WARN
    assert "KV blocks staged" in found.found


def test_a_group_is_judged_by_what_each_rank_has(made: MadeFleet) -> None:
    fleet = load_fleet(made.file, presets=("ballast",), environ={})
    device = replace(fleet.device, tensor_parallel=2, budget_bytes=1 * GiB)
    found = by_check(list(doctor_fleet.fleet(replace(fleet, device=device))))
    assert found["atlas-chat, on each rank"].verdict is Verdict.OK
    assert found["budget, on each rank"].found.startswith("512MiB")
    assert "3 heads" in found["wren-mini"].found


def test_a_damaged_checkpoint_fails_and_the_rest_is_still_checked(
    made: MadeFleet, tmp_path: Path
) -> None:
    text = made.file.read_text().replace("path: atlas-chat", f"path: {tmp_path / 'bad'}")
    (tmp_path / "bad").mkdir()
    for file in made.models[0].path.iterdir():
        content = file.read_bytes()
        cut = content[: len(content) // 2] if file.suffix == ".safetensors" else content
        (tmp_path / "bad" / file.name).write_bytes(cut)
    broken = made.file.with_name("broken.yaml")
    broken.write_text(text)
    fleet = load_fleet(broken, presets=("ballast",), environ={})
    found = by_check(list(examine(fleet, MonotonicClock())))
    assert found["atlas-chat"].verdict is Verdict.FAIL
    assert "model.safetensors" in found["atlas-chat"].found
    assert found["wren-mini"].verdict is Verdict.OK


def test_a_budget_too_small_for_a_full_request_is_warned_of_with_the_one_it_needs(
    made: MadeFleet,
) -> None:
    def chat(budget: str) -> Finding:
        fleet = load_fleet(made.file, presets=("ballast",), environ={"BALLAST_BUDGET": budget})
        return by_check(list(examine(fleet, MonotonicClock())))["atlas-chat"]

    needed = made.models[0].weight_bytes
    finding = chat(str(needed + 64 * KiB))
    assert finding.verdict is Verdict.FAIL
    assert "atlas-chat needs a device of at least" in finding.found
    assert "needs a budget of" in finding.cure
    assert chat(finding.cure.split("budget of ")[1].split(";")[0]).verdict is Verdict.OK


def test_a_context_beyond_the_models_own_is_warned_of(made: MadeFleet) -> None:
    fleet = load_fleet(made.file, presets=("ballast",), environ={})
    chat = next(m for m in fleet.models if m.name == "atlas-chat")
    others = tuple(m for m in fleet.models if m is not chat)
    asked = replace(fleet, models=(replace(chat, max_model_len=10**6), *others))
    beyond = "limits.context of 1000000 is beyond the model's own context"
    (finding,) = (f for f in examine(asked, MonotonicClock()) if f.found.startswith(beyond))
    assert (finding.check, finding.verdict) == ("atlas-chat", Verdict.WARN)


def test_blocks_that_fit_no_page_are_warned_of_where_kv_is_staged(
    made: MadeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = load_fleet(made.file, presets=("ballast",), environ={})
    device = replace(fleet.device, page_bytes=64 * KiB)
    fleet = replace(fleet, preset="kvswap", device=device)
    chat = next(m for m in fleet.models if m.name == "atlas-chat")
    with InProcess(replace(fleet, models=(chat,))) as server:
        kv = server.device.state.models[chat.name].kv
        spec, page = kv.spec, device.page_bytes
        layouts = {n: Layout.of(replace(spec, block_tokens=n), page) for n in range(16, 512)}
    divided = next(n for n, layout in layouts.items() if layout.slab_pages > 1)
    for tokens in (None, divided):
        asked = replace(fleet, models=(replace(chat, block_tokens=tokens),))
        found = [f for f in doctor_fleet.fleet(asked) if "fit no page" in f.found]
        assert [f.verdict for f in found] == [Verdict.WARN] * (tokens == divided)
        caplog.clear()
        with InProcess(asked) as server:
            kv = server.device.state.models[chat.name].kv
            assert kv.in_window is not bool(found)
            assert bool(kv.staged.most) is not bool(found)
        assert caplog.messages == [f"{chat.name}: {f.found}" for f in found]


def test_the_doctor_and_a_server_refuse_the_same_models(made: MadeFleet) -> None:
    fleet = load_fleet(made.file, presets=("ballast",), environ={})
    small = replace(fleet.device, budget_bytes=made.models[0].weight_bytes)
    found = by_check(list(doctor_fleet.fleet(replace(fleet, device=small))))["atlas-chat"]
    assert found.verdict is Verdict.FAIL
    least = re.search(r"atlas-chat needs a device of at least (\d+)KiB", found.found)
    assert least is not None
    tight = replace(fleet.device, budget_bytes=int(least[1]) * KiB)
    for short, refused in ((0, set()), (64 * KiB, {"atlas-chat"})):
        device = replace(tight, budget_bytes=tight.budget_bytes - short)
        verdicts = by_check(list(doctor_fleet.fleet(replace(fleet, device=device))))
        assert {n for n, f in verdicts.items() if f.verdict is Verdict.FAIL} == refused
        with InProcess(replace(fleet, device=device)) as server:
            assert server.device.failed.keys() == refused
            for name in refused:
                assert server.device.failed[name] == verdicts[name].found
            for name in server.device.specs:
                asked = Submission(id=name, model=name, prompt=(1, 2), max_tokens=2)
                assert server.generate([asked])[name].finished.reason == "length"
            server.drain()
            server.device.state.pool.validate()
            for m in server.device.state.models.values():
                m.weights.validate()
                m.kv.validate([])


def test_the_table_shows_cures_and_takes_brackets_literally() -> None:
    out = io.StringIO()
    finding = Finding("x", Verdict.FAIL, "found [red]this[/red]", "set devices[0].page")
    Console(file=out, width=100).print(table([finding]))
    assert "found [red]this[/red]" in out.getvalue()
    assert "-> set devices[0].page" in out.getvalue()
