"""Gumbel-max on a device against the host's sampling: on a GPU, else in Triton's interpreter.

`test_gpu_sampling.py` and `triton/test_triton_interpreted.py` run this file
in a process of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ballast.core.request import Sampling
from ballast.kernels import sampling
from ballast.kernels.triton.sampling import TritonGumbelMax
from ballast.kernels.triton.sampling_code import gumbel
from tests.kernels.gpu.test_gpu_sampling import drawn_logits, exact_scores

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
"""NumPy's, of infinite logits."""
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


@triton.jit
def noise_code(c0, c1, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.store(out + i, gumbel(tl.load(c0 + i).to(tl.uint32), tl.load(c1 + i).to(tl.uint32)))


def test_noise_is_within_its_bound_at_both_ends_and_between() -> None:
    generator = np.random.default_rng(0)
    near = [2**i + d for i in range(33) for d in (-1, 0, 1) if 0 <= 2**i + d < 2**32]
    edges = sorted({0, *near, *(2**32 - 1 - x for x in near)})
    c0 = [a for a in edges for _ in edges]
    c1 = [b for _ in edges for b in edges]
    more = generator.integers(0, 2**32, (2, 4096)).tolist()
    both = np.array([c0 + more[0], c1 + more[1]], np.int64)
    n = 1 << (both.shape[1] - 1).bit_length()
    padded = np.zeros((2, n), np.int64)
    padded[:, : both.shape[1]] = both
    out = torch.empty(n, dtype=torch.float32, device=DEVICE)
    given = [torch.from_numpy(x).to(DEVICE) for x in padded]
    noise_code[(1,)](*given, out, BLOCK=n)
    uniform = ((padded[0] << 20) + (padded[1] >> 12) + 0.5) / 2.0**52
    exact = -np.log(-np.log(uniform))
    error = np.abs(out.cpu().numpy().astype(np.float64) - exact)
    # As derived, before what is added for safety.
    assert (error <= 0.75 * 2.0**-18 * (1.0 + np.abs(exact))).all()


def test_what_is_sure_is_what_the_host_draws() -> None:
    found = TritonGumbelMax(512)
    decided = 0
    for vocab, seed in ((1, 0), (511, 1), (1000, 2)):
        generator = np.random.default_rng(seed)
        logits = torch.from_numpy(drawn_logits(generator, 12, vocab))
        params = [
            Sampling(temperature=float(t), seed=int(s), choice=i)
            for i, (t, s) in enumerate(
                zip(
                    generator.choice([0.01, 0.3, 0.7, 1.0, 2.5, 40.0], 12),
                    generator.integers(0, 2**64, 12, np.uint64),
                    strict=True,
                )
            )
        ]
        positions = generator.integers(0, 2**20, 12).tolist()
        rows = [i for i in range(12) if i % 5 != 3]
        expected, _ = sampling.sample(logits, params, positions)
        tokens = found(
            logits.to(DEVICE), rows, [params[i] for i in rows], [positions[i] for i in rows]
        )
        for i, token in zip(rows, tokens, strict=True):
            assert token in (None, expected[i])
            decided += token is not None
    assert decided > 20, "of 30 rows, some of which have ties"


@settings(max_examples=200 if GPU else 4, deadline=None, phases=[Phase.generate])
@given(st.integers(0, 2**32), st.floats(0.02, 30.0))
def test_every_score_is_within_its_bound(seed: int, temperature: float) -> None:
    """With blocks of few tokens, many are the best of their block."""
    generator = np.random.default_rng(seed)
    logits = drawn_logits(generator, 1, 64)
    p = Sampling(temperature=temperature, seed=int(generator.integers(2**63)))
    least, most = TritonGumbelMax(8).bounds(torch.from_numpy(logits).to(DEVICE), [0], [p], [7])
    exact = exact_scores(logits[0], p, 7).reshape(1, 8, 8)
    best = exact.max(2)
    assert (least <= best).all()
    assert (most >= best).all()
    finite = np.isfinite(best)
    width = most[finite] - least[finite]
    scaled = np.abs(np.nan_to_num(logits[0].reshape(1, 8, 8)[finite], neginf=0.0)).max(1)
    wide = 2.0**-20 * scaled / temperature + 2.0**-17 * 40
    assert (width <= 2 * wide).all(), "and no wider than it has to be"


def test_ties_and_what_is_no_number_are_never_sure() -> None:
    p = Sampling(temperature=1e-30, seed=5)
    logits = torch.zeros(5, 300)
    logits[1, 7] = float("nan")
    logits[2, 9] = float("inf")
    logits[3] = float("-inf")
    logits[4, :] = 1e38
    tokens = TritonGumbelMax(64)(logits.to(DEVICE), range(5), [p] * 5, [3] * 5)
    # All logits 0: noise alone decides, at any temperature.
    expected, _ = sampling.sample(logits[:1], [p], [3])
    assert tokens == [expected[0], None, None, None, None]
