"""The fast path of families that differ from Llama in some feature, against transformers."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.errors import ConfigError, UnsupportedModel
from ballast.core.job import SequenceWork
from ballast.core.settings import AdapterSettings
from ballast.models.fused.model import FusedModel
from ballast.weights.decoder_recipe import LLAMA
from ballast.weights.inspection import inspect_model
from ballast.weights.sharding import Shard
from benchmarks.adapters import merged, random_adapter
from benchmarks.families import FAMILIES, config, make
from benchmarks.tiny import tiny
from tests.models.tiny import GREEDY, Served

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp bias": ("llama", {"mlp_bias": True, "attention_bias": True}),
    "gelu": ("llama", {"hidden_act": "gelu"}),
    "gelu by tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "phi3": ("phi3", {}),
    "phi3 tied": ("phi3", {"tie_word_embeddings": True}),
    "granite": ("granite", {"embedding_multiplier": 6.0}),
    "granite biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {}),
    "olmo2 all heads with keys": ("olmo2", {"num_key_value_heads": 4}),
    "olmo3": ("olmo3", {}),
    "exaone4": ("exaone4", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma2 wide heads, another scale": ("gemma2", {"head_dim": 24, "query_pre_attn_scalar": 99}),
    "gemma3": ("gemma3_text", {}),
    "gemma3 capped": ("gemma3_text", {"final_logit_softcapping": 20.0}),
}


def tokens_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 331, (n,), generator=torch.Generator().manual_seed(seed))


def expected(reference: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(tokens[None], use_cache=False).logits[0]
    return logits


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert theirs.std() > 0.5  # or nothing would have been tested


@pytest.fixture(scope="module", params=CASES, ids=lambda v: v.replace(" ", "-"))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(transformers' model, ours)."""
    path = tmp_path_factory.mktemp("recipes")
    family, changes = CASES[request.param]
    reference = make(path, config(family, **changes))
    served = Served(path, model_impl="fused", linear="packed")
    assert isinstance(served.model, FusedModel)
    assert served.host.recipe != LLAMA
    yield reference, served
    served.close()


def test_prefill_in_chunks_and_decode(case: Any) -> None:
    reference, served = case
    tokens = tokens_of(110)
    logits = expected(reference, tokens)
    table = served.table([8, 3, 11, 1, 6, 0, 2])
    for start, end in ((0, 5), (5, 85), (85, 86), (86, 106)):
        work = SequenceWork("a", tokens[start:end].tolist(), start, table, GREEDY)
        close(served.logits(work), logits[end - 1 : end])
    for at in range(106, 110):
        work = SequenceWork("a", [int(tokens[at])], at, table, GREEDY)
        close(served.logits(work), logits[at : at + 1])


def test_sequences_side_by_side(case: Any) -> None:
    """A decode, a chunk that samples nothing and a whole prompt in one job."""
    reference, served = case
    a, b, c = tokens_of(40, 1), tokens_of(30, 2), tokens_of(7, 3)
    served.logits(SequenceWork("a", a[:39].tolist(), 0, served.table([0, 1, 2]), None))
    served.logits(SequenceWork("b", b[:9].tolist(), 0, served.table([3, 4]), None))
    ours = served.logits(
        SequenceWork("a", a[39:].tolist(), 39, served.table([0, 1, 2]), GREEDY),
        SequenceWork("b", b[9:25].tolist(), 9, served.table([3, 4]), None),
        SequenceWork("c", c.tolist(), 0, served.table([5]), GREEDY),
    )
    close(ours, torch.stack([expected(reference, a)[-1], expected(reference, c)[-1]]))
    ours = served.logits(SequenceWork("b", b[25:].tolist(), 25, served.table([3, 4]), GREEDY))
    close(ours, expected(reference, b)[-1:])


def test_what_is_embedded(case: Any) -> None:
    """What the head would get."""
    reference, served = case
    tokens = tokens_of(20)
    work = [SequenceWork("a", tokens.tolist(), 0, served.table([0, 1]), GREEDY)]
    with torch.no_grad():
        theirs = reference.base_model(tokens[None], use_cache=False).last_hidden_state[0, -1:]
    torch.testing.assert_close(served.model.hidden(work).clone(), theirs, rtol=0, atol=1e-4)


class ComingAndGoing:
    """Implements `Barriers`: the weights of some layers are there from `wait` to `used` alone."""

    def __init__(self, served: Served, layers: Collection[int]) -> None:
        self._served, self._layers = served, layers
        for layer in layers:
            self.used(layer)

    def places(self, work: object) -> None:
        return None

    def begin_pass(self, work: Sequence[SequenceWork]) -> Collection[int]:
        return self._layers

    def wait(self, layer: int) -> None:
        array = self._served.weights[1 + layer]
        ctypes.memmove(array.ctypes.data, self._served.host.addresses[1 + layer], array.nbytes)

    def used(self, layer: int) -> None:
        self._served.weights[1 + layer][:] = 0xFF  # NaN

    def stalled(self) -> float:
        return 0.0


