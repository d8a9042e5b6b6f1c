"""Recurrent states in the blocks of KV: where they are read, written, and lost."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.bench.inprocess import InProcess
from ballast.core.errors import BrokenPromise
from ballast.core.job import SequenceWork
from ballast.core.model import STATE_LINE
from ballast.kv.layout import Layout, fitted
from benchmarks.exactness import asked, fleet
from benchmarks.families import config, make
from benchmarks.tiny import tiny
from tests.engine.test_failed_jobs import Fragile, settled
from tests.models.tiny import GREEDY, Served

Pair = tuple[Any, Served]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """(transformers' model, ours), of which one layer attends and two carry a state."""
    path = tmp_path_factory.mktemp("hybrid")
    reference = make(path, config("qwen3_next"))
    served = Served(path)
    yield reference, served
    served.close()


def tokens_of(n: int, seed: int) -> list[int]:
    made = torch.randint(3, 900, (n,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in made]


def close(ours: torch.Tensor, reference: Any, *texts: list[int]) -> None:
    with torch.inference_mode():
        theirs = [reference(torch.tensor([t]), use_cache=False).logits[0, -1] for t in texts]
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=0, atol=2e-4)


def test_prefixes_are_shared_and_decodes_run_together(pair: Pair) -> None:
    """Two sequences go on from the state at the end of a block that neither may change."""
    reference, served = pair
    prefix, tails = tokens_of(32, 1), [tokens_of(n, n) for n in (1, 9, 20)]
    served.logits(SequenceWork("p", prefix, 0, [14, 2], None))
    tables = [[14, 2, 40 + 2 * i, 41 + 2 * i] for i in range(3)]
    work = [SequenceWork(str(i), tail, 32, tables[i], GREEDY) for i, tail in enumerate(tails)]
    close(served.logits(*work), reference, *(prefix + tail for tail in tails))
    more = [tokens_of(1, 100 + i) for i in range(3)]
    steps = [
        SequenceWork(str(i), more[i], 32 + len(tail), tables[i], GREEDY)
        for i, tail in enumerate(tails)
    ]
    texts = [prefix + tail + more[i] for i, tail in enumerate(tails)]
    close(served.logits(*steps), reference, *texts)
    again = SequenceWork("late", tails[1], 32, [14, 2, 50], GREEDY)
    close(served.logits(again), reference, prefix + tails[1])


def test_a_state_of_another_position_is_never_read(pair: Pair) -> None:
    reference, served = pair
    text = tokens_of(24, 7)
    served.logits(SequenceWork("a", text[:20], 0, [5, 6], None))
    for start in (19, 21):
        with pytest.raises(BrokenPromise, match="has the state after 20 tokens"):
            served.logits(SequenceWork("a", text[start:], start, [5, 6], GREEDY))
    close(served.logits(SequenceWork("a", text[20:], 20, [5, 6], GREEDY)), reference, text)


def test_a_job_that_fails_loses_the_states_it_was_to_change(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, served = pair
    text = tokens_of(40, 8)
    served.logits(SequenceWork("a", text[:20], 0, [5, 6, 7], None))
    last: Any = served.model._module.get_submodule("model.layers.2.linear_attn")  # type: ignore[union-attr]

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of order")

    with monkeypatch.context() as patched:
        patched.setattr(last, "forward", broken)
        with pytest.raises(RuntimeError):
            served.logits(SequenceWork("a", text[20:36], 20, [5, 6, 7], None))
    with pytest.raises(BrokenPromise, match="has the state after -1 tokens"):
        served.logits(SequenceWork("a", text[20:36], 20, [5, 6, 7], None))
    # Its last full block is whole: from there it goes on.
    close(served.logits(SequenceWork("a", text[16:], 16, [5, 8, 9], GREEDY)), reference, text)


def test_sizes(pair: Pair) -> None:
    """A block holds the state and the KV of the layers that attend; longer ones waste less."""
    spec = pair[1].spec
    assert spec.attention_layers == (1,)
    assert spec.kv_layers == 1
    conv, recurrent = 128 * 4 * 4, 4 * 16 * 16 * 4
    assert spec.state_bytes == STATE_LINE + 2 * (conv + recurrent)
    assert spec.block_bytes == spec.state_bytes + 16 * spec.token_bytes
    assert spec.kv_bytes_per_token * 16 >= spec.block_bytes
    layout = Layout.of(spec, 65536)
    assert layout.layer_bytes == 16 * spec.token_bytes
    longer = fitted(spec, None, 65536)
    assert 128 < longer.block_tokens <= spec.max_model_len
    assert fitted(spec, 32, 65536).block_tokens == 32


def test_states_of_a_failed_job_are_computed_again(tmp_path: Path) -> None:
    """They are written in place: who was in the job goes on from its cached blocks."""
    make(tmp_path, tiny("lfm2"))
    settings = fleet({"hybrid": tmp_path}, 64 << 20, {"block_tokens": 16})
    requests = asked(["hybrid"], 2, seed=5, new_tokens=10)
    with InProcess(settings) as server:
        expected = server.generate(requests)
    jobs = itertools.count(1)
    with InProcess(settings) as server:
        fragile = Fragile(server, "hybrid", lambda work: next(jobs) % 4 == 0 and len(work) > 1)
        answers = server.generate(requests)
        settled(server)
    fragile.check()
    assert any(failed for _, failed in fragile.jobs)
    for id, answer in answers.items():
        assert answer.tokens == expected[id].tokens, id


def test_what_moves_a_block_moves_its_state(pair: Pair) -> None:
    """As compaction, tiers below the device and migrations do: the block's bytes, wherever to."""
    reference, served = pair
    text = tokens_of(40, 9)
    served.logits(SequenceWork("a", text[:32], 0, [10, 11], None))
    stride, n_bytes = served.layout.stride_bytes, served.layout.block_bytes
    base = -(-served.kv.ctypes.data // 64) * 64
    for source, target in ((10, 31), (11, 29)):
        ctypes.memmove(base + target * stride, base + source * stride, n_bytes)
        ctypes.memset(base + source * stride, 0xFF, n_bytes)
    moved = SequenceWork("a", text[32:], 32, [31, 29, 12], GREEDY)
    close(served.logits(moved), reference, text)
