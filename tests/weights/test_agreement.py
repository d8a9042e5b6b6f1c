"""What computes something else in our batches than `transformers` does is found, and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaModel

from ballast.core.errors import UnsupportedModel
from ballast.weights.agreement import Case, cases, layers_to_run
from ballast.weights.inspection import inspect_model
from ballast.weights.meta_module import build_module
from ballast.weights.weightless import make_weightless, replace_linears
from benchmarks.families import config
from benchmarks.tiny import tiny

OTHERS = "are others in a batch"
FROM_PADDING = ("camembert", "data2vec-text", "roberta", "xmod")
FROM_THE_CACHE = ("bart", "blenderbot", "marian")
VIEWING = ("afmoe", "jetmoe")
"""They view the result of attention, which has to be contiguous."""


@pytest.mark.parametrize("kind", [*FROM_PADDING, *FROM_THE_CACHE, *VIEWING])
def test_decoders_that_count_positions_themselves_are_given_them(kind: str) -> None:
    config = tiny(kind)
    config.is_encoder_decoder = False  # as of its decoder alone
    assert inspect_model(config).positions == 512 - (kind in FROM_PADDING)


def test_a_temperature_by_positions_that_the_model_counts_itself() -> None:
    """Llama 4 without chunks: within 100 tokens nothing differs, and all may be served."""
    late = {"no_rope_layers": [0, 1, 0], "floor_scale": 100}
    with pytest.raises(UnsupportedModel, match=rf"at positions 256 to 260 {OTHERS}"):
        inspect_model(tiny("llama4_text", **late))
    assert inspect_model(tiny("llama4_text", **late), 96).positions == 512


def test_rotation_by_the_order_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaModel.forward

    def counting(self: Any, *arguments: Any, position_ids: Any = None, **more: Any) -> Any:
        return forward(self, *arguments, **more)

    inspect_model(config("llama"))
    monkeypatch.setattr(LlamaModel, "forward", counting)
    with pytest.raises(UnsupportedModel, match=OTHERS):
        inspect_model(config("llama"))


def test_a_step_that_mixes_sequences_beside_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def mixing(self: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = forward(self, x)
        return found + found.cumsum(1) / 8

    monkeypatch.setattr(LlamaMLP, "forward", mixing)
    with pytest.raises(UnsupportedModel, match=OTHERS):
        inspect_model(config("llama"))


def test_an_error_in_our_batches_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaModel.forward

    def strict(self: Any, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is not None and (position_ids.diff() != 1).any():
            raise ValueError("one sequence at a time")
        return forward(self, input_ids=input_ids, position_ids=position_ids, **more)

    monkeypatch.setattr(LlamaModel, "forward", strict)
    with pytest.raises(UnsupportedModel, match="batches of ours: ValueError: one sequence"):
        inspect_model(config("llama"))


def test_every_length_of_context_has_cases() -> None:
    for positions in (1, 2, 7, 8, 31, 32, 512, 10**7):
        tried = cases(positions)
        assert all(0 <= case.cut <= case.length <= positions - case.start for case in tried)
        assert all(case.length for case in tried)
        assert max(case.start + case.length for case in tried) == min(
            positions, 7 if positions < 32 else positions
        )
    assert cases(512)[1] == Case(256, 5, 3)


@pytest.mark.parametrize(
    ("kinds", "n"),
    [("a" * 80, 5), ("aaaaaaab", 8), ("ab" * 20, 5), ("abc", 3), ("a" * 9 + "b" * 9, 10)],
)
def test_every_kind_of_layer_is_run(kinds: str, n: int) -> None:
    assert layers_to_run(kinds) == n
    assert set(kinds[:n]) == set(kinds)


def test_weightless_modules_take_no_memory_for_their_weights() -> None:
    """At the size of the largest models: 2.6 TB of float32."""
    sizes = {
        "hidden_size": 1 << 16,
        "intermediate_size": 1 << 19,
        "vocab_size": 1 << 18,
        "num_hidden_layers": 4,
        "num_attention_heads": 512,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    module = build_module(config("llama", **sizes))
    assert sum(p.numel() for p in module.parameters()) > 4e11
    replace_linears(module)
    make_weightless(module, "llama")
    held = {
        storage.data_ptr(): storage.nbytes()
        for tensor in (*module.parameters(), *module.buffers())
        for storage in [tensor.untyped_storage()]
    }
    assert sum(held.values()) < 1e8


def test_weightless_modules_keep_what_is_tied_and_their_buffers() -> None:
    module: Any = build_module(config("gemma2", tie_word_embeddings=True))
    replace_linears(module)
    make_weightless(module, "gemma2")
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert module.model.rotary_emb.inv_freq.device.type == "cpu"
    assert not torch.equal(*(module.model.embed_tokens.weight[i] for i in (3, 4)))
    assert isinstance(module, nn.Module)
