"""The dashboard in `deploy/grafana` asks for metrics and labels that a server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.server.process import ServerProcess
from tests.server.test_api import MODEL

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "ballast.json"
METRIC = re.compile(r"\b(?:vllm_|ballast_|http_|process_)\w+")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
OF_A_SCRAPE = {"instance", "job"}
"""Labels that Prometheus adds."""
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries(of: dict[str, Any]) -> Iterator[str]:
    """The expressions of all panels and variables."""
    for panel in of["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in of["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def exported(text: str) -> dict[str, set[str]]:
    """Labels by the name of a series; of a histogram or counter without samples, none."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for suffix in SUFFIXES[family.type]:
            found[family.name + suffix] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_query_is_of_metrics_and_labels_that_a_server_has(real: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 4}
    assert real.http.post("/v1/completions", json=body).status_code == 200
    assert real.http.post("/v1/completions", json={"model": "none"}).status_code == 400
    known = exported(real.http.get("/metrics").text)
    asked = list(queries(dashboard()))
    assert len(asked) > 30
    for query in asked:
        names = METRIC.findall(query)
        assert names, query
        assert set(names) <= known.keys(), query
        labels = set().union(OF_A_SCRAPE, *(known[name] for name in names))
        if any(not known[name] for name in names if name.endswith("failure_total")):
            labels |= {"code", "model_name"}  # nothing has failed in the worker
        grouped = {label for group in GROUPED.findall(query) for label in re.split(r",\s*", group)}
        selected = set(re.findall(r"(\w+)=~?\"", query))
        assert grouped | selected <= labels, query


def test_panels_are_of_the_data_source_that_the_reader_chooses() -> None:
    found = dashboard()
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    panels = [panel for panel in found["panels"] if panel["type"] != "row"]
    assert all(panel["datasource"] == chosen for panel in panels)
    assert all(t["datasource"] == chosen for panel in panels for t in panel["targets"])
    assert found["templating"]["list"][0]["type"] == "datasource"
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    places = [tuple(panel["gridPos"].values()) for panel in found["panels"]]
    for i, (x, y, w, h) in enumerate(places):
        assert x + w <= 24
        for a, b, c, d in places[:i]:
            assert x >= a + c or a >= x + w or y >= b + d or b >= y + h, "panels overlap"
