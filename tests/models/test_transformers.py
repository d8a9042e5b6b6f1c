"""Served Llamas against transformers' own eager float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.errors import BrokenPromise
from ballast.core.job import SequenceWork
from ballast.core.request import Sampling
from tests.models.tiny import GREEDY, Served, llama

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "every head its own": {"num_key_value_heads": 4, "shard": "200KB"},
    "one kv head, wide": {"num_key_value_heads": 1, "head_dim": 40},
    "scaled rotary, biases": {
        "attention_bias": True,
        "mlp_bias": True,
        "shard": "100KB",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: v.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(transformers' model, ours)."""
    path = tmp_path_factory.mktemp("llama")
    reference = llama(path, **VARIANTS[request.param])
    reference.set_attn_implementation("eager")
    served = Served(path)
    yield reference, served
    served.close()


def of(reference: Any, tokens: torch.Tensor) -> torch.Tensor:
    """(n, vocab) logits at every position."""
    with torch.no_grad():
        return reference(tokens[None], use_cache=False).logits[0]


def tokens_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 331, (n,), generator=torch.Generator().manual_seed(seed))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype is torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert theirs.std() > 0.5  # or nothing would have been tested


def test_prefill(pair: Any) -> None:
    reference, served = pair
    tokens = tokens_of(60)
    ours = served.logits(SequenceWork("a", tokens.tolist(), 0, [5, 0, 9, 2], GREEDY))
    close(ours, of(reference, tokens)[-1:])


def test_chunked_prefill_and_decode(pair: Any) -> None:
    reference, served = pair
    tokens = tokens_of(75, 1)
    expected = of(reference, tokens)
    table = [8, 3, 11, 1, 6]
    for start, end in ((0, 16), (16, 39), (39, 40), (40, 70)):
        ours = served.logits(SequenceWork("a", tokens[start:end].tolist(), start, table, GREEDY))
        close(ours, expected[end - 1 : end])
    for i in range(70, 75):
        ours = served.logits(SequenceWork("a", [int(tokens[i])], i, table, GREEDY))
        close(ours, expected[i : i + 1])


def test_mixed_batch(pair: Any) -> None:
    reference, served = pair
    a, b, c, d = (tokens_of(n, i) for i, n in enumerate((50, 33, 20, 90)))
    tables = [[0, 1, 2, 3], [10, 4, 30], [7, 6], [20, 22, 21, 25, 24, 23]]
    served.logits(
        SequenceWork("a", a[:49].tolist(), 0, tables[0], None),
        SequenceWork("b", b[:10].tolist(), 0, tables[1], None),
        SequenceWork("d", d[:40].tolist(), 0, tables[3], None),
    )
    ours = served.logits(
        SequenceWork("a", [int(a[49])], 49, tables[0], GREEDY),
        SequenceWork("b", b[10:].tolist(), 10, tables[1], GREEDY),
        SequenceWork("d", d[40:80].tolist(), 40, tables[3], None),
        SequenceWork("c", c.tolist(), 0, tables[2], GREEDY),
    )
    close(ours, torch.stack([of(reference, x)[-1] for x in (a, b, c)]))
    ours = served.logits(SequenceWork("d", d[80:].tolist(), 80, tables[3], GREEDY))
    close(ours, of(reference, d)[-1:])


def test_a_shared_prefix_is_read_by_all(pair: Any) -> None:
    reference, served = pair
    prefix = tokens_of(32, 5)
    served.logits(SequenceWork("p", prefix.tolist(), 0, [14, 2], None))
    tails = [tokens_of(n, 6 + n) for n in (1, 9, 20)]
    work = [
        SequenceWork(str(i), tail.tolist(), 32, [14, 2, 40 + 2 * i, 41 + 2 * i], GREEDY)
        for i, tail in enumerate(tails)
    ]
    expected = [of(reference, torch.cat([prefix, tail]))[-1] for tail in tails]
    close(served.logits(*work), torch.stack(expected))


def test_greedy_generation_equals_generate(pair: Any) -> None:
    reference, served = pair
    prompts = [tokens_of(n, 20 + n).tolist() for n in (5, 23, 40)]
    expected = []
    for prompt in prompts:
        out = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert served.generate(prompts, 32) == expected
    assert served.generate(prompts, 32, chunk=7) == expected


