"""Names of metrics are those that Prometheus wants; the older ones can still be had."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from ballast.cluster.combined_report import combined
from ballast.core.report import STEP_BOUNDS, StepTokens
from ballast.server.observe.latency import Timing
from ballast.server.observe.metric_names import older_name
from tests.cluster.fake_device import spec
from tests.server.observe.test_metrics import Facts, Scraped, device, model
from tests.server.process import ServerProcess

ENDINGS = ("_bucket", "_count", "_sum")
ABBREVIATED = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "milliseconds", "minutes"}


def families(text: str) -> Iterator[Metric]:
    yield from text_string_to_metric_families(text)


def complaints(text: str) -> Iterator[str]:
    """What `promtool check metrics` says (promlint), as far as it concerns names and help."""
    kinds: dict[str, str] = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helps: dict[str, str] = dict(re.findall(r"^# HELP (\S+) ?(.*)$", text, re.MULTILINE))
    for name, kind in kinds.items():
        if not helps.get(name):
            yield f"{name}: no help text"
        if ":" in name:
            yield f"{name}: colons are for recording rules"
        if re.search(r"[a-z][A-Z]", name):
            yield f"{name}: camel case"
        if (kind == "counter") != name.endswith("_total"):
            yield f"{name}: counters, and they alone, end in _total"
        if kind not in ("histogram", "summary") and name.endswith(ENDINGS):
            yield f"{name}: ends as a part of a histogram does"
        if kind in name.split("_"):
            yield f"{name}: names its type"
        if ABBREVIATED & set(name.split("_")):
            yield f"{name}: an abbreviated unit, or no base unit"


def everything() -> Scraped:
    """With every metric that there is."""
    counts = [1] * (len(STEP_BOUNDS) + 1)
    of = replace(model("a"), steps=StepTokens(tuple(counts), 1000))
    found = Scraped(Facts(combined([device(of, weights_a=4), device(of, weights_a=4)]), spec("a")))
    found.metrics.asked("a", 1, 8)
    timing = Timing(found.clock.now())
    for _ in range(3):
        found.metrics.token("a", timing, 4, found.clock.now(), 0.0)
    found.metrics.finished("a", timing, 4, 3, "stop", found.clock.now())
    found.metrics.failed("a", "poison")
    found.metrics.answered("/v1/models", "GET", 404, "not_found", 0.1)
    return found


def test_the_checker_complains_as_promtool_does() -> None:
    text = (
        "# HELP a:b x\n# TYPE a:b gauge\na:b 1\n# TYPE c_total histogram\n"
        "# HELP d x\n# TYPE d counter\n# HELP e_count x\n# TYPE e_count gauge\n"
        "# HELP f_ms x\n# TYPE f_ms gauge\n# HELP gH x\n# TYPE gH gauge\n"
    )
    assert {c.split(":")[0] for c in complaints(text)} == {
        "a",
        "c_total",
        "d",
        "e_count",
        "f_ms",
        "gH",
    }


def test_names_are_those_that_prometheus_wants() -> None:
    text = everything().metrics.text().decode()
    assert list(complaints(text)) == []
    assert len(list(families(text))) > 60


def test_promtool_finds_nothing_in_a_servers_metrics(echo: ServerProcess) -> None:
    echo.client.completions.create(model="wren-mini", prompt="A ship", max_tokens=3)
    text = echo.http.get("/metrics").text
    assert list(complaints(text)) == []
    promtool = shutil.which("promtool")
    if promtool is None:
        return  # the same rules have just been tried
    checked = subprocess.run(
        (promtool, "check", "metrics"), input=text, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_older_names_are_there_on_request_with_the_same_values_and_a_warning() -> None:
    found = everything()
    now = {f.name: f for f in families(found.metrics.text().decode())}
    both = {f.name: f for f in families(found.metrics.text(deprecated=True).decode())}
    assert not any(":" in name for name in now)
    older = {name: f for name, f in both.items() if ":" in name}
    assert {older_name(n) for n in now if n.startswith(("vllm_", "ballast_"))} == older.keys()
    assert {n: f for n, f in both.items() if n not in older}.keys() == now.keys()
    for name in now:
        before = older.get(older_name(name))
        if before is None:
            continue
        assert before.documentation.startswith(f"Deprecated: use {name}.")
        values = [(s.labels, s.value) for s in now[name].samples]
        assert [(s.labels, s.value) for s in before.samples] == values


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("vllm_num_requests_running", "vllm:num_requests_running"),
        ("ballast_worker_up", "ballast:worker_up"),
        ("vllm_iteration_tokens", "vllm:iteration_tokens_total"),
    ],
)
def test_older_names_are_what_they_were(name: str, before: str) -> None:
    assert older_name(name) == before


def test_a_scrape_may_ask_for_older_names(echo: ServerProcess) -> None:
    plain = echo.http.get("/metrics").text
    asked = echo.http.get("/metrics", params={"deprecated": "true"}).text
    assert "ballast:worker_up" not in plain
    assert "# HELP ballast:worker_up Deprecated: use ballast_worker_up." in asked
