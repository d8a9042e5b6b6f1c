"""Find the best Gumbel-max score of each block of a row's tokens, with its error: a Triton kernel.

Noise is that of `sampling.py`, from the same counters; scores are float32, and every score comes
with a bound of how far it can be from the score that `sampling.py` computes in float64. With
a = logit / temperature and g the noise, the bound is

    2^-21 |a| + 2^-18 (1 + |g|)

- a: 1 / temperature and the product are rounded, each by 2^-24 |a|; so is a + g, by
  2^-24 (|a| + |g|), and the score plus or minus its bound, by as much again: in all
  2^-22 |a| + 2^-23 |g|.
- g = -log(e), e = -log(u). A logarithm is taken to be within 2^-20 max(1, |result|): CUDA documents
  one unit in the last place for `logf`, PTX 2^-22 for `lg2.approx`. Where u >= 1/2, which the best
  scores have, e comes from 1 - u by the series of atanh, and is within 2^-20 of itself. Where
  u < 1/2, e = -log(u) is at least 0.69, and is within 2^-19 of itself. So g is within
  2^-19 + 2^-20 max(1, |g|).

Together they are at most 2^-22 |a| + 3/4 2^-18 (1 + |g|). The rest covers float64's own rounding,
and is a margin of safety.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(float("-inf"))
LOGIT_ERROR = tl.constexpr(2.0**-21)
NOISE_ERROR = tl.constexpr(2.0**-18)


@triton.jit
def gumbel(c0, c1):
    """-log(-log(u)) for u = (c0 2^20 + c1 / 2^12 + 1/2) / 2^52; c0, c1: uint32, of Philox."""
    low = c1 >> 12
    u = c0.to(tl.float32) * (2.0**-32) + (low.to(tl.float32) + 0.5) * (2.0**-52)
    # 1 - u, from the complement of those 52 bits: as precise near 0 as u is.
    high_left, low_left = c0 ^ 0xFFFFFFFF, low ^ 0xFFFFF
    v = high_left.to(tl.float32) * (2.0**-32) + (low_left.to(tl.float32) + 0.5) * (2.0**-52)
    # -log(1 - v) = 2 atanh(v / (2 - v)); for v <= 1/2 the first term left out is below 2^-29.
    z = v / (2.0 - v)
    y = z * z
    series = 1.0 / 13 + y * (1.0 / 15)
    series = 1.0 / 9 + y * (1.0 / 11 + y * series)
    series = 1.0 / 5 + y * (1.0 / 7 + y * series)
    near = 2.0 * z * (1.0 + y * (1.0 / 3 + y * series))
    return -tl.log(tl.where(c0 >= 0x80000000, near, -tl.log(u)))


@triton.jit
def gumbel_max_code(
    logits,
    rows,
    inverses,
    keys,
    found,
    tokens,
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    """Programs (rows, blocks): one block of BLOCK tokens of row `rows[i]` of `logits` float32.

    `inverses` (rows,) float32: 1 / temperature. `keys` (rows, 3) int64: seed, position, choice, as
    unsigned 64, 32 and 32 bits. `tokens` (rows, blocks) int32: the token with the best score.
    `found` (rows, blocks, 4) float32: its score; what its exact score is at least; what the exact
    score of any token of the block is at most, and of any but that one. What is not a number makes
    the last two infinite.
    """
    i, block = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + i).to(tl.int64)
    inverse = tl.load(inverses + i)
    seed, position = tl.load(keys + i * 3), tl.load(keys + i * 3 + 1).to(tl.uint32)
    choice = tl.load(keys + i * 3 + 2).to(tl.uint32)
    token = block * BLOCK + tl.arange(0, BLOCK)
    there = token < vocab
    x = tl.load(logits + row * row_stride + token, mask=there, other=NOTHING)
    c0 = token.to(tl.uint32)
    zero = c0 ^ c0
    c0, c1, _, _ = tl.philox(seed, c0, zero + position, zero + choice, zero)
    scaled, noise = x * inverse, gumbel(c0, c1)
    score = scaled + noise
    error = tl.abs(scaled) * LOGIT_ERROR + (1.0 + tl.abs(noise)) * NOISE_ERROR
    dead = score == NOTHING
    most = tl.where(dead, NOTHING, score + error)
    most = tl.where(score == score, most, float("inf"))
    score = tl.where(score == score, score, NOTHING)
    best, at = tl.max(score, 0, return_indices=True)
    chosen = tl.arange(0, BLOCK) == at
    least = tl.max(tl.where(chosen & (score != NOTHING), score - error, NOTHING), 0)
    to = i * tl.num_programs(1) + block
    tl.store(tokens + to, block * BLOCK + at)
    tl.store(found + to * 4, best)
    tl.store(found + to * 4 + 1, least)
    tl.store(found + to * 4 + 2, tl.max(most, 0))
    tl.store(found + to * 4 + 3, tl.max(tl.where(chosen, NOTHING, most), 0))
