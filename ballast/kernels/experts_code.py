"""Compute mixture-of-experts layers on CPU: compiled routing, experts' matrices, and sums.

Four operations of a layer, each begun when the one before has ended: *route* chooses the experts of
every row and puts rows of one expert together; *gate_up* and *down* run the linear kernel
(`linear_code.py`), by its address, on each expert that has rows, on these alone; *combine* adds up
the outputs of a row's experts. A row of an expert's input is a *slot*; slots of one expert are
adjacent. A *pair* is a row and one of its experts: pair `row * TOP_K + rank`, the expert with the
largest share first.

Kernels take the address of a table of int64 whose fields are the constants below; threads share
work through counters in it. A row's experts, their shares and their sum depend on that row alone:
neither the rows around it nor the number of threads changes a bit of it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ballast.kernels import linear_code
from ballast.kernels.compiled import compiled
from ballast.kernels.intrinsics import (
    call_kernel,
    fetch_add,
    float32_at,
    int64_at,
    uint16_at,
    widen,
)

# Fields of the table. The first three are 0 before each run.
ROUTED = 0
"""Next item that route takes."""
COMBINED = 1
"""Next item that combine takes."""
DONE = 2
"""Rows whose experts are chosen."""
ROWS = 3
ITEM_ROWS = 4
"""Rows of an item."""
WIDTH = 5
"""Elements of a row of hidden states."""
X = 6
"""Address of float32 (ROWS, WIDTH): what router and experts get."""
OUT = 7
"""Address of float32 (ROWS, WIDTH), to which combine adds."""
ROUTER = 8
"""Address of (EXPERTS, WIDTH), float32 or bfloat16."""
EXPERTS = 9
TOP_K = 10
"""Experts of a row, 1 .. EXPERTS."""
NORMALISED = 11
"""1: a row's shares are divided by their sum; 0: they are its probabilities as they are."""
SCORES = 12
"""Address of float32 (ROWS, EXPERTS): logits, then probabilities, then -1 for those chosen."""
CHOSEN = 13
"""Address of int64 (pairs,): expert of each."""
SHARES = 14
"""Address of float32 (pairs,): by which combine multiplies."""
SLOT_ROWS = 15
"""Address of int64 (pairs,): row of each slot."""
SLOT_PAIRS = 16
"""Address of int64 (pairs,): pair of each slot."""
COUNTS = 17
"""Address of int64 (EXPERTS,): rows of each."""
GATED = 18
"""Address of float32 (slots, INNER): from gate_up to down."""
INNER = 19
MADE = 20
"""Address of float32 (pairs, WIDTH): from down to combine."""
LINEAR = 21
"""Address of the linear kernel."""
GATE_UPS = 22
"""Address of the linear kernel's tables, one for each expert; DOWNS likewise."""
DOWNS = 23
N_FIELDS = 24

_TABLE_BYTES = 8 * linear_code.N_FIELDS
_FAST = {"contract", "reassoc", "nsz", "arcp"}
"""For the router's sums alone: see `layer_code.py`."""
_ZERO = np.float32(0.0)
_MINUS_ONE = np.float32(-1.0)


@njit(error_model="numpy")
def _next_rows(table, counter):
    """(first row, one past the last) of the next item; empty when there is none."""
    first = fetch_add(table, counter, 1) * table[ITEM_ROWS]
    return first, min(first + table[ITEM_ROWS], table[ROWS])


@njit(fastmath=_FAST, error_model="numpy")
def _router_logit(x, at, weight, expert, width):
    total = _ZERO
    for d in range(width):
        total += x[at + d] * widen(weight[expert * width + d])
    return total


@njit(error_model="numpy")
def _softmax(scores, at, n):
    """Compute the softmax of n logits in place."""
    most = scores[at]
    for e in range(1, n):
        most = max(most, scores[at + e])
    total = _ZERO
    for e in range(n):
        scores[at + e] = np.exp(scores[at + e] - most)
        total += scores[at + e]
    for e in range(n):
        scores[at + e] /= total


@njit(error_model="numpy")
def _choose(table, row):
    """Choose a row's experts by probability (of equals the first), and compute their shares."""
    scores, chosen = float32_at(table[SCORES]), int64_at(table[CHOSEN])
    shares = float32_at(table[SHARES])
    n, k = table[EXPERTS], table[TOP_K]
    at, pair = row * n, row * k
    total = _ZERO
    for rank in range(k):
        best = 0
        for e in range(1, n):
            if scores[at + e] > scores[at + best]:
                best = e
        chosen[pair + rank], shares[pair + rank] = best, scores[at + best]
        total += scores[at + best]
        scores[at + best] = _MINUS_ONE
    if table[NORMALISED] != 0:
        for rank in range(k):
            shares[pair + rank] /= total


