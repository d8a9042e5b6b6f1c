"""A sequence for which a model computes NaN ends by itself; so does one with an unknown token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ballast.core.errors import BrokenPromise
from ballast.core.event import EmbeddingOutput, FailedOutput, PromptScoresOutput
from ballast.core.job import SampledToken, Scoring, SequenceWork
from ballast.core.request import Sampling
from ballast.kernels.plain.attention import PlainAttention
from tests.models.tiny import GREEDY, Served, llama

BAD = 13
"""Token whose embedding is NaN."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nan")
    llama(path, tie_word_embeddings=False)
    return path


def poison(served: Served) -> None:
    """Make NaN of one token's embedding, on the device: as of the file it would be refused."""
    [table] = [t for t in served.host.segments[0].tensors if t.shape == (331, 64)]
    place = slice(table.offset + BAD * 64 * 4, table.offset + (BAD + 1) * 64 * 4)
    served.weights[0][place] = 0xFF


@pytest.fixture(params=["generic", "fused", "of a GPU"])
def served(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Served]:
    if request.param == "of a GPU":
        made = Served(checkpoint, model_impl="fused", attention=PlainAttention)
    else:
        made = Served(checkpoint, model_impl=request.param)
    poison(made)
    yield made
    made.close()


@pytest.mark.parametrize("p", [GREEDY, Sampling(temperature=1.0, seed=1, top_p=0.9)])
def test_it_ends_with_a_named_error_and_the_others_are_as_without_it(
    served: Served, p: Sampling
) -> None:
    def work(token: int) -> list[SequenceWork]:
        return [
            SequenceWork("a", [5, 6, 7], 0, [0], p),
            SequenceWork("b", [5, token, 7], 0, [1], p),
            SequenceWork("c", [5, token, 7], 0, [2], None, scoring=Scoring(1, [token, 7], 2)),
            SequenceWork("d", [5, token], 0, [3], None, embed=True),
            SequenceWork("e", [8, 9], 0, [4], None, embed=True),
            SequenceWork("f", [5, token, 9], 0, [5], p, scoring=Scoring(1, [token, 9], 2)),
            SequenceWork("g", [5, 9, 8], 0, [6], p, scoring=Scoring(1, [9, 8], 2)),
        ]

    sound = served.model.run(work(7))
    results = served.model.run(work(BAD))
    failed = {r.request_id: r for r in results if isinstance(r, FailedOutput)}
    assert sorted(failed) == ["b", "c", "d", "f"]
    assert {r.code for r in failed.values()} == {"not_finite"}
    assert all(repr(served.spec.name) in r.reason for r in failed.values())
    assert [r for r in results if r.request_id in "aeg"] == [
        r for r in sound if r.request_id in "aeg"
    ]
    assert len(results) == 8  # one for each, and scores and a token for g
    kinds = {type(r) for r in results if r.request_id in "aeg"}
    assert kinds == {SampledToken, EmbeddingOutput, PromptScoresOutput}


@pytest.mark.parametrize("token", [-1, 331, 2**40])
def test_no_unknown_token_reaches_a_kernel(served: Served, token: int) -> None:
    with pytest.raises(BrokenPromise, match="x: a token is outside of the 331 known"):
        served.model.run([SequenceWork("x", [1, token], 0, [0], GREEDY)])


def test_blocks_that_held_nan_do_no_harm(served: Served) -> None:
    """A block of a request that ended so is used again by another one."""
    fresh = served.model.run([SequenceWork("a", [5, 6, 7], 0, [9], GREEDY)])
    served.model.run([SequenceWork("b", [5, *[BAD] * 15], 0, [0], GREEDY)])
    assert served.model.run([SequenceWork("a", [5, 6, 7], 0, [0], GREEDY)]) == fresh
    assert torch.isfinite(served.logits(SequenceWork("c", [1, 2], 0, [0], GREEDY))).all()