def test_sampling_is_part_of_a_job(pair: Any) -> None:
    reference, served = pair
    tokens = tokens_of(20, 9)
    drawn = Sampling(temperature=0.9, seed=4, logprobs=0)
    work = [
        SequenceWork("a", tokens.tolist(), 0, [1, 2], drawn),
        SequenceWork("b", tokens[:9].tolist(), 0, [3], None),
        SequenceWork("c", tokens.tolist(), 0, [4, 5], Sampling(logprobs=0)),
    ]
    a, c = served.model.run(work)
    assert (a.request_id, c.request_id) == ("a", "c")
    expected = of(reference, tokens)[-1].log_softmax(-1)
    assert c.token == int(expected.argmax())
    assert c.logprob == pytest.approx(float(expected[c.token]), abs=1e-4)
    assert a.logprob == pytest.approx(float(expected[a.token]), abs=1e-4)
    assert served.model.run(work[:1])[0].token == a.token
    assert served.model.run(work[1:2]) == []


def test_weights_are_read_where_they_are(pair: Any) -> None:
    reference, served = pair
    tokens = tokens_of(12, 3)
    work = SequenceWork("a", tokens.tolist(), 0, [0], GREEDY)
    for array in served.weights:
        array[:] = 0
    assert not served.logits(work).any()
    served.fill()
    close(served.logits(work), of(reference, tokens)[-1:])


def test_bfloat16(tmp_path: Path) -> None:
    reference = llama(tmp_path, dtype=torch.bfloat16, initializer_range=0.1)
    served = Served(tmp_path)
    assert served.spec.dtype == "bfloat16"
    tokens = tokens_of(60)
    exact = of(reference.float(), tokens)
    theirs = (of(reference.bfloat16(), tokens).float() - exact)[30:].abs().mean()
    table = [0, 1, 2, 3]
    served.logits(SequenceWork("a", tokens[:30].tolist(), 0, table, None))
    ours = torch.cat(
        [
            served.logits(SequenceWork("a", [int(tokens[i])], i, table, GREEDY))
            for i in range(30, 60)
        ]
    )
    # As near to float32 as transformers' own bfloat16 is.
    assert (ours - exact[30:]).abs().mean() < 1.5 * theirs
    served.close()


def test_a_float32_checkpoint_served_in_bfloat16(tmp_path: Path) -> None:
    reference = llama(tmp_path, initializer_range=0.1)
    served = Served(tmp_path, dtype="bfloat16")
    tokens = tokens_of(40)
    ours = served.logits(SequenceWork("a", tokens.tolist(), 0, [0, 1, 2], GREEDY))
    torch.testing.assert_close(ours, of(reference, tokens)[-1:], rtol=0, atol=0.2)
    assert sum(served.spec.segment_bytes) < 0.51 * 4 * reference.num_parameters() + 64 * 100
    served.close()


def test_a_job_that_breaks_its_promise_is_refused(pair: Any) -> None:
    _, served = pair
    with pytest.raises(BrokenPromise, match="blocks"):
        served.logits(SequenceWork("a", [1] * 17, 0, [0], GREEDY))
    with pytest.raises(BrokenPromise, match="512"):
        served.logits(SequenceWork("a", [1, 2], 511, list(range(40)), GREEDY))


def test_nothing_is_touched_before_a_job(tmp_path: Path) -> None:
    """Addresses that no memory backs: reading one would end this process."""
    from ballast.core.settings import ModelSettings
    from ballast.kv.layout import Layout
    from ballast.memory.vm_memfd import MemfdVm
    from ballast.models.transformers import TransformersModel
    from ballast.weights.checkpoint import load_host_model

    llama(tmp_path)
    host = load_host_model(
        ModelSettings(name="m", path=str(tmp_path), model_impl="generic", linear="plain")
    )
    vm = MemfdVm(65536, 4)
    weights, kv = vm.reserve(1 << 24), vm.reserve(1 << 30)
    addresses = [weights.base + i * (1 << 20) for i in range(len(host.segments))]
    model = TransformersModel(host, addresses, kv.base, Layout.of(host.spec, 65536))
    with pytest.raises(BrokenPromise):
        model.run([SequenceWork("a", [1], 600, [0], GREEDY)])
    assert len(vm.os_pages(weights)) == len(vm.os_pages(kv)) == 0
    vm.release(weights)
    vm.release(kv)
    vm.close()
    host.close()
