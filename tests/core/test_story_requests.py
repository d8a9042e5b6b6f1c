"""The requests of a story: numbers in order of arrival, digests of full blocks, no token."""

from __future__ import annotations

from typing import Any

from ballast.core.event import CancelledOutput, FailedOutput, TokenOutput
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.story_requests import StoryRequests

SIZE = 16
SPEC = ModelSpec(
    name="m",
    n_layers=2,
    n_heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=64,
    intermediate=128,
    vocab=256,
    dtype="float32",
    max_model_len=256,
    block_tokens=SIZE,
    segment_bytes=(1,),
    fingerprint="0",
)


def requests(caches_prefixes: bool = True) -> StoryRequests:
    made = StoryRequests(b"key")
    made.caches_prefixes = caches_prefixes
    made.add_model(SPEC)
    return made


def submission(name: str, tokens: int) -> Submission:
    return Submission(id=name, model="m", prompt=tuple(range(tokens)), max_tokens=9)


def test_an_id_that_is_open_already_is_numbered_and_stays_open() -> None:
    made = requests()
    first: dict[str, Any] = {}
    made.add_arrival(first, submission("r", SIZE))
    again: dict[str, Any] = {}
    made.add_arrival(again, submission("r", SIZE))
    assert (first["n"], again["n"]) == (0, 1)
    assert first["blocks"]
    assert "blocks" not in again
    assert again["open_already"]
    refusal = made.end([FailedOutput("r", "duplicate", "tokens 1 2 3")], refused=True)
    assert refusal == [{"request": "r", "failed": "duplicate"}]
    assert made.end([CancelledOutput("r")]) == [{"request": "r", "n": 0, "failed": "cancelled"}]
    assert not made.open


def test_a_block_is_digested_by_the_token_that_fills_it() -> None:
    made = requests()
    made.add_arrival({}, submission("r", SIZE - 1))
    whole: dict[str, Any] = {}
    made.add_arrival(whole, submission("whole", SIZE))
    filled = made.filled_by([TokenOutput("r", SIZE - 1, 0)])
    assert filled == {"0": whole["blocks"]}, "the same tokens have the same digest"
    assert made.filled_by([TokenOutput("r", 5, 1)]) == {}


def test_without_a_prefix_cache_nothing_is_digested() -> None:
    made = requests(caches_prefixes=False)
    entry: dict[str, Any] = {}
    made.add_arrival(entry, submission("r", 2 * SIZE))
    assert "blocks" not in entry
    assert made.filled_by([TokenOutput("r", 1, 0)]) == {}
