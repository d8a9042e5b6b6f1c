"""The fast path against transformers' own eager float32, and against itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ballast.core.errors import BrokenPromise, UnsupportedModel
from ballast.core.job import SequenceWork
from ballast.kernels import choices
from ballast.models.fused.model import FusedModel
from tests.models.tiny import GREEDY, ROWS, Served, save

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 150,  # no whole panel of gate and up
    "vocab_size": 331,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN["original_max_position_embeddings"] = 64
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases, scaled": ("Llama", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "llama yarn, wide heads": ("Llama", {"head_dim": 24, "rope_parameters": YARN}),
    "mistral window": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 4}),
    "qwen2 some windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def checkpoint(path: Path, family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of a family with biases and norms that matter."""
    name, more = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.set_attn_implementation("eager")
    return save(model, path, dtype=dtype)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda v: v.replace(" ", "-"))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(directory, transformers' model)."""
    path = tmp_path_factory.mktemp("fused")
    return path, checkpoint(path, request.param)


@pytest.fixture(params=["packed", "plain"])
def pair(request: pytest.FixtureRequest, family: Any) -> Iterator[Any]:
    path, reference = family
    served = Served(path, model_impl="fused", linear=request.param)
    assert isinstance(served.model, FusedModel)
    yield reference, served
    served.close()


def expected(reference: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(tokens[None], use_cache=False).logits[0]
    return logits


def tokens_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 331, (n,), generator=torch.Generator().manual_seed(seed))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert theirs.std() > 0.5  # or nothing would have been tested


def test_prefill_in_chunks_and_decode(pair: Any) -> None:
    """Chunks of few rows, and of so many that oneDNN multiplies them."""
    reference, served = pair
    tokens = tokens_of(110)
    logits = expected(reference, tokens)
    table = served.table([8, 3, 11, 1, 6, 0, 2])
    for start, end in ((0, 5), (5, 85), (85, 86), (86, 106)):
        work = SequenceWork("a", tokens[start:end].tolist(), start, table, GREEDY)
        close(served.logits(work), logits[end - 1 : end])
    for at in range(106, 110):
        work = SequenceWork("a", [int(tokens[at])], at, table, GREEDY)
        close(served.logits(work), logits[at : at + 1])


def test_sequences_side_by_side(pair: Any) -> None:
    """A decode, a chunk that samples nothing and a whole prompt in one job."""
    reference, served = pair
    a, b, c = tokens_of(40, 1), tokens_of(30, 2), tokens_of(7, 3)
    one, two, three = map(served.table, ([0, 1, 2], [3, 4], [5]))
    served.logits(SequenceWork("a", a[:39].tolist(), 0, one, None))
    served.logits(SequenceWork("b", b[:9].tolist(), 0, two, None))
    ours = served.logits(
        SequenceWork("a", a[39:].tolist(), 39, one, GREEDY),
        SequenceWork("b", b[9:25].tolist(), 9, two, None),
        SequenceWork("c", c.tolist(), 0, three, GREEDY),
    )
    close(ours, torch.stack([expected(reference, a)[-1], expected(reference, c)[-1]]))
    ours = served.logits(SequenceWork("b", b[25:].tolist(), 25, two, GREEDY))
    close(ours, expected(reference, b)[-1:])


def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, "llama", torch.bfloat16)
    served = Served(tmp_path, model_impl="fused", linear="packed")
    tokens = tokens_of(50)
    ours = served.logits(SequenceWork("a", tokens.tolist(), 0, [0, 1, 2, 3], GREEDY))
    theirs = expected(reference, tokens)[-1:].float()
    exact = expected(reference.float(), tokens)[-1:]
    assert (ours - exact).norm() < (theirs - exact).norm()
    served.close()


def test_a_sequence_does_not_feel_its_neighbours(tmp_path: Path) -> None:
    """While our own kernels multiply, down to the last bit; and whatever number of threads do."""
    checkpoint(tmp_path, "llama")
    served = Served(tmp_path, model_impl="fused", linear="packed")
    tokens = tokens_of(20)
    alone = served.logits(SequenceWork("a", tokens.tolist(), 0, [0, 1], GREEDY))
    other = SequenceWork("b", tokens_of(30, 5).tolist(), 0, [2, 3], GREEDY)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        both = served.logits(other, SequenceWork("a", tokens.tolist(), 0, [4, 5], GREEDY))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone[0], both[1])
    served.close()


@pytest.mark.parametrize("impl", ["fused", "generic"])
def test_in_bfloat16_an_invariant_row_does_not_feel_the_rows_of_its_job(
    tmp_path: Path, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though oneDNN takes over from two rows on elsewhere: neither those of others, nor how many of
    its own prompt come at once."""
    monkeypatch.setattr(choices, "_choices", lambda: FromTwoRows())
    checkpoint(tmp_path, "llama", torch.bfloat16)
    served = Served(tmp_path, model_impl=impl, linear="packed", invariant=True)
    tokens = tokens_of(40).tolist()
    alone = served.logits(SequenceWork("a", tokens, 0, [0, 1, 2], GREEDY))
    other = SequenceWork("b", tokens_of(30, 5).tolist(), 0, [3, 4], GREEDY)
    both = served.logits(other, SequenceWork("a", tokens, 0, [5, 6, 7], GREEDY))
    assert torch.equal(alone[0], both[1])
    served.logits(SequenceWork("a", tokens[:17], 0, [0, 1, 2], None))
    chunked = served.logits(SequenceWork("a", tokens[17:], 17, [0, 1, 2], GREEDY))
    assert torch.equal(alone[0], chunked[0])
    served.close()


class FromTwoRows:
    """Choices of a machine on which oneDNN is the faster one from two rows on."""

    def from_rows(self, shape: object) -> int:
        return 2


def test_two_models_in_one_workspace(tmp_path: Path) -> None:
    """What one leaves there is nothing to the other."""
    for name in ("llama", "qwen3"):
        checkpoint(tmp_path / name, name)
    alone = {}
    for name in ("llama", "qwen3"):
        served = Served(tmp_path / name, model_impl="fused", linear="packed")
        alone[name] = served.generate([tokens_of(12).tolist()], 6)
        served.close()
    a, b = (
        Served(tmp_path / name, model_impl="fused", linear="packed") for name in ("llama", "qwen3")
    )
    shared = FusedModel(
        b.host,
        [w.ctypes.data for w in b.weights],
        b.model._kv.base,
        b.layout,
        a.model._workspace,
        128,
        4,
    )
    b.model = shared
    first = a.generate([tokens_of(12).tolist()], 6)
    assert b.generate([tokens_of(12).tolist()], 6) == alone["qwen3"]
    assert a.generate([tokens_of(12).tolist()], 6) == first == alone["llama"]
    a.close()
    b.close()


def test_jobs_that_are_too_large(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    served = Served(tmp_path, model_impl="fused", linear="packed", blocks=64)
    parts = [
        SequenceWork(str(i), [1] * (ROWS // 2), 0, list(range(16 * i, 16 * i + 16)), None)
        for i in range(3)
    ]
    with pytest.raises(BrokenPromise, match="rows"):
        served.logits(*parts)
    served.close()


def test_only_where_it_is_known_to_be_right(tmp_path: Path) -> None:
    config = transformers.OlmoConfig(**SIZES, pad_token_id=0)
    save(transformers.OlmoForCausalLM(config), tmp_path)
    with pytest.raises(UnsupportedModel, match="fused"):
        Served(tmp_path, model_impl="fused", linear="packed")
    served = Served(tmp_path, model_impl="auto", linear="auto")
    assert not isinstance(served.model, FusedModel)
    served.close()
