"""Compute the steps of attention within a chunk: scores, softmax, sums of values, merging.

Compiled functions for `attention_code`. Each step has two versions of its inner loops: for K and V
read in place, and for K and V widened into a buffer first (*staged*). Results are bitwise equal.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np
from numba import njit

from ballast.kernels.attention_intrinsics import (
    exp,
    exp_and_sum,
    largest,
    make_add,
    make_dot,
    widen_scaled,
)
from ballast.kernels.attention_table import (
    BLOCK_STRIDE,
    BLOCK_TOKENS,
    CHUNK,
    TOKEN,
    is_staged,
)
from ballast.kernels.intrinsics import float32_at, widen
from ballast.kernels.vector_code import LANES

is_staged_code = njit(is_staged)

MASKED = np.float32(-1e30)
"""Score of a token outside of a row's causal mask or window."""
_NONE = np.float32(-5e29)
"""The running maximum before the first token: below any score, but so far above `MASKED` that the
weight of a masked token is 0 even where all are masked."""
ZERO = np.float32(0.0)
ONE = np.float32(1.0)


@njit(error_model="numpy")
def token_offsets(table, blocks, chunk, first, n, offsets):
    """Offsets of K of the tokens at positions from chunk on, head 0; CHUNK + LANES of them.

    Tokens before `first`, and from `n` on, get the offset of the nearest valid token: they are
    computed and then masked, so that no other memory is read.
    """
    step = table[TOKEN]
    block_tokens, stride = table[BLOCK_TOKENS], table[BLOCK_STRIDE]
    at = (chunk + first) // block_tokens
    inside = chunk + first - at * block_tokens
    block = np.int64(blocks[at]) * stride
    for t in range(first, n):
        if inside == block_tokens:
            at, inside = at + 1, 0
            block = np.int64(blocks[at]) * stride
        offsets[t] = block + inside * step
        inside += 1
    for t in range(first):
        offsets[t] = offsets[first]
    for t in range(n, CHUNK + LANES):
        offsets[t] = offsets[n - 1]


@njit(error_model="numpy")
def widen_row(source, at, out, to, dim, width, scale):
    """A head times `scale` into a row of `width`, zero beyond `dim`."""
    whole = dim // LANES * LANES
    widen_scaled(source, at, out, to, whole, scale)
    for d in range(whole, dim):
        out[to + d] = widen(source[at + d]) * scale
    for d in range(dim, width):
        out[to + d] = ZERO


@njit(error_model="numpy")
def widen_tokens(source, offsets, shift, n, dim, width, out):
    """Widen n tokens into rows of `width` at `out`, zero beyond `dim`."""
    for t in range(n):
        widen_row(source, offsets[t] + shift, out, t * width, dim, width, ONE)


def _named(function, prefetch):
    """Compile one of two functions that are alike but for what they fetch ahead, by a name of its
    own: in one process, code loaded from Numba's cache goes by names and types alone."""
    function.__qualname__ = f"{function.__name__}_{'in_place' if prefetch else 'staged'}"
    return njit(error_model="numpy")(function)


