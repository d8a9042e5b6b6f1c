"""What is on the screen, by what was read."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from ballast.cluster.kept_kv import KvReport, TierReport
from ballast.core.fleet import LeaseView
from ballast.core.settings import Slo
from ballast.dashboard.columns import rows
from ballast.dashboard.memory import pool
from ballast.dashboard.reader import Rates
from ballast.dashboard.view import Frame, draw, listed
from ballast.server.observe.latency import Quantiles
from ballast.server.observe.server_state import DeviceNow, ServerNow
from tests.dashboard.readings import present, reading, served

DECISIONS = [
    {"time": 990.0 + i, "action": "Evict", "model": f"m{i % 2}", "why": "came first"}
    for i in range(9)
]


def shown(
    now: ServerNow | None,
    width: int = 150,
    height: int | None = None,
    rates: Rates | None = None,
    trouble: str = "",
    pages: bool = False,
    styles: bool = False,
) -> list[str]:
    """Lines, as a terminal would have them."""
    colours = "truecolor" if styles else None
    console = Console(file=io.StringIO(), width=width, force_terminal=styles, color_system=colours)
    frame = Frame("http://here", now, rates or Rates(), trouble, 12.0, pages)
    console.print(draw(frame, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def line(lines: list[str], start: str) -> str:
    (found,) = (text for text in lines if text.startswith(start))
    return found


def fleet(count: int) -> ServerNow:
    """Some models, of which one in ten has requests, late ones among them."""
    models = [
        present(f"m{i}", "resident" if i % 10 == 9 else "absent", running=int(i % 10 == 9))
        for i in range(count)
    ]
    return reading(*models, decisions=DECISIONS)


def test_one_reading_lists_the_server_and_its_models() -> None:
    console = Console(file=io.StringIO(), width=80)
    now = reading(
        present("chat", "resident"), failed={"broken": "it is broken"}, decisions=DECISIONS
    )
    console.print(listed(now, "http://here", 80))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("ballast http://here  ● serving")
    assert lines[1].split()[:4] == ["model", "state", "run", "wait"]
    assert line(lines, "chat").split()[1:3] == ["●", "loaded"]
    assert lines[-1] == "✗ broken is not served: it is broken"
    assert "came first" not in console.file.getvalue()  # that is what `top` shows
    assert max(map(len, lines)) <= 80


def test_pages_of_the_pool_add_up() -> None:
    now = reading(
        present("a", weight_pages=20, kv_pages=30, cached_pages=10), free=35, reclaiming=5
    )
    parts = {name: pages for name, pages, _ in pool(now)}
    assert parts == {
        "weights": 20,
        "slots of layers": 0,
        "shared weights": 0,
        "KV": 20,
        "cached prefixes": 10,
        "activations": 10,
        "lent": 0,
        "reclaiming": 5,
        "free": 35,
    }
    lines = shown(now, 200)
    assert line(lines, "pool").endswith("400KiB, 100 pages")
    legend = lines[2]
    for result in ("weights 20 80KiB 20%", "KV 20", "activations 10", "reclaiming 5", "free 35"):
        assert result in legend
    assert "shared" not in legend
    assert "slots" not in legend
    assert "shared weights 7" in shown(reading(owners={"shared:abc": 7}))[2]


def test_layers_that_rotate_are_shown_once_some_have() -> None:
    whole = present("whole", weight_pages=12, layers=12, resident_layers=12)
    before = shown(reading(whole), 200)
    assert "layers" not in line(before, "model")
    turned = present(
        "turned",
        weight_pages=9,
        layers=12,
        resident_layers=8,
        rotating_layers=4,
        absent_layers=3,
        lent_pages=3,
        loads=40,
        stall_seconds=1.25,
    )
    owners = {"weights:turned": 8, "slots:turned": 1, "weights:whole": 12}
    now = reading(whole, turned, owners=owners, free=79)
    assert sum(pages for _, pages, _ in pool(now)) == now.total
    lines = shown(now, 200)
    assert "slots of layers 1 4KiB 1%" in lines[2]
    titles = line(lines, "model")
    at = titles.index("layers")
    assert line(lines, "turned")[at:].split()[:3] == ["9/12", "12KiB", "1.2s"]
    assert line(lines, "whole")[at:].split()[:3] == ["12/12", "0B", "-"]


def one_of(now: ServerNow, name: str, reason: str | None = None, total: int = 100) -> DeviceNow:
    """A device with everything of a reading, in `total` pages."""
    return DeviceNow(
        device=name,
        status="ok" if reason is None else "restarting",
        reason=reason,
        restarts=0,
        open=0,
        page_bytes=now.page_bytes,
        total=total,
        free=now.free,
        reclaiming=now.reclaiming,
        owners=now.owners,
        jobs=0,
        models=[m.report for m in now.models],
        failed={},
    )


def test_each_of_several_devices_has_a_bar_and_models_say_where_they_are() -> None:
    model = msgspec.structs.replace(present("a", weight_pages=20), devices=["cpu:0", "cpu:1"])
    now = reading(model)
    alone = shown(msgspec.structs.replace(now, devices=[one_of(now, "cpu:0")]))
    assert alone == shown(now)
    devices = [one_of(now, "cpu:0"), one_of(now, "cpu:1", "it died", total=200)]
    lines = shown(msgspec.structs.replace(now, devices=devices))
    assert lines[1] == "cpu:1: it died"
    assert line(lines, "cpu:0 ").endswith("400KiB, 100 pages")
    assert line(lines, "cpu:1 ").endswith("800KiB, 200 pages")
    assert not [text for text in lines if text.startswith("pool")]
    assert "cpu:0, cpu:1" in line(lines, "a ")
    assert "device" in line(lines, "model")
    assert {name: pages for name, pages, _ in pool(devices[0])}["weights"] == 20


def test_what_devices_lend_each_other_is_listed_with_the_reason() -> None:
    leases = [LeaseView("cpu:0", "cpu:1", 1, 0, "by an operator", True)]
    leases += [LeaseView("cpu:1", "cpu:0", 30, 5, "cpu:0 lacks 30 pages, cpu:1 can spare 90")]
    lines = [text for text in shown(reading(leases=leases)) if text.startswith("lent ")]
    assert lines[0].split(None, 1)[1] == (
        "cpu:1 to cpu:0: 30 pages, 5 recalled   cpu:0 lacks 30 pages, cpu:1 can spare 90"
    )
    assert lines[1].split(None, 1)[1] == "cpu:0 to cpu:1: 1 page   by an operator"


def test_a_model_has_a_row_and_so_have_its_adapters() -> None:
    late = Quantiles(9, 0.05, 3.0)
    names = [served("base", 10, late, Slo(ttft=1.0)), served("lora", 3)]
    now = reading(
        present(
            "base",
            pinned=True,
            names=names,
            weight_pages=16,
            kv_pages=8,
            running=3,
            waiting=2,
            evictions=4,
        ),
        present("other", "activating"),
        failed={"bad": "no such file"},
    )
    lines = shown(now)
    row = line(lines, "base").split()
    assert row[:8] == ["base", "●", "loaded", "pin", "3", "2", "-", "64KiB"]
    assert row[8:14] == ["32KiB", "0B", "50ms", "3.0s", "-", "-"]
    assert line(lines, "└ lora").split()[-1] == "-"
    assert "◐ loading" in line(lines, "other")
    assert "✗ failed" in line(lines, "bad")
    assert "bad is not served: no such file" in line(lines, "✗")
    assert line(shown(now, pages=True), "base").split()[7:9] == ["16", "8"]
    coloured = "\n".join(shown(now, styles=True))
    assert "\x1b[31m    3.0s" in coloured or "\x1b[31m3.0s" in coloured, "a missed level is red"


def test_columns_go_where_there_is_no_room_and_the_important_ones_last() -> None:
    now = reading(present("a-model-with-a-long-name", running=1))
    wide, narrow, least = (shown(now, width) for width in (200, 80, 40))
    assert "preemptions" in line(wide, "model")
    assert "preemptions" not in line(narrow, "model")
    assert "TTFT p99" in line(narrow, "model")
    assert line(least, "model").split()[:3] == ["model", "state", "run"]
    assert "…" in line(least, "a-model")


@pytest.mark.parametrize("width", [1, 20, 60, 200])
@pytest.mark.parametrize("height", [1, 10, 16, 24, 60])
def test_no_screen_is_too_small(width: int, height: int) -> None:
    lines = shown(fleet(40), width, height)
    assert all(len(text) <= width for text in lines)
    if height >= 16 and width >= 60:
        assert len(lines) <= height
        assert lines[-1].startswith("q quit")
        assert any("ago" in text for text in lines)


def test_busy_models_come_before_idle_ones() -> None:
    found, left_out = rows(fleet(30), 4)
    assert [row.name for row in found] == ["m9", "m19", "m29"]
    assert left_out == ["evicted"] * 27
    assert "and 25 more (25 evicted)" in shown(fleet(30), 100, 16)
    everything, none = rows(fleet(30), None)
    assert (len(everything), none) == (30, [])


def test_the_newest_decisions_come_first() -> None:
    lines = shown(reading(present("m0"), present("m1"), decisions=DECISIONS))
    first = lines[lines.index("decisions") + 1]
    assert first.split() == ["2s", "ago", "evict", "m0", "came", "first"]


def test_a_server_that_cannot_be_read_is_said_and_how_old_the_rest_is() -> None:
    assert shown(None, trouble="it is gone") == ["ballast http://here", "✗ it is gone"]
    lines = shown(reading(present("a")), trouble="it is gone")
    assert lines[1] == "✗ it is gone; what follows is 12s old"
    assert "serving" not in lines[0]
    assert line(lines, "a ")


def test_a_worker_that_is_gone_is_said() -> None:
    now = reading(present("a"), status="restarting", reason="it was killed", restarts=2, open=5)
    lines = shown(now)
    assert "the worker restarts" in lines[0]
    assert "2 worker restarts" in lines[0]
    assert lines[1] == "it was killed; 5 open requests"


def test_tokens_per_second_are_drawn_once_there_were_some() -> None:
    rates = Rates()
    for uptime, tokens in ((1.0, 0), (2.0, 5), (3.0, 25)):
        now = reading(present("a", names=[served("a", tokens)]), uptime=uptime)
        rates.add(now)
    assert line(shown(now, rates=rates), "requests").endswith("20.0 tokens/s  ▃█")


def test_kept_kv_is_said_by_tier_and_what_is_staged() -> None:
    model = present("a", weight_pages=20, staged_blocks=3, staged_bytes=3 << 20)
    now = reading(model)
    assert "staged 3MiB" in line(shown(now), "kept KV")
    device = msgspec.structs.replace(one_of(now, "cpu:0"), fetched_tokens={"host": 96})
    tiers = [TierReport("host", 4 << 30, 1 << 30, 9, {}), TierReport("disk", 8 << 30, 0, 0, {})]
    kept = msgspec.structs.replace(now, devices=[device], kv=KvReport(tiers, {}, ""))
    found = line(shown(kept), "kept KV")
    assert "host 1GiB of 4GiB, 96 tokens fetched" in found
    assert "disk 0B of 8GiB, 0 tokens fetched" in found
