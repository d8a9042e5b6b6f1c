"""Build operators' orders for a simulated cluster from a file (`sim.cluster_files`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ballast.core.actions import ActivateCommand, EvictCommand
from ballast.core.errors import ConfigError
from ballast.core.fleet_orders import (
    Drain,
    LendPages,
    Migrate,
    Place,
    RecallPages,
    Uncordon,
    Withdraw,
)
from ballast.core.order import Order
from ballast.core.units import format_bytes
from ballast.fleet.faults import unknown
from ballast.sim.cluster_files import Number, OperatorOrder, device_named

WHY = "ordered"


@dataclass(frozen=True, slots=True)
class TimedOrder:
    """An order that an operator gives at a time, in virtual seconds."""

    at: float
    order: Order
    device: str | None = None
    """The only device to carry it out; None: all that it concerns."""


def orders_of(
    lines: Sequence[OperatorOrder], models: Collection[str], pages: Mapping[str, int]
) -> list[TimedOrder]:
    """Return the orders of a file. `models`: of the fleet; `pages`: bytes of a page, by device, in
    order. Raises ConfigError for what is not there."""
    return [_order_of(line, models, pages) for line in lines]


def _order_of(line: OperatorOrder, models: Collection[str], pages: Mapping[str, int]) -> TimedOrder:
    names = list(pages)
    if line.lends:
        return TimedOrder(line.at, _about_pages(line, names, pages))
    what = line.what

    def named(at: Number | None) -> str:
        return device_named("orders", 0 if at is None else at, names)

    model, device = line.model or "", named(getattr(line, what))
    if line.model is not None and model not in models:
        raise ConfigError("orders", model, unknown(model, models))
    match what:
        case "drain":
            return TimedOrder(line.at, Drain(device))
        case "uncordon":
            return TimedOrder(line.at, Uncordon(device))
        case "place":
            return TimedOrder(line.at, Place(model, device, WHY))
        case "withdraw":
            return TimedOrder(line.at, Withdraw(model, device, WHY, line.seconds))
        case "migrate":
            to = None if line.to is None else named(line.to)
            return TimedOrder(line.at, Migrate(model, device, to, WHY))
        case "activate":
            return TimedOrder(line.at, ActivateCommand(model, WHY), device)
        case _:
            return TimedOrder(line.at, EvictCommand(model, WHY), device)


def _about_pages(
    line: OperatorOrder, names: Sequence[str], pages: Mapping[str, int]
) -> LendPages | RecallPages:
    lender, borrower = lending_pair(line, names)
    n_bytes, page = line.lend or line.recall, pages[lender]
    n = n_bytes // page if isinstance(n_bytes, int) else None
    if n == 0:
        raise ConfigError("orders", n_bytes, f"a page or more, of {format_bytes(page)}")
    if line.lend is None or n is None:
        return RecallPages(lender, borrower, n, line.seconds, WHY)
    return LendPages(lender, borrower, n, WHY)


def lending_pair(line: OperatorOrder, names: Sequence[str]) -> tuple[str, str]:
    """Return the names of lender and borrower. Raises ConfigError for a device that is unknown."""
    found = [
        device_named("orders", at, names) for at in (line.lender, line.borrower) if at is not None
    ]
    lender, borrower = found
    return lender, borrower
