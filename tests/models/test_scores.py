"""Prompt scores and embeddings on both paths, against transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ballast.core.event import EmbeddingOutput, PromptScoresOutput
from ballast.core.job import SampledToken, Scoring, SequenceWork
from ballast.core.request import Sampling
from tests.models.tiny import GREEDY, Served, llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("scores")
    return path, llama(path, tie_word_embeddings=True)


@pytest.fixture(params=["generic", "fused"])
def served(request: pytest.FixtureRequest, checkpoint: tuple[Path, Any]) -> Iterator[Served]:
    made = Served(checkpoint[0], model_impl=request.param)
    yield made
    made.close()


def tokens_of(n: int, seed: int) -> list[int]:
    found: list[int] = torch.randint(
        331, (n,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return found


def test_scores_are_those_of_transformers(served: Served, checkpoint: tuple[Path, Any]) -> None:
    a, b = tokens_of(30, 1), tokens_of(21, 2)
    first = [
        SequenceWork("a", a[:17], 0, [0, 1], None, scoring=Scoring(1, a[1:18], 3)),
        SequenceWork("b", b, 0, [2, 3], GREEDY),
    ]
    then = [
        SequenceWork("b", [7], 21, [2, 3], Sampling(logprobs=2)),
        SequenceWork("a", a[17:], 17, [0, 1], GREEDY, scoring=Scoring(18, a[18:], 3)),
    ]
    results = [*served.model.run(first), *served.model.run(then)]
    with torch.inference_mode():
        exact = checkpoint[1](torch.tensor([a])).logits[0].double().log_softmax(-1)
        other = checkpoint[1](torch.tensor([[*b, 7]])).logits[0].double().log_softmax(-1)
    parts = [r for r in results if isinstance(r, PromptScoresOutput)]
    assert [(p.request_id, p.start, len(p.logprobs)) for p in parts] == [
        ("a", 1, 17),
        ("a", 18, 12),
    ]
    result = [v for p in parts for v in p.logprobs]
    assert result == pytest.approx([float(exact[i, t]) for i, t in enumerate(a[1:])], abs=1e-4)
    tops = [top for p in parts for top in p.top]
    for i, top in enumerate(tops):
        order = exact[i].topk(3)
        assert [t for t, _ in top] == order.indices.tolist()
        assert [v for _, v in top] == pytest.approx(order.values.tolist(), abs=1e-4)
    sampled = {(r.request_id, r.logprob is None): r for r in results if isinstance(r, SampledToken)}
    assert sampled["a", True].token == int(exact[-1].argmax())
    assert sampled["b", True].token == int(other[-2].argmax())
    likeliest = sampled["b", False].top
    assert [t for t, _ in likeliest] == other[-1].topk(2).indices.tolist()


def test_embeddings_are_the_last_tokens_hidden_state(
    served: Served, checkpoint: tuple[Path, Any]
) -> None:
    a, b, c = tokens_of(30, 3), tokens_of(5, 4), tokens_of(9, 5)
    served.model.run([SequenceWork("a", a[:13], 0, [0, 1], None)])
    results = served.model.run(
        [
            SequenceWork("b", b, 0, [2], None, embed=True),
            SequenceWork("c", c, 0, [3], GREEDY),
            SequenceWork("a", a[13:], 13, [0, 1], None, embed=True),
        ]
    )
    found = {r.request_id: r for r in results}
    for name, tokens in (("a", a), ("b", b)):
        with torch.inference_mode():
            hidden = checkpoint[1].model(torch.tensor([tokens])).last_hidden_state[0, -1]
        embedded = found[name]
        assert isinstance(embedded, EmbeddingOutput)
        values = np.frombuffer(embedded.values, "<f4")
        np.testing.assert_allclose(values, (hidden / hidden.norm()).numpy(), atol=1e-5)
        assert np.linalg.norm(values) == pytest.approx(1.0)
    sampled = found["c"]
    assert isinstance(sampled, SampledToken)
    with torch.inference_mode():
        assert sampled.token == int(checkpoint[1](torch.tensor([c])).logits[0, -1].argmax())
