"""Compute the operations between a decoder's matrices on CPU: embedding, norms, rotary, KV writes.

Also converts rows for a library's kernels (narrow) and takes their results back (store, add).

Kernels take the address of a table of int64 whose fields are the constants below; threads share
work through the counter NEXT (see `attention_table.py`). Activations are float32; weights and KV
are float32 or bfloat16, KV int8 as well. An item is some rows (tokens); a row's result depends on
that row alone.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ballast.kernels.compiled import compiled
from ballast.kernels.intrinsics import (
    fetch_add,
    float32_at,
    float_of,
    int64_at,
    narrow,
    uint16_at,
    widen,
)
from ballast.kernels.kv_int8_code import quantise_heads

# Fields of all tables.
NEXT = 0
"""Next item to be taken; 0 before each run."""
ROWS = 1
ITEM_ROWS = 2
WIDTH = 3
"""Elements of a row (rotary: of a head)."""
SOURCE = 4
"""Address of the input, float32 (embedding: of the table of embeddings; store, add: what a library
has computed, of its dtype)."""
SOURCE_ROW = 5
"""Elements from a row to the next."""
TARGET = 6
TARGET_ROW = 7
INDEX = 8
"""Address of int64: the input's row for each of ROWS; 0: they are taken in order."""
WEIGHT = 9
"""Address of the norm's weight (rotary: of the queries' norm; 0: they have none)."""
EPSILON = 10
"""Bits of float32."""
PANEL_GROUP = 11
"""Embedding: how many elements of a row lie side by side in a panel (see `linear.py`), SOURCE_ROW
being the padded length of a row; 0: rows lie one after the other."""
PANEL_FORM = 12
"""Embedding of quantised panels: their form (`panel_forms.number_of`), SOURCE_ROW being the bytes
of a panel."""
# Fields of rotary tables. SOURCE: q, k, v of each token side by side, rotated in place.
HEADS = 11
KV_HEADS = 12
ROTARY = 13
"""Elements of a head that are rotated, the first ones; even."""
COSINE = 14
"""Address of float32 (ROWS, ROTARY / 2): of the angles by which i and i + ROTARY / 2 turn."""
SINE = 15
KEY_WEIGHT = 16
"""Address of the keys' norm's weight, or 0."""
KV = 17
"""Address of K of the layer in block 0."""
PLACES = 18
"""Address of int64: for each row, elements from there to its own key."""
VALUES = 19
"""Elements from a token's key to its value."""
WHOLE = 20
"""Whether the norms are of all heads of the queries, and of the keys, together, with a weight for
each element; 0: each head is normed by itself, all with the same weights."""
SCALES = 21
"""Whether KV is in int8 with scales: KV and PLACES are then in bytes."""
# Fields of embedding and landing tables.
SCALE = 22
"""Bits of float32: `embed_scaled` and `land` multiply by it."""
N_FIELDS = 23

_FAST = {"contract", "reassoc", "nsz", "arcp"}
"""For sums alone: elsewhere the compiler has several versions of a loop, which must not differ."""
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@njit(error_model="numpy")
def next_rows(table):
    """(first row, one past the last) of the next item; empty when there is none."""
    first = fetch_add(table, NEXT, 1) * table[ITEM_ROWS]
    return first, min(first + table[ITEM_ROWS], table[ROWS])


@njit(fastmath=_FAST, error_model="numpy")
def _inverse_rms(x, at, n, epsilon):
    total = _ZERO
    for d in range(n):
        total += x[at + d] * x[at + d]
    return _ONE / np.sqrt(total / np.float32(n) + epsilon)


@njit(error_model="numpy")
def _norm(table, weight):
    source, target = float32_at(table[SOURCE]), float32_at(table[TARGET])
    index = int64_at(table[INDEX])
    width, epsilon = table[WIDTH], float_of(table[EPSILON])
    first, end = next_rows(table)
    while first < end:
        for row in range(first, end):
            at = (index[row] if table[INDEX] != 0 else row) * table[SOURCE_ROW]
            to = row * table[TARGET_ROW]
            scale = _inverse_rms(source, at, width, epsilon)
            for d in range(width):
                target[to + d] = source[at + d] * scale * widen(weight[d])
        first, end = next_rows(table)