def _scores_of(prefetch):
    dot_4, dot_2x2, dot_4x1 = (
        make_dot(1, 4, prefetch),
        make_dot(2, 2, prefetch),
        make_dot(4, 1, prefetch),
    )
    dot_2, dot_1 = make_dot(1, 2, prefetch), make_dot(1, 1, prefetch)

    def scores(query, heads, rows, width, kv, offsets, n, shift, values, score):
        """Compute scores of all rows of some heads against n tokens, rounded up to whole LANES.

        `shift` leads from K of a token to that of the first head, and `values` from K to V.
        """
        step = LANES // 4 if rows % 4 == 0 or (heads * rows % 4 == 0 and rows < 3) else LANES
        for t in range(0, n, step):
            ahead, start = t + step, shift
            if ahead >= n:
                ahead, start = 0, shift + values
            h = 0
            while rows == 1 and heads % 4 == 0 and h < heads:
                a, b = shift + h * width, start + h * width
                at = h * CHUNK + t
                dot_4x1(query, h * width, width, kv, offsets, t, a, ahead, b, score, at)
                h += 4
            while rows == 2 and heads % 2 == 0 and h < heads:
                a, b = shift + h * width, start + h * width
                q, at = 2 * h * width, 2 * h * CHUNK + t
                dot_2x2(query, q, width, kv, offsets, t, a, ahead, b, score, at)
                h += 2
            while h < heads:
                a, b = shift + h * width, start + h * width
                r, end = h * rows, h * rows + rows
                while r + 4 <= end:
                    for i in range(0, step, LANES // 4):
                        at = r * CHUNK + t + i
                        dot_4(
                            query, r * width, width, kv, offsets, t + i, a, ahead + i, b, score, at
                        )
                    r += 4
                if r + 2 <= end:
                    for i in range(0, step, LANES // 2):
                        at = r * CHUNK + t + i
                        dot_2(
                            query, r * width, width, kv, offsets, t + i, a, ahead + i, b, score, at
                        )
                    r += 2
                if r < end:
                    at = r * CHUNK + t
                    dot_1(query, r * width, width, kv, offsets, t, a, ahead, b, score, at)
                h += 1

    return _named(scores, prefetch)


def _add_values_of(prefetch):
    wide = LANES // 4
    add_4_wide, add_2_wide, add_1_wide = (
        make_add(4, wide, prefetch),
        make_add(2, wide, prefetch),
        make_add(1, wide, prefetch),
    )
    add_4, add_2, add_1 = (
        make_add(4, 1, prefetch),
        make_add(2, 1, prefetch),
        make_add(1, 1, prefetch),
    )
    much = wide * LANES

    def add_values(weight, heads, rows, width, kv, offsets, n, step, shift, back, sums):
        """Add weighted values of n tokens to the sums of all rows of some heads, `step` at a time.

        `shift` leads from K of a token to V of the first head, and `back` from V to K.
        """
        for t in range(0, n, step):
            ahead, start = t + step, shift
            if ahead >= n:
                ahead, start = CHUNK, shift - back
            some = min(step, n - t)
            for h in range(heads):
                d = 0
                while d < width:
                    a, b = shift + h * width + d, start + h * width + d
                    r, end = h * rows, h * rows + rows
                    if d + much <= width:
                        while r + 4 <= end:
                            w, to = r * CHUNK + t, r * width + d
                            add_4_wide(
                                weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width
                            )
                            r += 4
                        if r + 2 <= end:
                            w, to = r * CHUNK + t, r * width + d
                            add_2_wide(
                                weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width
                            )
                            r += 2
                        if r < end:
                            w, to = r * CHUNK + t, r * width + d
                            add_1_wide(
                                weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width
                            )
                        d += much
                    else:
                        while r + 4 <= end:
                            w, to = r * CHUNK + t, r * width + d
                            add_4(weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width)
                            r += 4
                        if r + 2 <= end:
                            w, to = r * CHUNK + t, r * width + d
                            add_2(weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width)
                            r += 2
                        if r < end:
                            w, to = r * CHUNK + t, r * width + d
                            add_1(weight, w, kv, offsets, t, some, a, ahead, b, sums, to, width)
                        d += LANES

    return _named(add_values, prefetch)


scores_in_place, scores_staged = _scores_of(True), _scores_of(False)
add_values_in_place, add_values_staged = _add_values_of(True), _add_values_of(False)


@njit(error_model="numpy")
def softmax(score, best, total, sums, rows, n, width):
    """Turn scores into weights against the running maximum; rescale the sums so far.

    `n` is a multiple of LANES.
    """
    for r in range(rows):
        at = r * CHUNK
        top = largest(score, at, n)
        if top > best[r]:
            shrink = exp(best[r] - top)
            best[r] = top
            total[r] *= shrink
            for d in range(r * width, r * width + width):
                sums[d] *= shrink
        total[r] += exp_and_sum(score, at, n, best[r])


@njit(error_model="numpy")
def scale_tokens(score, heads, rows, n, offsets, scales, factors):
    """Multiply scores, or weights, of n tokens by their scales.

    `scales`: address of the first head's scale of the token at offset 0, in bytes as `offsets` are;
    `factors`: scratch memory, n float32.
    """
    for h in range(heads):
        for t in range(n):
            factors[t] = float32_at(scales + offsets[t])[h]
        for r in range(h * rows, h * rows + rows):
            for t in range(n):
                score[r * CHUNK + t] *= factors[t]


@njit(error_model="numpy")
def clear(best, total, sums, rows, width):
    """Reset maxima, totals and sums, as before the first token."""
    for r in range(rows):
        best[r] = _NONE
        total[r] = ZERO
    for d in range(rows * width):
        sums[d] = ZERO


@njit(error_model="numpy")
def merge(best, total, sums, best_2, total_2, sums_2, rows, width):
    """Add the second sums to the first."""
    for r in range(rows):
        top = max(best[r], best_2[r])
        one, two = exp(best[r] - top), exp(best_2[r] - top)
        best[r] = top
        total[r] = total[r] * one + total_2[r] * two
        for d in range(r * width, r * width + width):
            sums[d] = sums[d] * one + sums_2[d] * two


@njit(error_model="numpy")
def copy_sums(best, total, sums, to, rows, width):
    """Write a split's sums, maxima and totals into its slot at `to`."""
    for d in range(rows * width):
        to[d] = sums[d]
    for r in range(rows):
        to[rows * width + r] = best[r]
        to[rows * width + rows + r] = total[r]
