"""Offer running requests at the harm of delaying them until they are admitted again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ballast.core.actions import Preempt
from ballast.core.view import ModelView, RequestView, Residency
from ballast.policy.kv_fetching import OVERHEAD_SECONDS
from ballast.policy.market.claim_and_offer import Claim, Offer, RunningWork
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import Priced
from ballast.policy.market.work_ahead import LEAST_SPREAD, SPREAD, precedence, step_seconds


class RunningRequests:
    """Preemption of running requests that come after a claim's (`work_ahead.precedence`), for
    claims that may undo work; never of the first of all, nor a second time of one that has not got
    on since, by more than its restoring takes and to twice the answer that it had.

    A preempted request waits until pages become free by themselves, those before it in the queue
    served, and is computed again: the lane has less time for all others. Where tiers keep its KV
    and bring it faster, it waits for that instead, and nobody else does. The prices of all requests
    are computed at once, and sorted once for each number of pages that a claim lacks; an offer is
    made when a claim comes to it.
    """

    def __init__(self, ahead: Outlook) -> None:
        self._ahead, self._work = ahead, ahead.work
        work = ahead.work.of_all
        lane = work.restoring
        own = lane * ahead.stretch
        if ahead.fetch_rate:
            fetching = work.kv_bytes / ahead.fetch_rate + OVERHEAD_SECONDS
            fetched = fetching < lane
            lane, own = np.where(fetched, 0.0, lane), np.where(fetched, fetching, own)
        waits = ahead.coming.waits(work.pages + ahead.backlog) + own
        self._prices = ahead.lateness.of(waits) + ahead.lane_price * lane
        slack = work.due - ahead.now
        self._is_ahead = (work.allowed > 0) & (waits + LEAST_SPREAD + SPREAD * waits <= slack)
        self._pages, self._lost = work.pages, work.lost
        self._orders: dict[int, list[int]] = {}
        """Columns of `work`, the cheapest page first, for each number of pages lacked."""
        self._found: dict[int, RunningWork | None] = {}

    @property
    def least(self) -> float:
        """Price of the cheapest page; inf: no request holds any."""
        holding = self._pages > 0
        prices = self._prices[holding] / self._pages[holding]
        return float(prices.min(initial=math.inf))

    def cheapest(self, budget: PageBudget, claim: Claim, lacked: int) -> Iterator[Priced]:
        """As of `OfferTable`; last come those that free blocks of their own model alone."""
        for price, work in self.by_price(lacked):
            yield price, _preempting(work)
        for column in np.flatnonzero(self._pages == 0).tolist():
            blocks = self._undoable(column)
            if blocks is not None and blocks.blocks:
                yield math.inf, _preempting(blocks)

    def by_price(self, lacked: int) -> Iterator[tuple[float, RunningWork]]:
        """As of `WorkTable`."""
        for column in self._sorted(lacked):
            work = self._undoable(column)
            if work is not None:
                pages = work.pages
                yield work.price / (pages if pages < lacked else lacked), work

    def is_own(self, claim: Claim) -> bool:
        """As of `OfferTable`."""
        return False

    def take(self, offers: Sequence[Offer]) -> bool:
        """As of `OfferTable`."""
        return False

    def _sorted(self, lacked: int) -> list[int]:
        """Return the columns of requests with pages by price per page, the cheapest first."""
        if lacked not in self._orders:
            holding = np.flatnonzero(self._pages > 0)[::-1]  # of equals the youngest first
            per_page = self._prices[holding] / np.minimum(self._pages[holding], lacked)
            per_page = per_page.astype(np.float32)  # equals but for rounding are equals
            self._orders[lacked] = holding[per_page.argsort(kind="stable")].tolist()
        return self._orders[lacked]

    def _undoable(self, column: int) -> RunningWork | None:
        """Return what a request offers; None if its model is not resident, or the request has not
        got on since it was preempted."""
        if column in self._found:
            return self._found[column]
        m, r = self._work.request(column)
        work = None
        if m.residency is Residency.RESIDENT and not (r.undone and _is_recovering(m, r)):
            price, order, name = self._prices.item(column), r.order, m.spec.name
            if self._lost.item(column) < self._ahead.now:
                order = precedence(order, not self._ahead.is_first(r))
            is_ahead = self._is_ahead.item(column) and not self._ahead.is_first(r)
            key = ("request", name, r.id)
            work = RunningWork(order, price, r.pages, r.blocks, name, key, is_ahead)
        self._found[column] = work
        return work


def _is_recovering(m: ModelView, r: RequestView) -> bool:
    """Whether a request that was preempted has not got on since by more than computing it again
    would take, and by as many tokens as it had generated then: so it is preempted as often as its
    answer doubles, at most."""
    more = r.tokens - r.undone
    if more <= r.generated - more:
        return True
    return more * m.derived(step_seconds) <= m.costs.prefill_seconds(r.computed)


def _preempting(work: RunningWork) -> Offer:
    undoes, price, pages, blocks, owner, key, is_ahead = work
    act, price_of = partial(_preempt, work), partial(float, price)
    return Offer(key, owner, pages, price_of, act, blocks, undoes=undoes, ahead=is_ahead)


def _preempt(work: RunningWork, _: int, claim: Claim) -> Preempt:
    return work.preempted(claim)