@njit(error_model="numpy")
def _land(table, weight):
    """Add rows of SOURCE to rows of TARGET, normed if there is a WEIGHT, and scaled."""
    source, target = float32_at(table[SOURCE]), float32_at(table[TARGET])
    width, epsilon, scale = table[WIDTH], float_of(table[EPSILON]), float_of(table[SCALE])
    first, end = next_rows(table)
    while first < end:
        for row in range(first, end):
            at, to = row * table[SOURCE_ROW], row * table[TARGET_ROW]
            if table[WEIGHT] != 0:
                normed = _inverse_rms(source, at, width, epsilon)
                for d in range(width):
                    target[to + d] += source[at + d] * normed * widen(weight[d]) * scale
            else:
                for d in range(width):
                    target[to + d] += source[at + d] * scale
        first, end = next_rows(table)


@njit(error_model="numpy")
def _times(x, scale):
    """x * scale; x where the scale is None, which is known when this is compiled."""
    return x if scale is None else x * scale


@njit(error_model="numpy")
def _embed(table, embeddings, scale):
    target, index = float32_at(table[TARGET]), int64_at(table[INDEX])
    width, group = table[WIDTH], table[PANEL_GROUP]
    first, end = next_rows(table)
    while first < end:
        for row in range(first, end):
            token, to = index[row], row * table[TARGET_ROW]
            if group == 0:
                at = token * table[SOURCE_ROW]
                for d in range(width):
                    target[to + d] = _times(widen(embeddings[at + d]), scale)
            else:
                at = token // 64 * 64 * table[SOURCE_ROW] + token % 64 * group
                for d in range(width):
                    x = widen(embeddings[at + d // group * 64 * group + d % group])
                    target[to + d] = _times(x, scale)
        first, end = next_rows(table)


@njit(error_model="numpy")
def _norm_head(x, at, dim, epsilon, weight):
    scale = _inverse_rms(x, at, dim, epsilon)
    for d in range(dim):
        x[at + d] = x[at + d] * scale * widen(weight[d])


@njit(error_model="numpy")
def _rotate(x, at, half, cosine, sine, angle):
    for d in range(half):
        left, right = x[at + d], x[at + half + d]
        c, s = cosine[angle + d], sine[angle + d]
        x[at + d] = left * c - right * s
        x[at + half + d] = right * c + left * s


@njit(error_model="numpy")
def _rotary(table, kv, query_weight, key_weight):
    x = float32_at(table[SOURCE])
    cosine, sine = float32_at(table[COSINE]), float32_at(table[SINE])
    places = int64_at(table[PLACES])
    heads, kv_heads, dim = table[HEADS], table[KV_HEADS], table[WIDTH]
    half, epsilon = table[ROTARY] // 2, float_of(table[EPSILON])
    first, end = next_rows(table)
    while first < end:
        for row in range(first, end):
            queries = row * table[SOURCE_ROW]
            keys = queries + heads * dim
            values = keys + kv_heads * dim
            if table[WHOLE] != 0:
                _norm_head(x, queries, heads * dim, epsilon, query_weight)
                _norm_head(x, keys, kv_heads * dim, epsilon, key_weight)
            elif table[WEIGHT] != 0:
                for h in range(heads):
                    _norm_head(x, queries + h * dim, dim, epsilon, query_weight)
                for h in range(kv_heads):
                    _norm_head(x, keys + h * dim, dim, epsilon, key_weight)
            angle = row * half
            for h in range(heads + kv_heads):
                _rotate(x, queries + h * dim, half, cosine, sine, angle)
            to = places[row]
            if table[SCALES] != 0:
                at = table[KV] + to
                quantise_heads(x, keys, dim, kv_heads, dim, at)
                quantise_heads(x, values, dim, kv_heads, dim, at + table[VALUES])
                continue
            for d in range(kv_heads * dim):
                kv[to + d] = narrow(x[keys + d], kv[0])
            to += table[VALUES]
            for d in range(kv_heads * dim):
                kv[to + d] = narrow(x[values + d], kv[0])
        first, end = next_rows(table)


@njit(error_model="numpy")
def _narrow(table, target):
    """Round float32 rows to the element type of `target`."""
    source, width = float32_at(table[SOURCE]), table[WIDTH]
    first, end = next_rows(table)
    while first < end:
        for row in range(first, end):
            at, to = row * table[SOURCE_ROW], row * table[TARGET_ROW]
            for d in range(width):
                target[to + d] = narrow(source[at + d], target[0])
        first, end = next_rows(table)


@njit(error_model="numpy")
def _store(table, source):
    """Widen rows of `source` into float32 rows."""
    target, width = float32_at(table[TARGET]), table[WIDTH]
    first, end = next_rows(table)
    while first < end:
        for row in range(first, end):
            at, to = row * table[SOURCE_ROW], row * table[TARGET_ROW]
            for d in range(width):
                target[to + d] = widen(source[at + d])
        first, end = next_rows(table)


@njit(error_model="numpy")
def _add(table, source):
    """Add rows of `source` to float32 rows."""
    target, width = float32_at(table[TARGET]), table[WIDTH]
    first, end = next_rows(table)
    while first < end:
        for row in range(first, end):
            at, to = row * table[SOURCE_ROW], row * table[TARGET_ROW]
            for d in range(width):
                target[to + d] += widen(source[at + d])
        first, end = next_rows(table)


def _norm_float32(address):
    table = int64_at(address)
    _norm(table, float32_at(table[WEIGHT]))


def _norm_bfloat16(address):
    table = int64_at(address)
    _norm(table, uint16_at(table[WEIGHT]))


def _land_float32(address):
    table = int64_at(address)
    _land(table, float32_at(table[WEIGHT]))


def _land_bfloat16(address):
    table = int64_at(address)
    _land(table, uint16_at(table[WEIGHT]))


def _embed_float32(address):
    table = int64_at(address)
    _embed(table, float32_at(table[SOURCE]), None)


def _embed_bfloat16(address):
    table = int64_at(address)
    _embed(table, uint16_at(table[SOURCE]), None)


def _embed_scaled_float32(address):
    table = int64_at(address)
    _embed(table, float32_at(table[SOURCE]), float_of(table[SCALE]))


def _embed_scaled_bfloat16(address):
    table = int64_at(address)
    _embed(table, uint16_at(table[SOURCE]), float_of(table[SCALE]))


def _rotary_float32(address):
    table = int64_at(address)
    _rotary(
        table,
        float32_at(table[KV]),
        float32_at(table[WEIGHT]),
        float32_at(table[KEY_WEIGHT]),
    )


def _rotary_bfloat16(address):
    table = int64_at(address)
    _rotary(
        table,
        uint16_at(table[KV]),
        uint16_at(table[WEIGHT]),
        uint16_at(table[KEY_WEIGHT]),
    )


def _rotary_wide_bfloat16(address):
    """KV in bfloat16, weights of norms in float32."""
    table = int64_at(address)
    _rotary(
        table,
        uint16_at(table[KV]),
        float32_at(table[WEIGHT]),
        float32_at(table[KEY_WEIGHT]),
    )


def _narrow_bfloat16(address):
    table = int64_at(address)
    _narrow(table, uint16_at(table[TARGET]))


def _store_float32(address):
    table = int64_at(address)
    _store(table, float32_at(table[SOURCE]))


def _store_bfloat16(address):
    table = int64_at(address)
    _store(table, uint16_at(table[SOURCE]))


def _add_float32(address):
    table = int64_at(address)
    _add(table, float32_at(table[SOURCE]))


def _add_bfloat16(address):
    table = int64_at(address)
    _add(table, uint16_at(table[SOURCE]))


_PLAIN = {
    "norm_float32": _norm_float32,
    "norm_bfloat16": _norm_bfloat16,
    "embed_float32": _embed_float32,
    "embed_bfloat16": _embed_bfloat16,
    "embed_scaled_float32": _embed_scaled_float32,
    "embed_scaled_bfloat16": _embed_scaled_bfloat16,
    "land_float32": _land_float32,
    "land_bfloat16": _land_bfloat16,
    "rotary_wide_float32": _rotary_float32,
    "rotary_wide_bfloat16": _rotary_wide_bfloat16,
    "rotary_float32": _rotary_float32,
    "rotary_bfloat16": _rotary_bfloat16,
    "narrow_bfloat16": _narrow_bfloat16,
    "store_float32": _store_float32,
    "store_bfloat16": _store_bfloat16,
    "add_float32": _add_float32,
    "add_bfloat16": _add_bfloat16,
}
_compiled: dict[str, Any] = {}


def address_of(name: str) -> int:
    """Address of a compiled kernel, from Numba's cache if it is there. Call it from one thread."""
    if name not in _compiled:
        _compiled[name] = compiled(types.void(types.int64), _PLAIN[name])
    return int(_compiled[name].address)
