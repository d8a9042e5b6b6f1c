"""The fast path of a GPU, on CPU tensors: against transformers' eager modules, and the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.errors import BrokenPromise, UnsupportedModel
from ballast.core.job import SequenceWork
from ballast.kernels.plain.attention import PlainAttention
from ballast.models.gpu.executor import GpuTransformersModel
from ballast.models.gpu.fused import GpuFusedModel
from tests.models.fused.test_fused import FAMILIES, checkpoint, close, expected, tokens_of
from tests.models.tiny import GREEDY, Served, llama


def served_fused(path: Path, **settings: Any) -> Served:
    made = Served(path, attention=PlainAttention, model_impl="fused", **settings)
    assert isinstance(made.model, GpuFusedModel)
    return made


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda v: v.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[tuple[Any, Served]]:
    path = tmp_path_factory.mktemp("fused")
    reference = checkpoint(path, request.param)
    served = served_fused(path)
    yield reference, served
    served.close()


@pytest.mark.parametrize("one_row", [False, True])
def test_its_logits_are_those_of_transformers(pair: tuple[Any, Served], one_row: bool) -> None:
    """A prompt in chunks, decodes, and a job of both with a chunk that samples nothing."""
    reference, served = pair
    served.model._one_row = one_row  # type: ignore[union-attr]
    a, b = tokens_of(74, 1), tokens_of(30, 2)
    logits, other = expected(reference, a), expected(reference, b)
    table = [8, 3, 11, 1, 6]
    for start, end in ((0, 5), (5, 70), (70, 71)):
        work = SequenceWork("a", a[start:end].tolist(), start, table, GREEDY)
        close(served.logits(work), logits[end - 1 : end])
    served.logits(SequenceWork("b", b[:9].tolist(), 0, [2, 4], None))
    ours = served.logits(
        SequenceWork("b", b[9:25].tolist(), 9, [2, 4], None),
        SequenceWork("a", [int(a[71])], 71, table, GREEDY),
    )
    close(ours, logits[71:72])
    ours = served.logits(
        SequenceWork("a", [int(a[72])], 72, table, GREEDY),
        SequenceWork("b", b[25:].tolist(), 25, [2, 4], GREEDY),
    )
    close(ours, torch.stack([logits[72], other[-1]]))


def test_hidden_states_are_those_of_the_generic_path(pair: tuple[Any, Served]) -> None:
    reference, served = pair
    tokens = tokens_of(11, 3)
    job = [SequenceWork("c", tokens.tolist(), 0, [30], None, embed=True)]
    with torch.no_grad():
        result = reference.model(tokens[None], use_cache=False).last_hidden_state[0, -1:]
    torch.testing.assert_close(served.model.hidden(job), result, rtol=0, atol=1e-4)


def test_bfloat16_is_rounded_where_transformers_rounds(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3", torch.bfloat16)
    fused, generic = served_fused(tmp_path), Served(tmp_path, attention=PlainAttention)
    assert isinstance(generic.model, GpuTransformersModel)
    work = SequenceWork("a", tokens_of(50).tolist(), 0, [0, 1, 2, 3], GREEDY)
    ours, theirs = fused.logits(work), generic.logits(work)
    # What differs is the order of sums in the matrices.
    assert (ours - theirs).norm() < 0.02 * theirs.norm()
    fused.close()
    generic.close()


def test_what_it_does_not_know_is_left_to_the_generic_path(tmp_path: Path) -> None:
    llama(tmp_path, mlp_bias=True)
    with pytest.raises(UnsupportedModel, match="fused"):
        served_fused(tmp_path)
    served = Served(tmp_path, attention=PlainAttention, model_impl="auto")
    assert isinstance(served.model, GpuTransformersModel)
    served.close()


def test_weights_that_lie_as_a_cpu_wants_them_are_refused(tmp_path: Path) -> None:
    llama(tmp_path)
    with pytest.raises(BrokenPromise, match="of CPUs"):
        served_fused(tmp_path, linear="packed")
