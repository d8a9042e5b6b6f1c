"""A model over several ranks of GPUs, on CPU tensors, against the same on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.job import SequenceWork
from ballast.kernels.plain.attention import PlainAttention
from tests.models.fused.test_fused import checkpoint, close, expected, tokens_of
from tests.models.ranks import Group
from tests.models.tiny import GREEDY, Served, llama


@pytest.fixture(params=["llama tied", "llama biases, scaled", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Group]]:
    """(transformers' model, ours on two ranks)."""
    reference = checkpoint(tmp_path / "model", request.param)
    group = Group(tmp_path / "model", tmp_path / "meeting", 2, PlainAttention)
    yield reference, group
    group.close()


def test_its_logits_are_those_of_the_whole_model(pair: tuple[Any, Group]) -> None:
    """Of a prompt in chunks, one of which samples nothing; of all tokens, also the last rank's."""
    reference, group = pair
    tokens = tokens_of(42)
    logits = expected(reference, tokens)
    blocks = [2, 0, 5]
    for start, end, sample in ((0, 9, None), (9, 41, GREEDY), (41, 42, GREEDY)):
        work = SequenceWork("a", tokens[start:end].tolist(), start, blocks, sample)
        found = group.first.logits(work)
        if sample is None:
            assert found.shape == (0, 331)
        else:
            close(found, logits[end - 1 : end])


def test_hidden_states_are_those_of_the_whole_model(tmp_path: Path) -> None:
    llama(tmp_path / "model")
    whole = Served(tmp_path / "model", attention=PlainAttention)
    group = Group(tmp_path / "model", tmp_path / "meeting", 2, PlainAttention)
    work = [SequenceWork("a", tokens_of(20).tolist(), 0, [3, 1], None, embed=True)]
    torch.testing.assert_close(
        group.first.model.hidden(work), whole.model.hidden(work), rtol=0, atol=1e-4
    )
    whole.close()
    group.close()


def test_in_float32_parts_are_added_in_the_order_of_ranks(tmp_path: Path) -> None:
    """On three ranks, numbers for which any other order gives another sum."""
    llama(tmp_path / "model", num_attention_heads=6, num_key_value_heads=3, hidden_size=96)
    group = Group(tmp_path / "model", tmp_path / "meeting", 3, PlainAttention)
    own = [torch.tensor([[x]]) for x in (1.0, 1e8, -1e8)]
    sums = group.each(lambda rank, model: model._sum(own[rank].clone()))
    assert [s.item() for s in sums] == [0.0] * 3, "the last two alone make 0, and all of them 1"
    group.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_those_of_one_rank(tmp_path: Path, dtype: str) -> None:
    llama(tmp_path / "model")
    prompts = [tokens_of(n, n).tolist() for n in (1, 9, 33)]
    one = Served(tmp_path / "model", attention=PlainAttention, model_impl="auto", dtype=dtype)
    group = Group(tmp_path / "model", tmp_path / "meeting", 2, PlainAttention, dtype=dtype)
    if dtype == "float32":
        assert group.first.generate(prompts, 12, chunk=7) == one.generate(prompts, 12, chunk=7)
    else:
        # The sum of two rounded parts is not that of one product.
        work = [
            SequenceWork(str(i), p, 0, [3 * i, 3 * i + 1, 3 * i + 2], GREEDY)
            for i, p in enumerate(prompts)
        ]
        ours, theirs = group.first.logits(*work), one.logits(*work)
        assert (ours - theirs).abs().mean() < 0.02 * theirs.std()
    one.close()
    group.close()
