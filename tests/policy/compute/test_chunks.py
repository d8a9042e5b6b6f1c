"""Chunks of prompts as small as levels allow (C2CServe, 6.3)."""

from __future__ import annotations

import math

import pytest

from ballast.core.compute import ComputeView, DecodeView, PromptView, Runnable, WorkView
from ballast.core.cost import StepCosts
from ballast.core.request import Precedence
from ballast.policy.compute.chunks import Chunks, smallest_chunk
from ballast.policy.compute.deadline import Deadline

# A pass takes 40 ms at least, and 0.1 ms a token beyond 400 tokens: small chunks cost more in all.
COSTS = StepCosts(0.04, 1e-4, 0.0, 0.0, 0.0, hidden=0.04, floor=0.04)
MOST = 2048


def prompt(tokens: int, due: float, n: int = 1, pace: float = 0.01) -> PromptView:
    return PromptView(Precedence(0, 0.0, n), tokens, 0, due, 0.0, 10, pace)


def decode(pace: float) -> DecodeView:
    return DecodeView(Precedence(0, 0.0, 0), 1.0, 0.5, 1.0, 3, 10, pace, 100)


def work(*prompts: PromptView, decodes: tuple[DecodeView, ...] = ()) -> WorkView:
    return WorkView("m", COSTS, decodes, prompts)


@pytest.mark.parametrize(
    ("due", "chunk"),
    [(2.0, 128), (0.65, 128), (0.63, 256), (0.33, 256), (0.31, 512), (0.205, 512)],
)
def test_the_smallest_chunk_in_time_is_taken(due: float, chunk: int) -> None:
    # 2,048 tokens in chunks of 128, 256, 512: 0.64, 0.32 and 0.205 s.
    assert smallest_chunk(work(prompt(2048, due)), 0.0, MOST) == chunk


def test_where_none_is_in_time_the_quickest_is() -> None:
    late = smallest_chunk(work(prompt(2048, -math.inf)), 0.0, MOST)
    assert late >= 512


def test_prompts_behind_it_count() -> None:
    assert smallest_chunk(work(prompt(1024, 0.7)), 0.0, MOST) == 128
    behind = [prompt(1024, 0.7, n) for n in range(3)]
    assert smallest_chunk(work(*behind), 0.0, MOST) == 256


def test_a_chunk_does_not_hold_streams_beyond_their_pace() -> None:
    tight = work(prompt(2048, 0.25), decodes=(decode(0.06),))
    assert smallest_chunk(tight, 0.0, MOST) != 1024
    assert smallest_chunk(work(prompt(2048, 9.0), decodes=(decode(0.05),)), 0.0, MOST) == 128


@pytest.mark.parametrize(("pace", "chunk"), [(0.1, 128), (0.2, 256), (0.5, 512), (3.0, 2048)])
def test_weights_are_read_no_more_often_than_once_per_tpot(pace: float, chunk: int) -> None:
    assert smallest_chunk(work(prompt(2048, 2.0, pace=pace)), 0.0, MOST) == chunk


def test_the_order_is_that_of_deadline() -> None:
    own = work(prompt(2048, 5.0))
    first = Precedence(0, 0.0, 1)
    view = ComputeView(0.0, MOST, (Runnable("m", -math.inf, first),), lambda model: own)
    plain, chunked = Deadline()(view, None), Chunks()(view, None)
    assert (plain.model, chunked.model, chunked.prompt_tokens) == ("m", "m", 128)
    assert Chunks(whole=1)(view, None) == plain
