"""Build the data from which `page.js` draws: plain and rounded; equal runs give equal data.

::

    title, devices: [name], models: [{name, colour, shares: [by run]}]
    colours: {uses, marks, runs, shared}, names: {use: words}, levels: {ttft, tpot: [seconds]}
    runs: [{name, share, end, at: [seconds],
            devices: {name: {budget, bands: [[use, model, [MiB]]], waiting: {model: [requests]}}},
            marks: [{at, kind, action, device, model, why, refused}],
            ttft, tpot: [[seconds, share of all requests]]}]

A model is an index into `models`; -1: none. All series have one value for each of `at`. Used by
`bench.page`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ballast.bench import palette
from ballast.bench.record import RequestRecord
from ballast.bench.report import Report
from ballast.bench.sample import DeviceSample, use_of
from ballast.bench.tables import percent
from ballast.bench.timeline import ACTIONS
from ballast.core.units import MiB

MARKED = 5000
"""Decisions of a run that a page holds, the first ones; `page` says how many it leaves out."""
POINTS = 200
"""Number of points of a curve."""
_MODELS_OWN = ("weights", "slots", "kv", "cached")
"""Kinds of owners that name a model."""


def page_data(title: str, reports: Sequence[Report]) -> dict[str, Any]:
    """All that pictures need; see the module's docstring."""
    models = sorted(
        {m for r in reports for m in r.models} | {m for r in reports for m in _owning(r)}
    )
    places = {name: i for i, name in enumerate(models)}
    slos = [slo for r in reports for slo in r.slos.values()]
    levels = {part: sorted({getattr(slo, part) for slo in slos}) for part in ("ttft", "tpot")}
    return {
        "title": title,
        "devices": devices_of(reports),
        "models": [
            {
                "name": name,
                "colour": palette.colour_of(place),
                "shares": [_share(r, name) for r in reports],
            }
            for name, place in places.items()
        ],
        "colours": {
            "uses": palette.USES,
            "marks": {**palette.MARKS, "other decisions": palette.MUTED},
            "runs": [palette.colour_of(i) for i in range(len(reports))],
            "shared": palette.USES["reclaiming"],
        },
        "names": palette.USE_NAMES,
        # Lines for many different levels would hide the curves.
        "levels": {part: found if len(found) <= 3 else [] for part, found in levels.items()},
        "runs": [_run(r, places) for r in reports],
    }


def devices_of(reports: Sequence[Report]) -> list[str]:
    """Names of the devices that were sampled in any run, in their order."""
    return list(dict.fromkeys(d for r in reports for s in r.memory for d in s.devices))


def _run(report: Report, places: dict[str, int]) -> dict[str, Any]:
    names = devices_of([report])
    nothing = DeviceSample({})
    samples = {name: [s.devices.get(name, nothing) for s in report.memory] for name in names}
    return {
        "name": report.name,
        "share": percent(report.total.attainment),
        "end": round(report.wall_seconds, 3),
        "at": [round(s.at, 3) for s in report.memory],
        "devices": {name: _device(own, places) for name, own in samples.items()},
        "marks": _marks(report, places),
        "ttft": _curve(report, lambda r: r.ttft),
        "tpot": _curve(report, lambda r: r.tpot),
    }


def _device(samples: Sequence[DeviceSample], places: dict[str, int]) -> dict[str, Any]:
    sums: dict[tuple[str, int], list[int]] = {}
    for owner in sorted({owner for s in samples for owner in s.owners}):
        kind, _, name = owner.partition(":")
        use = use_of(owner)
        if use == "free":
            continue
        own = sums.setdefault(
            (use, places[name] if kind in _MODELS_OWN else -1), [0] * len(samples)
        )
        for i, sample in enumerate(samples):
            own[i] += sample.owners.get(owner, 0)
    waiting = sorted({model for s in samples for model in s.waiting})
    return {
        "budget": max((sum(s.owners.values()) for s in samples), default=0) / MiB,
        "bands": [
            [use, place, [round(n / MiB, 3) for n in own]]
            for (use, place), own in sums.items()
            if any(own)
        ],
        "waiting": {places[model]: [s.waiting.get(model, 0) for s in samples] for model in waiting},
    }


def _marks(report: Report, places: dict[str, int]) -> list[dict[str, Any]]:
    decided = [
        {
            "at": round(d.at, 3),
            "kind": ACTIONS.get(d.action, "other decisions"),
            "action": d.action,
            "device": d.device,
            "model": places.get(d.model, -1),
            "why": d.why,
            "refused": d.refused,
        }
        for d in report.decisions[:MARKED]
    ]
    failed = [
        {
            "at": round(r.at if r.end is None else r.end, 3),
            "kind": "refused requests",
            "action": "request failed,",
            "device": "",
            "model": places.get(r.model, -1),
            "why": r.error,
            "refused": None,
        }
        for r in report.records
        if not r.answered
    ]
    return sorted([*decided, *failed], key=lambda mark: mark["at"])


def _curve(
    report: Report, latency: Callable[[RequestRecord], float | None]
) -> list[tuple[float, float]]:
    """Points of the share of all requests that were answered within a time."""
    values = sorted(v for r in report.records if r.answered and (v := latency(r)) is not None)
    if not values:
        return []
    # Every one of a few, else as many as a picture can show; the last among them.
    at = np.unique(np.linspace(0, len(values) - 1, POINTS).round().astype(int))
    return [
        (round(max(values[i], 1e-4), 5), round((int(i) + 1) / len(report.records), 4)) for i in at
    ]


def _owning(report: Report) -> set[str]:
    """Models that have memory, or requests that wait, in any sample."""
    found = set()
    for sample in report.memory:
        for device in sample.devices.values():
            pairs = (owner.partition(":") for owner in device.owners)
            found |= {name for kind, _, name in pairs if kind in _MODELS_OWN}
            found |= set(device.waiting)
    return found


def _share(report: Report, model: str) -> str:
    served = report.models.get(model)
    return percent(served.attainment) if served is not None and served.requests else "-"
