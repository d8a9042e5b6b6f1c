"""Adapters of a served model against the model with their weights merged in, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ballast.core.errors import BrokenPromise
from ballast.core.job import Scoring, SequenceWork
from ballast.core.settings import AdapterSettings
from ballast.kernels.plain.attention import PlainAttention
from ballast.models.transformers import TransformersModel
from benchmarks.adapters import RandomAdapter, merged, random_adapter
from tests.models.tiny import GREEDY, Served, llama, save

TABLES = [[0, 9, 4], [1, 8, 5], [2, 7, 6], [3, 10, 11]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("base")
    return llama(path, tie_word_embeddings=False), path


@pytest.fixture(scope="module")
def made(base: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> list[RandomAdapter]:
    model, _ = base
    root = tmp_path_factory.mktemp("adapters")
    return [
        random_adapter(model, root / "all", 1, rank=8),
        random_adapter(model, root / "attention", 2, rank=3, only=("q_proj", "k_proj"), rs=True),
        random_adapter(
            model,
            root / "patterns",
            3,
            rank=4,
            only=("o_proj", "down_proj", "up_proj", "lm_head"),
            ranks={"down_proj": 17},
            alphas={"up_proj": 5.0},
        ),
    ]


def serve(path: Path, adapters: list[RandomAdapter], **settings: Any) -> Served:
    named = tuple(AdapterSettings(name=a.path.name, path=str(a.path)) for a in adapters)
    served = Served(path, adapters=named, **settings)
    assert not served.host.failed
    return served


@pytest.fixture(
    scope="module",
    params=[
        "generic-plain",
        "generic-packed",
        "fused-plain",
        "fused-packed",
        "generic-plain-device",
        "fused-plain-device",
    ],
)
def served(
    request: pytest.FixtureRequest, base: tuple[Any, Path], made: list[RandomAdapter]
) -> Iterator[Served]:
    impl, linear, *device = request.param.split("-")
    attention = PlainAttention if device else None
    served = serve(base[1], made, model_impl=impl, linear=linear, attention=attention)
    yield served
    served.close()


def prompts(n: int) -> list[list[int]]:
    return [torch.randint(0, 331, (5 + 9 * i,)).tolist() for i in range(n)]


def expected(model: Any, adapter: RandomAdapter | None, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities after the last of `tokens`."""
    with torch.no_grad():
        if adapter is None:
            return model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        with merged(model, adapter):
            return model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)


def work(i: int, tokens: list[int], adapter: int | None, start: int = 0) -> SequenceWork:
    return SequenceWork(str(i), tokens[start:], start, TABLES[i], GREEDY, adapter)


def test_each_row_has_its_adapter(
    base: tuple[Any, Path], made: list[RandomAdapter], served: Served
) -> None:
    model, _ = base
    texts = prompts(4)
    order = [2, None, 0, 1]
    ours = served.logits(
        *(work(i, t, a) for i, (t, a) in enumerate(zip(texts, order, strict=True)))
    )
    plain = [expected(model, None, t) for t in texts]
    for i, (tokens, a) in enumerate(zip(texts, order, strict=True)):
        reference = expected(model, None if a is None else made[a], tokens)
        assert torch.allclose(ours[i].log_softmax(-1), reference, atol=1e-4)
        if a is not None:
            assert (reference - plain[i]).abs().max() > 0.1, "the adapter changes next to nothing"


def test_tokens_of_prefill_chunks_and_decodes(
    base: tuple[Any, Path], made: list[RandomAdapter], served: Served
) -> None:
    model, _ = base
    texts = prompts(4)
    adapters = [0, 1, 2, None]
    sequences = [list(t) for t in texts]
    first = [
        SequenceWork(str(i), t[:3], 0, TABLES[i], None, a)
        for i, (t, a) in enumerate(zip(texts, adapters, strict=True))
    ]
    served.logits(*first)
    starts = [3] * 4
    for _ in range(6):
        batch = [
            work(i, s, a, start)
            for i, (s, a, start) in enumerate(zip(sequences, adapters, starts, strict=True))
        ]
        starts = [len(s) for s in sequences]
        for s, sampled in zip(sequences, served.model.run(batch), strict=True):
            s.append(sampled.token)
    for s, text, a in zip(sequences, texts, adapters, strict=True):
        for at in range(len(text), len(s)):
            reference = expected(model, None if a is None else made[a], s[:at])
            assert s[at] == int(reference.argmax())


