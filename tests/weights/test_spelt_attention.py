"""Modules that spell their attention out attend by ours, to the tokens of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ballast.core.errors import UnsupportedModel
from ballast.core.job import SequenceWork
from ballast.weights.inspection import inspect_model
from ballast.weights.meta_module import build_module
from ballast.weights.row_call import SPELT
from ballast.weights.spelt_attention import _window_of
from benchmarks.families import make
from benchmarks.tiny import tiny
from tests.models.test_families import of, serve, tokens_of
from tests.models.tiny import GREEDY, Served

SPELLING = (
    *("bloom", "falcon", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "mpt", "mvp"),
    *("openai-gpt", "rembert", "roformer", "trocr", "xglm"),
)


@pytest.mark.parametrize("kind", SPELLING)
def test_it_is_called_for_every_layer(kind: str) -> None:
    config = tiny(kind)
    config.is_encoder_decoder = False  # as of its decoder alone
    assert inspect_model(config).n_layers == 3  # logits are compared there


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "bert", "qwen3_next"])
def test_others_are_left_alone(kind: str) -> None:
    assert SPELT not in vars(build_module(tiny(kind)))


@pytest.mark.parametrize("kind", ["bloom", "falcon", "gpt_neo", "mpt"])
def test_logits_of_chunks_and_steps(kind: str, tmp_path: Path) -> None:
    reference = make(tmp_path, tiny(kind))
    a, b = tokens_of(70, 1), tokens_of(29, 2)
    theirs = torch.stack([of(reference, x) for x in (a, b)])
    assert theirs.std() > 0.5
    torch.testing.assert_close(serve(tmp_path, a, b), theirs, rtol=0, atol=1e-4)


def test_local_attention_is_a_window() -> None:
    assert inspect_model(tiny("gpt_neo")).windows == (None, 24, None)


def test_positions_of_alibi_are_exact_in_sixteen_bits(tmp_path: Path) -> None:
    """As near to float32 as transformers' own bfloat16 is, beyond the integers it represents."""
    reference = make(tmp_path, tiny("bloom"))
    tokens = tokens_of(400, 3)
    exact = of(reference, tokens)
    theirs = of(reference.to(torch.bfloat16), tokens).float()
    served = Served(tmp_path, dtype="bfloat16")
    table = served.table(range(26))
    served.logits(SequenceWork("a", tokens[:-1].tolist(), 0, table, None))
    ours = served.logits(SequenceWork("a", tokens[-1:].tolist(), 399, table, GREEDY))[0]
    served.close()
    assert (ours - exact).abs().mean() < 2 * (theirs - exact).abs().mean()


def test_masks_of_their_own() -> None:
    past = torch.ones(1, 1, 6, 6).tril()
    assert _window_of(past) is None
    assert _window_of(past - past.tril(-2)) == 2
    for other in (past.flip(-1), past.tril(-1), torch.ones(6, 6)):
        with pytest.raises(UnsupportedModel, match="a mask of its own"):
            _window_of(other)


def test_a_context_that_only_the_operator_bounds() -> None:
    config = tiny("bloom")
    del config.seq_length
    with pytest.raises(UnsupportedModel, match="set max_model_len"):
        inspect_model(config)
    assert inspect_model(config, 300).positions == 300


def test_heads_that_are_repeated_are_kept_once() -> None:
    found = inspect_model(tiny("falcon", new_decoder_architecture=True))
    assert (found.heads, found.kv_heads) == (4, 2)


def test_positions_are_not_rounded_to_8_bits(tmp_path: Path) -> None:
    make(tmp_path, tiny("mpt"))
    with pytest.raises(UnsupportedModel, match="kv_dtype int8: its keys hold positions"):
        Served(tmp_path, kv_dtype="int8")
