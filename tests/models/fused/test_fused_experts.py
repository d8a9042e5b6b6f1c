"""Mixtures of experts on the fast path, against transformers' own eager float32 and themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ballast.core.job import SequenceWork
from ballast.core.settings import AdapterSettings
from ballast.models.fused.model import FusedModel
from ballast.models.transformers import TransformersModel
from benchmarks.adapters import merged, random_adapter
from tests.models.fused.test_fused import SIZES, close, expected, tokens_of
from tests.models.tiny import GREEDY, Served, save

EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral one of two, window": (
        "Mixtral",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 20},
    ),
    "qwen3 moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": False}),
    "qwen3 moe, shares of one, all experts": (
        "Qwen3Moe",
        {**EXPERTS, "num_experts_per_tok": 7, "norm_topk_prob": True, "attention_bias": True},
    ),
    "qwen3 moe, first layer dense": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0]}),
    "qwen3 moe, every other layer": ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2}),
}
LAYERS = {
    "qwen3 moe, first layer dense": [1, 2],
    "qwen3 moe, every other layer": [1],
}
"""Those with experts, where not all of three have them."""


def checkpoint(path: Path, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model whose routers, norms and biases matter."""
    family, more = MIXTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "head_dim": 16, **more})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif key.endswith("mlp.gate.weight"):
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # their grouped products need aligned rows
    return save(model, path, dtype=dtype)


@pytest.fixture(scope="module", params=MIXTURES, ids=lambda v: v.replace(" ", "-"))
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(name, directory, transformers' model)."""
    path = tmp_path_factory.mktemp("mixture")
    return request.param, path, checkpoint(path, request.param)


@pytest.fixture
def served(mixture: Any) -> Iterator[Served]:
    served = Served(mixture[1], model_impl="fused", linear="packed")
    yield served
    served.close()


def test_prefill_in_chunks_and_decode(mixture: Any, served: Served) -> None:
    reference = mixture[2]
    tokens = tokens_of(110)
    logits = expected(reference, tokens)
    table = [8, 3, 11, 1, 6, 0, 2]
    for start, end in ((0, 5), (5, 85), (85, 86), (86, 106)):
        work = SequenceWork("a", tokens[start:end].tolist(), start, table, GREEDY)
        close(served.logits(work), logits[end - 1 : end])
    for at in range(106, 110):
        work = SequenceWork("a", [int(tokens[at])], at, table, GREEDY)
        close(served.logits(work), logits[at : at + 1])


def test_every_row_goes_to_its_experts(mixture: Any, served: Served) -> None:
    """As many rows as `transformers` sends to each, in every layer that has experts."""
    name, _, reference = mixture
    model = served.model
    assert isinstance(model, FusedModel)
    assert model.experts is not None
    assert model.experts.layers == LAYERS.get(name, [0, 1, 2])
    tokens = tokens_of(60, 3)
    served.logits(SequenceWork("a", tokens.tolist(), 0, [0, 1, 2, 3], GREEDY))
    with torch.no_grad():
        routed = reference(tokens[None], use_cache=False, output_router_logits=True).router_logits
    top_k = reference.config.num_experts_per_tok
    theirs = [
        torch.bincount(layer.topk(top_k).indices.flatten(), minlength=layer.shape[-1]).tolist()
        for layer in routed
    ]
    assert model.experts.counts.tolist() == theirs


def test_a_row_does_not_feel_its_neighbours(mixture: Any, served: Served) -> None:
    """Down to the last bit, whatever the rows around it, their number, and that of threads."""
    tokens = tokens_of(20)
    work = SequenceWork("a", tokens.tolist(), 0, [0, 1], GREEDY)
    alone = served.logits(work)
    others = [
        SequenceWork(str(i), tokens_of(30, i).tolist(), 0, [2 + 2 * i, 3 + 2 * i], GREEDY)
        for i in range(4)
    ]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        among = served.logits(*others[:2], work, *others[2:])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone[0], among[2])
    first = SequenceWork("a", tokens[:19].tolist(), 0, [0, 1], None)
    last = SequenceWork("a", tokens[19:].tolist(), 19, [0, 1], GREEDY)
    served.logits(first)
    assert torch.equal(alone, served.logits(last))


def test_decodes_side_by_side(mixture: Any, served: Served) -> None:
    """More streams than rows that are items of their own."""
    reference = mixture[2]
    prompts = [tokens_of(3 + i, i).tolist() for i in range(12)]
    for prompt, found in zip(prompts, served.generate(prompts, 5), strict=True):
        whole = torch.tensor(prompt + found)
        logits = expected(reference, whole)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
        assert (logits.amax(1) - chosen < 1e-4).all()


def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, "mixtral", torch.bfloat16)
    served = Served(tmp_path, model_impl="fused", linear="packed")
    tokens = tokens_of(50)
    ours = served.logits(SequenceWork("a", tokens.tolist(), 0, [0, 1, 2, 3], GREEDY))
    theirs = expected(reference, tokens)[-1:].float()
    exact = expected(reference.float(), tokens)[-1:]
    assert (ours - exact).norm() < (theirs - exact).norm()
    served.close()


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe, first layer dense"])
def test_matrix_by_matrix(name: str, tmp_path: Path) -> None:
    """As jobs run with adapters, or on a library's kernels: the same numbers."""
    checkpoint(tmp_path, name)
    served = Served(tmp_path, model_impl="fused", linear="packed")
    model = served.model
    assert isinstance(model, FusedModel)
    work = SequenceWork("a", tokens_of(30).tolist(), 0, [0, 1], GREEDY)
    whole = served.logits(work)
    model._run_whole = lambda n, sampled, threads, *, head: model._run_in_parts(  # type: ignore[method-assign]
        n, sampled, None, None, threads, (), head=head
    )
    assert torch.equal(whole, served.logits(work))
    served.close()


def test_plain_matrices_go_the_generic_path(tmp_path: Path) -> None:
    checkpoint(tmp_path, "mixtral")
    served = Served(tmp_path, model_impl="auto", linear="plain")
    assert isinstance(served.model, TransformersModel)
    served.close()


def test_adapters_of_attention_head_and_dense_layers(tmp_path: Path) -> None:
    """What PEFT adapts of these models; rows with one, with another and with none in one job."""
    reference = checkpoint(tmp_path / "base", "qwen3 moe, first layer dense")
    adapters = [
        random_adapter(reference, tmp_path / "all", 1, rank=8),
        random_adapter(reference, tmp_path / "some", 2, rank=3, only=("k_proj", "lm_head")),
    ]
    named = tuple(AdapterSettings(name=a.path.name, path=str(a.path)) for a in adapters)
    served = Served(tmp_path / "base", adapters=named, model_impl="fused", linear="packed")
    assert not served.host.failed
    texts = [tokens_of(9 + 8 * i, i) for i in range(3)]
    ours = served.logits(
        *(
            SequenceWork(str(i), t.tolist(), 0, [2 * i, 2 * i + 1], GREEDY, a)
            for i, (t, a) in enumerate(zip(texts, (1, None, 0), strict=True))
        )
    )
    plain = [expected(reference, t)[-1] for t in texts]
    close(ours[1], plain[1])
    for i, adapter in ((0, adapters[1]), (2, adapters[0])):
        with merged(reference, adapter):
            changed = expected(reference, texts[i])[-1]
        assert (changed - plain[i]).abs().max() > 0.1
        close(ours[i], changed)
    served.close()