def test_prompts_are_scored_and_embedded(
    base: tuple[Any, Path], made: list[RandomAdapter], served: Served
) -> None:
    """The head sees more rows than are sampled, or none."""
    model, _ = base
    tokens = prompts(3)[2]
    scoring = Scoring(1, tokens[1:], 0)
    for a in (0, 2):
        asked = [replace(work(0, tokens, a), scoring=scoring), work(1, tokens[:4], None)]
        ours = served.logits(*asked)
        with torch.no_grad(), merged(model, made[a]):
            reference = model(torch.tensor([tokens]), output_hidden_states=True)
        assert torch.allclose(ours[: len(tokens)], reference.logits[0], atol=1e-3)
        embedded = replace(work(0, tokens, a), sample=None, embed=True)
        found = served.model.hidden([embedded])[0]
        assert torch.allclose(found, reference.hidden_states[-1][0, -1], atol=1e-3)


@pytest.mark.parametrize("most", [5, 100])
def test_rows_of_the_base_are_untouched_to_the_bit(served: Served, most: int) -> None:
    """Of jobs of few rows, which our own kernels run on any CPU, and of many."""
    texts = [t[:most] for t in prompts(4)]
    alone = served.logits(*(work(i, t, None) for i, t in enumerate(texts)))
    beside = served.logits(*(work(i, t, [None, 0, None, 2][i]) for i, t in enumerate(texts)))
    assert torch.equal(alone[[0, 2]], beside[[0, 2]])
    assert not torch.equal(alone[[1, 3]], beside[[1, 3]])


def test_bfloat16(base: tuple[Any, Path], made: list[RandomAdapter]) -> None:
    model, path = base
    served = serve(path, made, dtype="bfloat16")
    tokens = prompts(2)[1]
    for a in (0, 1, 2):
        ours = served.logits(work(0, tokens, a))[0].log_softmax(-1)
        errors = [
            float((ours - expected(model, other, tokens)).abs().mean())
            for other in (made[a], made[a - 1], None)
        ]
        assert errors[0] < 0.5 * min(errors[1:])
    served.close()


def test_a_module_that_is_left_out_is_noticed(
    base: tuple[Any, Path], made: list[RandomAdapter]
) -> None:
    """Were a module of some family not called as a module, its adapters would be lost silently."""
    served = serve(base[1], made)
    assert isinstance(served.model, TransformersModel)
    layer = served.model._module.get_submodule("model.layers.1")
    layer.self_attn.q_proj.forward = torch.nn.Identity()
    with pytest.raises(BrokenPromise, match=r"\d+ of \d+ adapted modules"):
        served.logits(work(0, [1, 2, 3], 0))
    served.close()


@pytest.mark.parametrize("family", ["GPT2", "MoE"])
def test_other_linear_modules(family: str, tmp_path: Path) -> None:
    """GPT-2's are Conv1D; of a mixture of experts, those outside of the experts."""
    torch.manual_seed(0)
    config: Any
    if family == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=97, n_positions=128, n_embd=48, n_layer=2, n_head=4, initializer_range=0.2
        )
        model = save(transformers.GPT2LMHeadModel(config), tmp_path / "m")
    else:
        config = transformers.Qwen3MoeConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=128,
            initializer_range=0.2,
        )
        model = save(transformers.Qwen3MoeForCausalLM(config), tmp_path / "m")
    adapter = random_adapter(model, tmp_path / "a", 1)
    served = serve(tmp_path / "m", [adapter])
    tokens = torch.randint(0, 97, (21,)).tolist()
    ours = served.logits(work(0, tokens, 0))[0].log_softmax(-1)
    reference = expected(model, adapter, tokens)
    assert torch.allclose(ours, reference, atol=1e-4)
    assert (expected(model, None, tokens) - reference).abs().max() > 0.1
    served.close()
