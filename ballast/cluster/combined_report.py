"""Combine the `DeviceReport`s of several devices into one, for metrics and state of the server.

Used by `DeviceSet.report`. Counts are summed, pages in units of the smallest page size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

from ballast.core.report import DeviceReport, ModelReport
from ballast.core.view import Residency

_NEAREST = (
    Residency.RESIDENT,
    Residency.ACTIVATING,
    Residency.EVICTING,
    Residency.ABSENT,
    Residency.FAILED,
)
"""Order of precedence: the residency reported for a model on several devices is the first of these
that it has on any of them."""


def combined(reports: Sequence[DeviceReport]) -> DeviceReport:
    """Combine the reports of at least one device, counting pages in the smallest page size.

    The numbers of a model that several devices serve are summed.
    """
    if len(reports) == 1:
        return reports[0]
    page = min(r.page_bytes for r in reports)
    scaled = [_in_pages(r, page) for r in reports]
    models: dict[str, ModelReport] = {}
    owners: Counter[str] = Counter()
    borrowed: Counter[str] = Counter()
    fetched: Counter[str] = Counter()
    for report in scaled:
        owners.update(report.owners)
        borrowed.update(report.borrowed)
        fetched.update(report.fetched_tokens)
        for model in report.models:
            known = models.get(model.name)
            models[model.name] = model if known is None else _sum(known, model)
    return DeviceReport(
        device=", ".join(r.device for r in scaled),
        now=max(r.now for r in scaled),
        page_bytes=page,
        total=sum(r.total for r in scaled),
        free=sum(r.free for r in scaled),
        reclaiming=sum(r.reclaiming for r in scaled),
        owners=dict(owners),
        models=tuple(models.values()),
        jobs=sum(r.jobs for r in scaled),
        draining=all(r.draining for r in scaled),
        borrowed=dict(borrowed),
        fetched_tokens=dict(fetched),
    )


def _in_pages(report: DeviceReport, page_bytes: int) -> DeviceReport:
    """Return the report counted in smaller pages; all page sizes are powers of two."""
    times = report.page_bytes // page_bytes
    if times == 1:
        return report
    return replace(
        report,
        page_bytes=page_bytes,
        total=report.total * times,
        free=report.free * times,
        reclaiming=report.reclaiming * times,
        owners={owner: n * times for owner, n in report.owners.items()},
        borrowed={lender: n * times for lender, n in report.borrowed.items()},
        models=tuple(
            replace(
                m,
                weight_pages=m.weight_pages * times,
                whole_pages=m.whole_pages * times,
                kv_pages=m.kv_pages * times,
                cached_pages=m.cached_pages * times,
                cached_pages_of={t: n * times for t, n in m.cached_pages_of.items()},
                borrowed_pages=m.borrowed_pages * times,
                lent_pages=m.lent_pages * times,
            )
            for m in report.models
        ),
    )


def _sum(a: ModelReport, b: ModelReport) -> ModelReport:
    nearest = min((a.residency, b.residency), key=lambda r: _NEAREST.index(Residency(r)))
    counts = {
        f.name: getattr(a, f.name) + getattr(b, f.name)
        for f in fields(ModelReport)
        if f.name not in ("name", "residency", "set_aside", "cached_pages_of", "costs")
    }
    # One that another device still serves is not set aside.
    aside = {n: why for n, why in a.set_aside.items() if n in b.set_aside}
    cached = {**Counter(a.cached_pages_of) + Counter(b.cached_pages_of)}
    return ModelReport(
        name=a.name, residency=nearest, set_aside=aside, cached_pages_of=cached, **counts
    )
