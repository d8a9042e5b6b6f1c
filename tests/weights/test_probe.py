"""What masks let through, found by looking into them; what a module asks for, by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GptOssConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from ballast.weights.meta_module import build_module
from ballast.weights.probe import Mask, ProbeResult, _look_into, probe
from ballast.weights.weightless import make_weightless, replace_linears
from benchmarks.families import config

NO = Mask(False)
MASKS: dict[str, tuple[Callable[..., Any], Mask]] = {
    "causal": (causal_mask_function, Mask(True)),
    "window": (sliding_window_causal_mask_function(8), Mask(True, 8)),
    "window of one": (sliding_window_causal_mask_function(1), Mask(True, 1)),
    "window of all but one": (sliding_window_causal_mask_function(99), Mask(True, 99)),
    "window of all": (sliding_window_causal_mask_function(100), Mask(True)),
    "two windows": (
        and_masks(sliding_window_causal_mask_function(8), sliding_window_causal_mask_function(5)),
        Mask(True, 5),
    ),
    "chunks": (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)), NO),
    "encoder": (bidirectional_mask_function, NO),
    "encoder's window": (sliding_window_bidirectional_mask_function(8), NO),
    "window and first token": (
        or_masks(sliding_window_causal_mask_function(8), lambda b, h, q, k: (k == 0) & (q > -1)),
        NO,
    ),
    "nothing": (lambda b, h, q, k: k < 0, NO),
    "broken": (lambda b, h, q, k: k.nowhere, NO),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    function, expected = MASKS[name]
    assert _look_into(function, 100) == expected


def run(config: Any) -> ProbeResult:
    module = build_module(config)
    replace_linears(module)
    make_weightless(module, "model")
    return probe(module, 512)


def test_calls() -> None:
    seen = run(config("gemma2"))
    assert [c.layer for c in seen.calls] == [0, 1, 2]
    assert [c.window for c in seen.calls] == [24, None, 24]
    assert [c.mask for c in seen.calls] == [Mask(True, 24), Mask(True), Mask(True, 24)]
    first = seen.calls[0]
    assert (first.query, first.key, first.value) == ((1, 4, 3, 16), (1, 2, 3, 16), (1, 2, 3, 16))
    assert (first.scale, first.softcap, first.more) == (0.25, 2.0, ())
    assert seen.logits == (1, 1, 1000)
    assert seen.experts_per_token == seen.expert_intermediate == 0


def test_experts_and_sinks() -> None:
    seen = run(config("mixtral"))
    assert (seen.experts_per_token, seen.expert_intermediate) == (3, 96)
    small = GptOssConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=200,
    )
    seen = run(small)
    assert all((c.sinks, c.more) == ((4,), ()) for c in seen.calls)
    assert (seen.experts_per_token, seen.expert_intermediate) == (2, 48)
