"""Sampling: exact where greedy, distributed as asked where not, the same wherever it happens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
)

from ballast.core.request import Sampling
from ballast.kernels.sampling import SamplingContext, philox, sample, shaped


def draw(logits: torch.Tensor, p: Sampling, n: int) -> np.ndarray:
    """How often each token came at positions 0 .. n-1."""
    rows = logits.expand(n, -1).contiguous()
    tokens, _ = sample(rows, [p] * n, range(n))
    return np.bincount(tokens, minlength=logits.numel())


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    """Of tokens that are expected at all."""
    kept = expected > 0
    assert found[~kept].sum() == 0
    return float(((found[kept] - expected[kept]) ** 2 / expected[kept]).sum())


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    numbers = [np.uint64(x) for x in (*counter, *key)]
    assert tuple(int(x) for x in philox(*numbers)) == expected


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-3.0, -2.0, -9.0, -2.5]])
    assert sample(logits, [Sampling()] * 3, [7, 8, 9]) == ([1, 0, 1], {})


def test_log_probabilities_are_of_the_raw_logits_and_only_where_asked() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50) * 3
    params = [
        Sampling(logprobs=0),
        Sampling(temperature=0.3, top_k=4, seed=1),
        Sampling(temperature=2.0, top_p=0.5, seed=2, logprobs=0),
    ]
    tokens, scores = sample(logits, params, [1, 2, 3])
    exact = logits.double().log_softmax(-1)
    assert set(scores) == {0, 2}
    for i, (logprob, top) in scores.items():
        assert logprob == pytest.approx(float(exact[i, tokens[i]]), abs=1e-5)
        assert top == ()


# Expected tokens draws 20,000 each: with fixed seeds these are facts, not chances; the bounds are
# the 99.9 % quantiles of the distribution.
@pytest.mark.parametrize(
    ("p", "bound"),
    [
        (Sampling(temperature=1.0, seed=1), 36.1),
        (Sampling(temperature=0.5, seed=(1 << 63) + 5), 36.1),
        (Sampling(temperature=1.7, seed=3, choice=4), 36.1),
        (Sampling(temperature=1.0, seed=4, top_k=5), 18.5),
        (Sampling(temperature=1.0, seed=5, top_p=0.7), 36.1),
        (Sampling(temperature=1.3, seed=6, top_k=6, top_p=0.8), 20.5),
    ],
)
def test_draws_follow_the_distribution(p: Sampling, bound: float) -> None:
    torch.manual_seed(4)
    logits = torch.randn(14)
    n = 20_000
    weights = (logits.double() / p.temperature).softmax(-1).numpy()
    order = np.argsort(-weights, kind="stable")
    if p.top_k:
        weights[order[p.top_k :]] = 0.0
        weights /= weights.sum()
    if p.top_p < 1.0:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= p.top_p]] = 0.0
        weights /= weights.sum()
    assert chi_square(draw(logits, p, n), n * weights) < bound


def test_positions_choices_and_seeds_are_independent_of_each_other() -> None:
    logits = torch.zeros(1, 2)
    n = 4000

    def bits(**kw: int) -> np.ndarray:
        p = Sampling(temperature=1.0, **kw)
        return np.array(sample(logits.expand(n, -1).contiguous(), [p] * n, range(n))[0])

    streams = [bits(), bits(seed=1), bits(seed=1 << 32), bits(choice=1), bits(seed=1, choice=1)]
    for i, a in enumerate(streams):
        assert abs(a.mean() - 0.5) < 4 * 0.5 / math.sqrt(n)
        assert abs((a[1:] == a[:-1]).mean() - 0.5) < 4 * 0.5 / math.sqrt(n)
        for b in streams[:i]:
            assert abs((a == b).mean() - 0.5) < 4 * 0.5 / math.sqrt(n)


def test_a_draw_depends_on_nothing_around_it() -> None:
    torch.manual_seed(5)
    logits = torch.randn(6, 300)
    params = [
        Sampling(temperature=1.0, seed=7),
        Sampling(),
        Sampling(temperature=0.8, top_p=0.9, seed=7),
        Sampling(temperature=0.8, top_k=20, seed=8, choice=2),
        Sampling(logprobs=0),
        Sampling(temperature=1.0, seed=7, logprobs=0),
    ]
    positions = [5, 9, 5, 100, 2, 6]
    together, _ = sample(logits, params, positions)
    for i in range(6):
        alone, _ = sample(logits[i : i + 1].contiguous(), [params[i]], [positions[i]])
        assert alone == [together[i]]
    backwards, _ = sample(logits.flip(0).contiguous(), params[::-1], positions[::-1])
    assert backwards == together[::-1]


def test_the_tokens_are_those_of_every_release() -> None:
    """A client's seed means the same tokens tomorrow."""
    logits = torch.linspace(-2, 2, 40)[None].contiguous()
    p = Sampling(temperature=1.0, seed=1234)
    found = [sample(logits, [p], [i])[0][0] for i in range(12)]
    assert found == [20, 31, 20, 38, 32, 38, 19, 38, 29, 16, 32, 38]


