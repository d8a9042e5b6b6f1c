"""A model over several ranks against the same on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.errors import ConfigError
from ballast.core.job import Scoring, SequenceWork
from ballast.core.settings import AdapterSettings, ModelSettings
from ballast.models.parallel.model import check_parallel
from ballast.weights.checkpoint import load_host_model, read_spec
from ballast.weights.sharding import Shard
from tests.models.fused.test_fused import checkpoint, expected, tokens_of
from tests.models.ranks import Group
from tests.models.tiny import GREEDY, Served, llama

FAMILIES = ["llama", "llama tied", "llama biases, scaled", "qwen2", "qwen3"]


@pytest.fixture(params=[None, "meeting"], ids=["shared", "gloo"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param is None else tmp_path / request.param


@pytest.fixture(params=FAMILIES, ids=lambda v: v.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path: Path, meeting: Path | None) -> Iterator[Any]:
    """(transformers' model, ours on two ranks)."""
    reference = checkpoint(tmp_path / "model", request.param)
    group = Group(tmp_path / "model", meeting, 2)
    yield reference, group
    group.close()


def test_logits_are_those_of_the_whole_model(pair: Any) -> None:
    reference, group = pair
    tokens = tokens_of(90)
    want = expected(reference, tokens)
    scoring = Scoring(start=70, targets=tokens[70:90].tolist(), top=0)
    blocks = list(range(7))
    for end, start in ((60, 0), (90, 60)):
        scored = scoring if end == 90 else None
        work = SequenceWork("a", tokens[start:end].tolist(), start, blocks, None, scoring=scored)
        logits = group.first.logits(work)
    torch.testing.assert_close(logits, want[69:89], atol=1e-4, rtol=1e-4)
    step = SequenceWork("a", [5], 90, blocks, GREEDY)
    want = expected(reference, torch.cat([tokens, torch.tensor([5])]))[-1:]
    torch.testing.assert_close(group.first.logits(step), want, atol=1e-4, rtol=1e-4)


def test_every_rank_has_equal_hidden_states(pair: Any) -> None:
    _, group = pair
    group.first.logits(SequenceWork("a", tokens_of(40).tolist(), 0, [0, 1, 2], GREEDY))
    (other,) = group.others
    assert torch.equal(group.first.model._hidden[:40], other.model._hidden[:40])


def test_a_row_depends_on_that_row_alone_on_three_ranks(
    tmp_path: Path, meeting: Path | None
) -> None:
    llama(tmp_path / "model", num_attention_heads=6, num_key_value_heads=3, hidden_size=96)
    group = Group(tmp_path / "model", meeting, 3)
    parts = [tokens_of(n, n).tolist() for n in (3, 17, 5)]
    works = [SequenceWork(str(i), p, 0, [2 * i, 2 * i + 1], GREEDY) for i, p in enumerate(parts)]
    together = group.first.logits(*works)
    alone = torch.cat([group.first.logits(w) for w in works])
    group.close()
    assert torch.equal(together, alone)


def test_tokens_are_those_of_one_rank(tmp_path: Path, meeting: Path | None) -> None:
    llama(tmp_path / "model")
    prompts = [tokens_of(n, n).tolist() for n in (1, 9, 33)]
    one = Served(tmp_path / "model", model_impl="auto", linear="auto")
    group = Group(tmp_path / "model", meeting, 2)
    assert group.first.generate(prompts, 12, chunk=7) == one.generate(prompts, 12, chunk=7)
    one.close()
    group.close()


def test_each_rank_has_its_part_and_segments_are_even(tmp_path: Path) -> None:
    llama(tmp_path / "model")
    settings = ModelSettings(name="m", path=str(tmp_path / "model"))
    whole = load_host_model(settings)
    parts = [load_host_model(settings, shard=Shard(rank, 2)) for rank in range(2)]
    sizes = {p.spec.segment_bytes for p in parts}
    assert len(sizes) == 1
    assert sizes == {read_spec(settings, ranks=2).segment_bytes}
    # Layers and the head are halved, but for what panels and norms take; embeddings are whole.
    (part,) = sizes
    assert part[0] == whole.spec.segment_bytes[0]
    assert sum(part[1:]) < 0.6 * sum(whole.spec.segment_bytes[1:])
    assert {p.spec.kv_bytes_per_token * 2 for p in parts} == {whole.spec.kv_bytes_per_token}
    digests = [p.spec.segment_digests for p in parts]
    assert digests[0][0] == digests[1][0]
    assert set(digests[0][1:]).isdisjoint(digests[1])
    for host in (whole, *parts):
        host.close()


@pytest.mark.parametrize(
    ("ranks", "changes", "more", "why"),
    [
        (4, {}, {}, "2 KV heads"),
        (3, {"num_attention_heads": 4}, {}, "4 heads"),
        (2, {"intermediate_size": 151}, {}, "intermediate"),
        (2, {"vocab_size": 64}, {}, "64 tokens"),
        (2, {}, {"model_impl": "generic"}, "fused path"),
        (2, {"hidden_act": "gelu"}, {}, "fused path"),
        (2, {}, {"adapters": (AdapterSettings(name="a", path="a"),)}, "adapters"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, ranks: int, changes: dict[str, Any], more: dict[str, Any], why: str
) -> None:
    llama(tmp_path / "model", **changes)
    settings = ModelSettings(name="m", path=str(tmp_path / "model"), **more)
    with pytest.raises(ConfigError, match=why):
        load_host_model(settings, shard=Shard(0, ranks))


def test_a_cpu_divides_packed_matrices_only() -> None:
    settings = ModelSettings(name="m", path="m", linear="plain")
    with pytest.raises(ConfigError, match="packed"):
        check_parallel(settings, 2)