def test_layers_that_come_and_go(case: Any) -> None:
    """To the bit as when all are there."""
    layers = {0, 2}
    _, served = case
    work = SequenceWork("a", tokens_of(30).tolist(), 0, served.table([4, 2]), GREEDY)
    before = served.logits(work)
    served.model.barriers = ComingAndGoing(served, layers)
    try:
        assert torch.equal(served.logits(work), before)
    finally:
        served.model.barriers = None
        served.fill()


@pytest.mark.parametrize("comes_and_goes", [False, True])
@pytest.mark.parametrize("kind", ["gemma2", "olmo2", "granite", "smollm3", "phi3"])
def test_adapters(kind: str, comes_and_goes: bool, tmp_path: Path) -> None:
    """Beside the base in one batch; where gates and ups are stored as one, on the generic path."""
    base = make(tmp_path / "base", config(kind))
    adapter = random_adapter(base, tmp_path / "adapter", 1, rank=5)
    named = (AdapterSettings(name="adapter", path=str(adapter.path)),)
    served = Served(tmp_path / "base", model_impl="auto", linear="packed", adapters=named)
    assert not served.host.failed
    assert served.host.fused == (kind != "phi3")
    if comes_and_goes and served.host.fused:
        served.model.barriers = ComingAndGoing(served, {0, 2})
    a, b = tokens_of(23, 1), tokens_of(9, 2)
    ours = served.logits(
        SequenceWork("a", a.tolist(), 0, served.table([0, 1]), GREEDY, adapter=0),
        SequenceWork("b", b.tolist(), 0, served.table([2]), GREEDY),
    )
    with merged(base, adapter):
        adapted = expected(base, a)[-1]
    close(ours, torch.stack([adapted, expected(base, b)[-1]]))
    served.close()


@pytest.mark.parametrize("kind", ["olmo2", "gemma3_text", "granite"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"embedding_multiplier": 6.0} if kind == "granite" else {}
    # A hidden size whose root, Gemma's factor of embeddings, bfloat16 rounds.
    reference = make(tmp_path, config(kind, hidden_size=80, head_dim=16, **changes))
    tokens = tokens_of(50)
    exact = expected(reference, tokens)[-1:]
    reference.to(torch.bfloat16)
    theirs = expected(reference, tokens)[-1:].float()
    served = Served(tmp_path, model_impl="fused", linear="packed", dtype="bfloat16")
    ours = served.logits(SequenceWork("a", tokens.tolist(), 0, served.table([0, 1, 2, 3]), GREEDY))
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()
    served.close()


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "names as Llama's, neighbours rotated in pairs": ("ernie4_5", {}),
    "the same": ("helium", {}),
    "another gelu": ("llama", {"hidden_act": "quick_gelu"}),
    "a gelu that is clipped": ("llama", {"hidden_act": "gelu_10"}),
    "not a gated MLP": ("arcee", {}),
    "norms that take the mean off": ("stablelm", {}),
    "experts beside a shared one": ("qwen2_moe", {}),
    "queries that grow with their position": (
        "ministral3",
        {
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.5,
                "max_position_embeddings": 64,
            },
        },
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_fast_path_cannot_do_goes_the_general_way(what: str, tmp_path: Path) -> None:
    kind, changes = REFUSED[what]
    made = config(kind, **changes) if kind in FAMILIES else tiny(kind, **changes)
    reference = make(tmp_path, made)
    with pytest.raises(UnsupportedModel, match="fused"):
        Served(tmp_path, model_impl="fused", linear="packed")
    served = Served(tmp_path, model_impl="auto", linear="auto")
    assert not served.host.fused
    tokens = tokens_of(30)
    ours = served.logits(SequenceWork("a", tokens.tolist(), 0, served.table([0, 1]), GREEDY))
    torch.testing.assert_close(ours, expected(reference, tokens)[-1:], rtol=0, atol=1e-4)
    served.close()


@pytest.mark.parametrize("kind", ["gemma2", "olmo2", "phi3", "granite"])
def test_only_llamas_recipe_is_for_plain_matrices_and_ranks(kind: str, tmp_path: Path) -> None:
    """So for GPUs, whose matrices are plain."""
    make(tmp_path, config(kind))
    served = Served(tmp_path, model_impl="auto", linear="plain")
    assert not served.host.fused
    assert served.host.recipe is None
    served.close()
    with pytest.raises(ConfigError, match="tensor_parallel"):
        Served(tmp_path, model_impl="auto", linear="packed", shard=Shard(0, 2))


def test_the_fast_path_of_llama_goes_by_its_features_too() -> None:
    for kind in ("llama", "mistral", "qwen2", "qwen3"):
        assert inspect_model(config(kind)).recipe == LLAMA
