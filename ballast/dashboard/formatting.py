"""Format numbers, durations and policy decisions for an operator: short, and of even width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_NAMED = 8
"""Most rotating layers that are listed by number."""
_BLOCKS = "▁▂▃▄▅▆▇█"


def seconds_of(seconds: float) -> str:
    """Format a latency: ``0.0123 -> '12ms'``."""
    if seconds < 0.0095:
        return f"{seconds * 1e3:.1f}ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f}ms"
    return f"{seconds:.1f}s" if seconds < 100 else f"{seconds:.0f}s"


def span_of(seconds: float) -> str:
    """Format a duration: ``11520 -> '3h12m'``."""
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{whole % 60:02}s" if minutes else f"{whole}s"


def rate_of(rate: float) -> str:
    """Format a rate per second."""
    return f"{rate:.0f}" if rate >= 99.95 or rate == 0 else f"{rate:.1f}"


def counted(n: int, what: str) -> str:
    """Format a count: ``(1, 'page') -> '1 page'``."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def sparkline(values: Iterable[float], width: int) -> str:
    """Draw the last `width` values as blocks, scaled to the highest of them."""
    shown = list(values)[-width:]
    most = max(shown, default=0.0)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(v / most * steps) if most else 0] for v in shown)


def bar(parts: Sequence[tuple[int, str]], total: int, width: int) -> list[tuple[str, str]]:
    """Divide `width` cells between the parts of a whole; returns a run of cells for each, with its
    mark.

    Cells are rounded where parts end, so that they add up to `width` for parts that add up to
    `total`; a small part gets one cell if its neighbour can spare it.
    """
    runs, done, drawn = [], 0, 0
    for pages, mark in parts:
        done += pages
        end = min(width, round(done / total * width)) if total else 0
        if pages and end == drawn < width:
            end += 1
        runs.append((mark, mark * (end - drawn)))
        drawn = max(drawn, end)
    return runs


@dataclass(frozen=True, slots=True)
class FormattedDecision:
    """A policy decision, formatted, with the number of consecutive decisions like it."""

    time: float
    """Time of the last of them, in seconds since 1970."""
    verb: str
    model: str
    detail: str
    refused: str
    times: int = 1


def decided(decisions: Iterable[Mapping[str, Any]], most: int) -> list[FormattedDecision]:
    """Format the last `most` decisions, newest first, merging consecutive ones that are alike."""
    shown: list[FormattedDecision] = []
    for decision in reversed(list(decisions)):
        one = _decided(decision)
        if shown and _alike(shown[-1], one):
            last = shown[-1]
            shown[-1] = FormattedDecision(
                last.time, last.verb, last.model, last.detail, last.refused, last.times + 1
            )
        elif len(shown) == most:
            break
        else:
            shown.append(one)
    return shown


def _alike(a: FormattedDecision, b: FormattedDecision) -> bool:
    return (a.verb, a.model, bool(a.refused)) == (b.verb, b.model, bool(b.refused))


def _rotates(layers: Sequence[int], slots: int) -> str:
    """Format a rotation: ``([1, 5], 1) -> 'layers 1, 5 rotate through 1 slot'``."""
    if not layers:
        return "no layer rotates"
    named = f"layers {', '.join(map(str, layers))}"
    which = named if len(layers) <= MOST_NAMED else f"{len(layers)} layers"
    return f"{which} rotate through {counted(slots, 'slot')}"


def _residency(plan: Mapping[str, Any]) -> list[str]:
    """Format what a plan of residency has elsewhere than in pages of its own."""
    details = [_rotates(**plan[kind]) for kind in ("rotation", "kv") if kind in plan]
    if "kv" in plan:
        details[-1] = f"KV: {details[-1]}"
    places = (("absent", "absent"), ("in_place", "read in place"))
    details += [f"{counted(len(plan[k]), 'segment')} {what}" for k, what in places if k in plan]
    return details


def _decided(decision: Mapping[str, Any]) -> FormattedDecision:
    verb = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", str(decision.get("action", "?"))).lower()
    if decision.get("held") is False:
        verb = "release"
    elif decision.get("paused"):
        verb = "pause"
    reason, _, priced = str(decision.get("why") or "").partition("; ")
    details = [reason] if reason else []
    if "rotation" in decision:
        details.append(_rotates(**decision["rotation"]))
    if "plan" in decision:
        places = _residency(decision["plan"])
        details += places or ([] if verb == "activate" else ["all in pages of its own"])
    if "pages" in decision:
        pages = decision["pages"]
        unbounded = "all" if verb == "recall" else "no bound"
        details.append(unbounded if pages is None else counted(pages, "page"))
    details += [priced] if priced else []
    operator = "by an operator"
    if decision.get("by") == "operator" and operator not in details:  # others have a reason
        details.append(operator)
    return FormattedDecision(
        time=float(decision.get("time", 0.0)),
        verb=verb,
        model=str(decision.get("model", decision.get("to", ""))),
        detail=", ".join(details),
        refused=str(decision.get("refused", "")),
    )
