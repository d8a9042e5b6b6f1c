"""What pictures of runs show, the PNG and the page, which a browser draws where there is one."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from ballast.bench import palette
from ballast.bench.page import page
from ballast.bench.page_data import page_data
from ballast.bench.plot import figure_of, plot
from ballast.bench.report import Report
from ballast.bench.timeline import Timeline, marks_of, stacked
from ballast.bench.verdict import best_of, slos_text, title_of, verdict
from ballast.core.errors import ConfigError
from ballast.core.settings import Slo
from ballast.core.units import MiB
from tests.bench.picture_reports import BUDGET, MODELS, SLOS, report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


def three() -> list[Report]:
    return [report("static", late=9, failed=3), report("swap", late=3), report("balloon")]


def four() -> list[Report]:
    """With names as the demo's, which are long."""
    return [*three()[:2], report("balloon, live"), report("mirage, virtual", late=1)]


# -- words ----------------------------------------------------------------------------------------


def test_the_verdict_is_who_served_most_and_by_how_much() -> None:
    text = verdict(three())
    assert text.startswith(
        "balloon serves 100.0 % of 60 requests within service levels, "
        "5.0 points or 3 requests more than swap (95.0 %) and "
        "20.0 points or 12 requests more than static (80.0 %)."
    )
    assert text.endswith(" Requests that failed: 3 under static.")
    answered = [report("static", late=9), report("balloon")]
    late = "P99 of the time to the first token: balloon 250 ms, static 2.5 s."
    assert verdict(answered).endswith(late), "that of answered requests says most where all are"
    assert best_of(three()) == {"balloon"}


def test_equal_runs_have_no_winner() -> None:
    same = [report("swap", late=3), report("balloon", late=3)]
    assert verdict(same).startswith("No difference: swap and balloon each serve 95.0 % of 60")
    assert best_of(same) == frozenset()
    tied = [*same, report("static", late=4)]
    assert "swap and balloon each serve 95.0 %" in verdict(tied)
    assert "1.7 points or 1 request more than static (93.3 %)" in verdict(tied)
    assert best_of(tied) == {"swap", "balloon"}


def test_a_single_run_names_its_worst_model() -> None:
    text = verdict([report("balloon", late=1)])
    assert text == (
        "balloon serves 98.3 % of 60 requests within service levels; least of model-9, 83.3 %."
    )
    assert verdict([report("balloon")]).endswith("the same share of every model's.")


def test_names_with_commas_do_not_divide_a_list() -> None:
    live = [report(f"{name}, live", late=n) for n, name in enumerate(("balloon", "swap"))]
    assert verdict(live).startswith("balloon serves 100.0 % of 60 requests")
    assert "1 request more than swap (98.3 %)" in verdict(live)
    both = [*live, report("balloon, virtual")]
    assert verdict(both).startswith("“balloon, live” and “balloon, virtual” each serve 100.0 %")


def test_service_levels_and_budget_in_words() -> None:
    assert slos_text(SLOS) == "first token within 1 s, then at most 100 ms per token"
    two = {"a": Slo(ttft=0.5, tpot=0.1), "b": Slo(ttft=2.0, tpot=0.1)}
    assert (
        slos_text(two)
        == "first token within 500 ms to 2 s, then at most 100 ms per token, by model"
    )
    assert title_of(three()) == "10 models in 128MiB on 2 devices"


# -- what is drawn --------------------------------------------------------------------------------


def test_stacks_are_weights_from_below_and_kv_from_above() -> None:
    line = Timeline.of(report("balloon"), MODELS)
    assert line.budget == 2 * BUDGET * MiB
    assert [b.use for b in line.below] == ["activations", *["weights"] * 10]
    assert {b.use for b in line.above} == {"kv", "cached"}
    assert [b.model for b in line.below[1:]] == list(MODELS)
    held = stacked(line.below)[-1][1] + stacked(line.above)[-1][1]
    free = [s.owners["free"] for s in report("balloon").memory]
    free.append(free[-1])
    assert line.at[-1] == report("balloon").wall_seconds, "the last sample holds until the end"
    assert np.array_equal(held + free, np.full(line.at.size, line.budget))
    assert line.waiting[6] == 2 * 600


def test_marks_are_decisions_that_were_done_and_requests_that_failed() -> None:
    marks = marks_of(report("static", late=9, failed=3))
    assert {kind: len(times) for kind, times in marks.items()} == {
        "activations": 1, "evictions": 1, "preemptions": 1, "refused requests": 3,
    }  # fmt: skip
    assert marks["evictions"] == (12.0,)


def texts(figure: Figure) -> list[str]:
    found = [t.get_text() for t in figure.texts]
    return found + [t.get_text() for axes in figure.axes for t in axes.texts]