def test_edges() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])

    def one(**kw: float) -> int:
        return sample(logits, [Sampling(temperature=1.0, **kw)], [3])[0][0]  # type: ignore[arg-type]

    assert {one(seed=s) for s in range(40)} == {0, 2}
    assert {one(seed=s, top_k=1) for s in range(20)} == {2}
    assert {one(seed=s, top_p=1e-9) for s in range(20)} == {2}
    assert {one(seed=s, top_p=0.0) for s in range(20)} == {2}
    assert one(seed=1, top_k=99) in (0, 2)
    tiny = Sampling(temperature=1e-6, seed=3)
    assert sample(logits, [tiny], [0])[0] == [2]
    equal = torch.zeros(1, 5)
    kept = {
        sample(equal, [Sampling(temperature=1.0, seed=s, top_k=2)], [0])[0][0] for s in range(99)
    }
    assert kept == {0, 1, 2, 3, 4}


def one(logits: torch.Tensor, p: Sampling, history: list[int], prompt: int, **kw: object) -> int:
    """The token that follows `history`, whose first `prompt` tokens are the prompt."""
    shape = SamplingContext(history, prompt, **kw)  # type: ignore[arg-type]
    return sample(logits[None], [p], [len(history)], {0: shape})[0][0]


@pytest.mark.parametrize("penalty", [1.0, 0.7, 1.8])
def test_penalties_are_those_of_transformers_and_of_the_definition(penalty: float) -> None:
    torch.manual_seed(6)
    logits = torch.randn(60) * 4
    history = [3, 3, 9, 50, 7, 7, 7, 3]
    p = Sampling(
        repetition_penalty=penalty,
        presence_penalty=0.75,
        frequency_penalty=-0.5,
        logit_bias=((1, 2.5), (7, -100.0)),
    )
    expected = logits.clone()
    expected[1] += 2.5
    expected[7] -= 100.0
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([history]), expected[None].clone()
    )[0]
    for token, times in {50: 1, 7: 3, 3: 1}.items():  # of the output, from index 3 on
        expected[token] -= 0.75 - 0.5 * times
    before = logits.clone()
    found = shaped(logits.numpy(), p, SamplingContext(history, 3))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    assert torch.equal(logits, before), "the workspace was written to"


def test_penalties_steer_greedy_and_leave_log_probabilities_alone() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    p = Sampling(presence_penalty=1.5, logprobs=2)
    tokens, scores = sample(logits[None], [p], [2], {0: SamplingContext([2, 0], 1)})
    assert tokens == [1]
    exact = logits.log_softmax(-1)
    assert scores[0][0] == pytest.approx(float(exact[1]))
    assert [t for t, _ in scores[0][1]] == [0, 1]
    assert [v for _, v in scores[0][1]] == pytest.approx(exact[:2].tolist())


def test_banned_tokens_wait_for_the_minimum_and_a_grammar_outweighs_it() -> None:
    logits = torch.tensor([1.0, 9.0, 5.0, 4.0])
    p = Sampling(banned=(1,), min_tokens=2)
    assert one(logits, p, [0, 0], 2) == 2
    assert one(logits, p, [0, 0, 2], 2) == 2
    assert one(logits, p, [0, 0, 2, 2], 2) == 1
    allowed = np.array([False, True, False, True])
    assert one(logits, p, [0, 0], 2, allowed=allowed) == 3
    assert one(logits, p, [0, 0, 2, 2], 2, allowed=allowed) == 1
    assert one(logits, p, [0, 0], 2, allowed=np.array([False, True, False, False])) == 1


def test_a_grammar_holds_whatever_the_temperature() -> None:
    torch.manual_seed(7)
    logits = torch.randn(40)
    allowed = np.zeros(40, np.bool_)
    allowed[[4, 30]] = True
    for more in ({}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.9}):
        for seed in range(20):
            p = Sampling(temperature=3.0, seed=seed, **more)  # type: ignore[arg-type]
            assert one(logits, p, [1, 2], 1, allowed=allowed) in (4, 30)


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    torch.manual_seed(8)
    logits = torch.randn(14)
    p = Sampling(temperature=1.4, seed=9, min_p=0.3)
    expected = MinPLogitsWarper(0.3)(torch.zeros(1, 1), (logits / 1.4)[None])[0]
    weights = expected.double().softmax(-1).numpy()
    assert 1 < (weights > 0).sum() < 14
    assert chi_square(draw(logits, p, 20_000), 20_000 * weights) < 36.1


@pytest.mark.parametrize("n", [1, 7, 20])
def test_the_likeliest_tokens_are_told_in_order_and_ties_by_id(n: int) -> None:
    torch.manual_seed(9)
    logits = torch.randn(11, 50).round(decimals=0)
    _, scores = sample(logits, [Sampling(logprobs=n)] * 11, range(11))
    exact = logits.double().log_softmax(-1)
    for i in range(11):
        order = np.argsort(-logits[i].numpy(), kind="stable")[:n]
        top = scores[i][1]
        assert [t for t, _ in top] == order.tolist()
        assert [v for _, v in top] == pytest.approx(exact[i, order].tolist(), abs=1e-5)


def test_a_shaped_row_changes_nothing_for_the_others() -> None:
    torch.manual_seed(10)
    logits = torch.randn(5, 90)
    params = [
        Sampling(),
        Sampling(repetition_penalty=2.0),
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.9, seed=3, frequency_penalty=1.0),
        Sampling(temperature=0.9, seed=4, top_p=0.8),
    ]
    shapes = {1: SamplingContext([5, int(logits[1].argmax())], 1), 3: SamplingContext([5, 6, 6], 1)}
    together, _ = sample(logits, params, range(5), shapes)
    for i in range(5):
        mine = {0: shapes[i]} if i in shapes else {}
        assert sample(logits[i : i + 1], [params[i]], [i], mine)[0] == [together[i]]
