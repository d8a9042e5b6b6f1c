"""Cut requests to a number of tokens, and say what was cut.

A prompt whose blocks are known is cut as agents compact a conversation that outgrows its context:
its head stays, and so does its newest part, which grows until it has to be halved again. Cut at its
end, all later turns of a session would be one and the same prompt. Used by `workload.workload`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ballast.core.units import ceil_div

HEAD = 0.25
"""Share of a cut prompt that is its head; the rest is its newest part."""

CUT = "cut to at most"
"""A label with it says what was cut."""


class CutPrompt(NamedTuple):
    """What is left of a prompt."""

    tokens: int
    blocks: tuple[int, ...]


def cut_prompt(tokens: int, blocks: tuple[int, ...], size: int, most: int) -> CutPrompt:
    """Cut a prompt of blocks of `size` tokens to at most `most`; whole blocks are left out."""
    if tokens <= most:
        return CutPrompt(tokens, blocks)
    room = most // size
    head = max(1, round(HEAD * room))
    half = max(1, (room - head) // 2)
    left_out = ceil_div(ceil_div(tokens - most, size), half) * half
    if room < 2 or head + left_out >= len(blocks):
        return CutPrompt(most, blocks[: ceil_div(most, size)])
    return CutPrompt(tokens - left_out * size, blocks[:head] + blocks[head + left_out :])


def cut_text(what: str, lengths: Sequence[int], cut: Sequence[int], most: int) -> str:
    """Say how many of the `lengths` have become shorter, and from what to what; empty if none."""
    pairs = [(a, b) for a, b in zip(lengths, cut, strict=True) if b < a]
    if not pairs:
        return ""
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    n = len(pairs)
    return (
        f"{n} of {len(lengths)} {what}s {CUT} {most:,} tokens: "
        f"from {sum(before) / n:,.0f} on average (longest {max(before):,}) to {sum(after) / n:,.0f}"
    )