def test_the_png_has_a_panel_for_each_preset_on_the_same_axes(tmp_path: Path) -> None:
    figure = figure_of(three())
    memory, marks, queue = (figure.axes[i::3] for i in range(3))
    for axes in (memory, marks, queue):
        assert len(axes) == 3
        assert len({(a.get_xlim(), a.get_ylim()) for a in axes}) == 1
    shown = texts(figure)
    for text in ("static", "80.0 %", "swap", "95.0 %", "balloon", "100.0 %", "bursty, made up"):
        assert text in shown
    assert "10 models in 128MiB on 2 devices" in shown
    assert verdict(three()) in " ".join(shown).replace("\N{NO-BREAK SPACE}", " ")
    assert [t.get_text() for t in marks[0].get_yticklabels()] == list(palette.MARKS)
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == [
        "activations", "weights", "KV of open requests", "cached prefixes", "free",
    ]  # fmt: skip
    plot(three(), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_no_text_of_the_png_runs_into_another(tmp_path: Path) -> None:
    """Of the header and the large figures, with four panels in a row, the narrowest there are."""
    reports = [
        report(f"{name}, live", late=n) for n, name in enumerate(("static", "swap", "b", "c"))
    ]
    figure = figure_of(reports)
    boxes = [(t.get_text(), t.get_window_extent()) for t in figure.texts]
    for (a, one), (b, other) in itertools.combinations(boxes, 2):
        assert not one.padded(-1).overlaps(other.padded(-1)), (a, b)
    assert all(box.x1 <= figure.bbox.x1 and box.x0 >= 0 for _, box in boxes)


def test_presets_beyond_four_begin_a_new_row() -> None:
    figure = figure_of([report(f"p{n}") for n in range(5)])
    tops = [round(a.get_position().y1, 3) for a in figure.axes[::3]]
    assert len(set(tops[:3])) == len(set(tops[3:])) == 1
    assert tops[3] < tops[0]


def test_a_run_without_memory_is_drawn_without_panels() -> None:
    bare = Report.of(report("x").records, SLOS, 30.0, name="x")
    assert figure_of([bare]).axes == []
    with pytest.raises(ConfigError, match="at least one"):
        figure_of([])


# -- colours --------------------------------------------------------------------------------------

_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_SEEN = {
    "normal": np.eye(3),
    # Machado, Oliveira, Fernandes 2009, severity 1.0, on linear RGB.
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
         [0.004733, 0.691367, 0.303900]]
    ),
}  # fmt: skip