@njit(error_model="numpy")
def _group(table):
    """Give each pair its slot, in the order of rows, and the linear kernel's tables their rows."""
    chosen, counts = int64_at(table[CHOSEN]), int64_at(table[COUNTS])
    slot_rows, slot_pairs = int64_at(table[SLOT_ROWS]), int64_at(table[SLOT_PAIRS])
    n, k, pairs = table[EXPERTS], table[TOP_K], table[ROWS] * table[TOP_K]
    for e in range(n):
        counts[e] = 0
    for pair in range(pairs):
        counts[chosen[pair]] += 1
    first = 0
    for e in range(n):
        gate_up = int64_at(table[GATE_UPS] + e * _TABLE_BYTES)
        down = int64_at(table[DOWNS] + e * _TABLE_BYTES)
        gate_up[linear_code.NEXT] = down[linear_code.NEXT] = 0
        gate_up[linear_code.ROWS] = down[linear_code.ROWS] = counts[e]
        gate_up[linear_code.X_INDEX] = table[SLOT_ROWS] + 8 * first
        down[linear_code.OUT_INDEX] = table[SLOT_PAIRS] + 8 * first
        gated = table[GATED] + 4 * first * table[INNER]
        gate_up[linear_code.OUT] = down[linear_code.X] = gated
        # While pairs are given out: the next slot of each expert.
        counts[e], first = first, first + counts[e]
    for pair in range(pairs):
        slot = counts[chosen[pair]]
        counts[chosen[pair]] = slot + 1
        slot_rows[slot], slot_pairs[slot] = pair // k, pair
    for e in range(n):
        counts[e] = int64_at(table[GATE_UPS] + e * _TABLE_BYTES)[linear_code.ROWS]


@njit(error_model="numpy")
def _route(table, weight):
    x, scores = float32_at(table[X]), float32_at(table[SCORES])
    width, n = table[WIDTH], table[EXPERTS]
    first, end = _next_rows(table, ROUTED)
    while first < end:
        for row in range(first, end):
            for e in range(n):
                scores[row * n + e] = _router_logit(x, row * width, weight, e, width)
            _softmax(scores, row * n, n)
            _choose(table, row)
        # The atomic counter orders earlier writes: the thread that adds last sees all of them.
        if fetch_add(table, DONE, end - first) + end - first == table[ROWS]:
            _group(table)
        first, end = _next_rows(table, ROUTED)


@njit(error_model="numpy")
def _run_experts(table, tables):
    """Run the linear kernel on each expert that has rows, in order.

    There is no barrier between experts: a thread without further items goes on with the next one.
    """
    for e in range(table[EXPERTS]):
        address = tables + e * _TABLE_BYTES
        if int64_at(address)[linear_code.ROWS] > 0:
            call_kernel(table[LINEAR], address)


def _route_float32(address):
    table = int64_at(address)
    _route(table, float32_at(table[ROUTER]))


def _route_bfloat16(address):
    table = int64_at(address)
    _route(table, uint16_at(table[ROUTER]))


def _gate_up(address):
    table = int64_at(address)
    _run_experts(table, table[GATE_UPS])


def _down(address):
    table = int64_at(address)
    _run_experts(table, table[DOWNS])


def _combine(address):
    table = int64_at(address)
    made, out, shares = float32_at(table[MADE]), float32_at(table[OUT]), float32_at(table[SHARES])
    width, k = table[WIDTH], table[TOP_K]
    first, end = _next_rows(table, COMBINED)
    while first < end:
        for row in range(first, end):
            total, to = row * k * width, row * width
            for d in range(width):
                made[total + d] *= shares[row * k]
            for pair in range(row * k + 1, row * k + k):
                for d in range(width):
                    made[total + d] += shares[pair] * made[pair * width + d]
            for d in range(width):
                out[to + d] += made[total + d]
        first, end = _next_rows(table, COMBINED)


_PLAIN = {
    "route_float32": _route_float32,
    "route_bfloat16": _route_bfloat16,
    "gate_up": _gate_up,
    "down": _down,
    "combine": _combine,
}
_compiled: dict[str, Any] = {}


def address_of(name: str) -> int:
    """Address of a compiled kernel, from Numba's cache if it is there. Call it from one thread."""
    if name not in _compiled:
        _compiled[name] = compiled(types.void(types.int64), _PLAIN[name])
    return int(_compiled[name].address)
