"""Several devices' reports as one."""

from __future__ import annotations

from dataclasses import replace

from ballast.cluster.combined_report import combined
from tests.server.observe.test_metrics import device, model


def test_pages_are_counted_in_the_smallest_and_models_once() -> None:
    one = device(
        model("a", "absent", running=1, evictions=2),
        model("b", weight_pages=3, waiting=4),
        weights_b=3,
    )
    two = replace(
        device(
            model("a", "resident", weight_pages=5, kv_pages=2, running=2, lent_pages=1),
            weights_a=5,
            kv_a=2,
        ),
        device="cpu:1",
        page_bytes=4 * one.page_bytes,
        reclaiming=1,
        jobs=3,
    )
    both = combined([one, two])
    assert (both.device, both.page_bytes, both.jobs) == ("cpu:0, cpu:1", one.page_bytes, 10)
    assert both.owners == {"weights:b": 3, "weights:a": 20, "kv:a": 8}
    assert (both.total, both.free, both.reclaiming) == (500, 97 + 4 * 93, 4)
    a, b = both.models
    assert (a.residency, a.running, a.evictions, a.weight_pages) == ("resident", 3, 2, 20)
    assert a.lent_pages == 4
    assert b == one.models[1]
    assert combined([two]) is two