def lab(colour: str, eye: str) -> Any:
    """CIE L*a*b* (D65) of a colour as an eye sees it."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = _TO_XYZ @ np.clip(_SEEN[eye] @ linear, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def nearest(colours: list[str], eye: str) -> float:
    """The smallest difference (CIE76) of any two."""
    seen = [lab(c, eye) for c in colours]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize("eye", _SEEN)
def test_colours_differ_for_every_eye(eye: str) -> None:
    """2.3 is just noticeable; less than 4.5 apart, two areas are hard to tell."""
    ten = [palette.colour_of(i) for i in range(10)]
    assert len(set(ten)) == 10
    assert nearest(ten, eye) > 4.5
    uses = [palette.USES[use] for use in ("weights", "kv", "cached", "activations", "free")]
    assert nearest(uses, eye) > 20


# -- the page -------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else_and_says_the_same_again() -> None:
    drawn = page("ten <models>", ["bursty & made up"], three())
    assert drawn == page("ten <models>", ["bursty & made up"], three())
    assert "ten &lt;models&gt;" in drawn
    assert "bursty &amp; made up" in drawn
    assert html.escape(verdict(three())) in drawn.replace("\N{NO-BREAK SPACE}", " ")
    for outside in ("<link", "src=", "url(", "@import", "fetch(", "import("):
        assert outside not in drawn
    assert drawn.count("</script>") == 2, "text of the data ends no script"
    without_namespace = drawn.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in without_namespace


def test_data_of_a_page_adds_up() -> None:
    data = page_data("t", three())
    assert [m["name"] for m in data["models"]] == list(MODELS)
    assert data["devices"] == ["cpu:0", "cpu:1"]
    for run, result in zip(data["runs"], three(), strict=True):
        for name, own in run["devices"].items():
            assert own["budget"] == BUDGET
            held = np.sum([values for _, _, values in own["bands"]], axis=0)
            free = [s.devices[name].owners["free"] / MiB for s in result.memory]
            assert np.allclose(held + free, BUDGET, atol=0.05)
    static = data["runs"][0]
    assert [m["at"] for m in static["marks"]] == sorted(m["at"] for m in static["marks"])
    assert sum(m["kind"] == "refused requests" for m in static["marks"]) == 3
    assert next(m for m in static["marks"] if m["refused"])["action"] == "Evict"
    assert static["ttft"][-1][1] == 57 / 60, "the failed ones are below no time"
    assert data["levels"] == {"ttft": [1.0], "tpot": [0.1]}


_LISTEN = """<script>
window.faults = [];
addEventListener("error", (event) => faults.push(event.message));
console.error = (...words) => faults.push(words.join(" "));
</script>"""
_LOOK = """<script>
{
const all = (what) => [...document.querySelectorAll(what)];
const root = document.documentElement;
const seen = { width: innerWidth, overflow: root.scrollWidth - root.clientWidth };
const size = (e) => e.getBoundingClientRect();
seen.panels = all("#panels svg").map((e) => Math.round(size(e).width));
seen.outside = all("#panels text, #latencies text").filter((t) => {
  const text = size(t), svg = size(t.closest("svg"));
  return text.left < svg.left - 1 || text.right > svg.right + 1;
}).map((t) => t.textContent);
seen.crossing = all("#panels svg").flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")], boxes = texts.map(size);
  return boxes.flatMap((a, i) => boxes.slice(i + 1).map((b, n) => [a, b, i, i + 1 + n]))
    .filter(([a, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
    .map(([, , i, n]) => [texts[i].textContent, texts[n].textContent]);
});
const cut = (e) => e.scrollWidth > e.clientWidth && getComputedStyle(e).overflowX === "visible";
seen.cut = all(".card, .card *, h3, p").filter(cut).map((e) => e.textContent);
seen.bands = all("#panels svg .band").length;
seen.marks = all("#panels svg .marks").slice(0, 5).map((m) => m.getAttribute("d").length > 0);
seen.legend = document.getElementById("legend").innerText;
seen.small = all("#models svg").length;
seen.latencies = all("#latencies svg[height='220']").map((e) => Math.round(size(e).height));
seen.curves = all("#latencies .curve").length;
seen.text = Math.min(...all("#panels text").map((t) => parseFloat(getComputedStyle(t).fontSize)));
const svg = all("#panels svg")[0], box = size(svg);
const point = { clientX: box.left + 114 + (12.1 / 32) * (box.width - 148), clientY: box.top + 90 };
svg.dispatchEvent(new PointerEvent("pointermove", point));
seen.tip = tip.innerText;
seen.shown = getComputedStyle(tip).visibility;
seen.cursors = all(".cursor").filter((c) => c.style.visibility === "visible").length;
seen.tipOutside = size(tip).right > root.clientWidth || size(tip).left < 0;
const turn = (id, value) => {
  const select = document.getElementById(id);
  select.value = value;
  select.dispatchEvent(new Event("change"));
};
turn("view", "model");
seen.colours = new Set(all("#panels .weights").map((p) => p.getAttribute("fill"))).size;
seen.named = document.getElementById("legend").innerText;
turn("device", "cpu:1");
seen.bandsOfOne = all("#panels svg .band").length;
seen.faults = faults;
root.dataset.seen = JSON.stringify(seen);
}
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to draw the page")
@pytest.mark.parametrize("width", [600, 1400])
def test_a_browser_draws_the_page(width: int, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    drawn = page("ten models", ["bursty, made up"], four())
    file = tmp_path / "page.html"
    file.write_text(
        drawn.replace("<head>", "<head>" + _LISTEN).replace("</body>", _LOOK + "</body>")
    )
    dom = subprocess.run(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=240,
    ).stdout  # fmt: skip
    found = re.search(r'data-seen="([^"]*)"', dom)
    assert found is not None, "the scripts have not run to their end"
    seen = json.loads(html.unescape(found[1]))
    assert seen["faults"] == []
    assert (seen["width"], seen["overflow"]) == (width, 0)
    assert len(seen["panels"]) == 4
    assert all(width - 80 < panel < width for panel in seen["panels"]) or width == 1400
    assert seen["outside"] == [], "text that a picture cuts off"
    assert seen["crossing"] == [], "text over text"
    assert seen["cut"] == [], "text that leaves its box"
    assert seen["text"] >= 11
    assert seen["bands"] == 4 * (1 + 10 + 10 + 6)
    assert seen["marks"] == [True] * 5
    assert "cached prefixes" in seen["legend"]
    assert (seen["small"], seen["curves"]) == (4 * 10, 2 * 4)
    assert seen["latencies"] == [220, 220], "drawn for the width that they have"

    # At 12.1 s: the values of the sample at 12 s, and the eviction of that time.
    (sample,) = (s for s in three()[0].memory if s.at == 12.0)
    weights = round(sample.uses["weights"] / MiB)
    assert (seen["shown"], seen["cursors"], seen["tipOutside"]) == ("visible", 4, False)
    assert "static at 12.1 s" in seen["tip"]
    assert f"{weights} MiB ({round(100 * weights / 128)} %)" in seen["tip"]
    assert "Evict model-2 on cpu:0: idle for 8 s" in seen["tip"]

    assert seen["colours"] == 10
    assert all(model in seen["named"] for model in MODELS)
    assert seen["bandsOfOne"] == 4 * (1 + 5 + 5 + 3)
