"""Every family against transformers' own eager float32; what cannot be served says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ballast.core.errors import UnsupportedModel
from ballast.core.job import SequenceWork
from ballast.kv.windows import leave
from ballast.weights.inspection import inspect_model
from benchmarks.families import FAMILIES, config, make
from benchmarks.tiny import tiny
from tests.models.tiny import GREEDY, Served, save


def of(reference: Any, tokens: torch.Tensor) -> torch.Tensor:
    """(vocab,) logits at the last position."""
    with torch.no_grad():
        return reference(tokens[None], use_cache=False).logits[0, -1]  # type: ignore[no-any-return]


def tokens_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 331, (n,), generator=torch.Generator().manual_seed(seed))


def serve(path: Path, a: torch.Tensor, b: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Logits at the ends of two sequences: a prompt in chunks, and one that decodes beside it."""
    served = Served(path, **settings)
    tables = [served.table(blocks) for blocks in ([4, 0, 9, 6, 12], [2, 7])]
    served.logits(
        SequenceWork("a", a[:37].tolist(), 0, tables[0], None),
        SequenceWork("b", b[:-1].tolist(), 0, tables[1], None),
    )
    last = len(b) - 1
    for table, computed in zip(tables, (37, last), strict=True):
        leave(served.spec, table, computed)  # what is behind windows is not read
    ours = served.logits(
        SequenceWork("b", [int(b[last])], last, tables[1], GREEDY),
        SequenceWork("a", a[37:].tolist(), 37, tables[0], GREEDY),
    )
    served.close()
    return ours.flip(0)


PACKED_ELSEWHERE = {
    *("exaone4", "gemma", "gemma2", "gemma3_text", "granite", "olmo2", "olmo3", "phi3", "smollm3")
}
"""On the fast path in `fused/test_fused_recipes.py`, with chunks and decodes as here."""


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, tmp_path: Path) -> None:
    reference = make(tmp_path, config(family))
    a, b = tokens_of(70, 1), tokens_of(29, 2)
    theirs = torch.stack([of(reference, x) for x in (a, b)])
    assert theirs.std() > 0.5  # or nothing would have been tested
    for linear in ("plain",) if family in PACKED_ELSEWHERE else ("plain", "packed"):
        ours = serve(tmp_path, a, b, linear=linear)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


WITHOUT: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": None},
    "mixtral": {"sliding_window": None, "num_experts_per_tok": 2},
    **{
        family: {"sliding_window": 10_000}
        for family, said in FAMILIES.items()
        if said.get("sliding_window") and family != "mixtral"
    },
}


@pytest.mark.parametrize("family", WITHOUT)
def test_windows_caps_and_experts_make_a_difference(family: str, tmp_path: Path) -> None:
    """Or the comparison above would prove nothing of them."""
    tokens = tokens_of(70, 1)
    model = make(tmp_path, config(family))
    other = transformers.AutoModelForCausalLM.from_config(
        config(family, **WITHOUT[family]), attn_implementation="eager"
    ).eval()
    other.load_state_dict(model.state_dict())
    assert (of(model, tokens) - of(other, tokens)).abs().max() > 0.05


def test_sinks_make_a_difference(tmp_path: Path) -> None:
    model: Any = make(tmp_path, config("gpt_oss"))
    tokens = tokens_of(70, 1)
    before = of(model, tokens)
    for layer in model.model.layers:
        layer.self_attn.sinks.detach().fill_(-1e4)
    assert (of(model, tokens) - before).abs().max() > 0.05


def test_bfloat16_experts(tmp_path: Path) -> None:
    """As near to float32 as transformers' own bfloat16 is."""
    reference = make(tmp_path, config("qwen3_moe"))
    a, b = tokens_of(70, 1), tokens_of(29, 2)
    exact = torch.stack([of(reference, x) for x in (a, b)])
    reference.to(torch.bfloat16)
    theirs = torch.stack([of(reference, x) for x in (a, b)]).float()
    ours = serve(tmp_path, a, b, dtype="bfloat16")
    assert (ours - exact).abs().mean() < 2 * (theirs - exact).abs().mean()


def test_longrope_up_to_the_length_where_it_changes(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": [4.0 + i for i in range(8)],
        "short_factor": [1.0 + i / 4 for i in range(8)],
    }
    changes = {
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
        "rope_parameters": rope,
        "original_max_position_embeddings": 80,
    }
    reference = make(tmp_path, config("phi3", **changes))
    a, b = tokens_of(70, 1), tokens_of(29, 2)
    with pytest.raises(UnsupportedModel, match=r"longrope.*max_model_len"):
        serve(tmp_path, a, b)
    ours = serve(tmp_path, a, b, max_model_len=80)
    theirs = torch.stack([of(reference, x) for x in (a, b)])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_dynamic_rope_within_the_context_it_is_made_for(tmp_path: Path) -> None:
    """It changes beyond `max_position_embeddings` alone, where no sequence gets."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    reference = make(tmp_path, config("llama", max_position_embeddings=72, rope_parameters=rope))
    a, b = tokens_of(70, 1), tokens_of(29, 2)
    theirs = torch.stack([of(reference, x) for x in (a, b)])
    for impl in ("generic", "fused"):
        ours = serve(tmp_path, a, b, model_impl=impl)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 200,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({**SMALL, "alibi": True}, "its attention needs a bias of its own"),
    "bloom": (
        {"hidden_size": 64, "n_layer": 4, "n_head": 4, "vocab_size": 200},
        "bounds no context; set max_model_len",
    ),
    "mamba": (
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 200},
        "cannot be given the positions",
    ),
    "bert": (SMALL, "does not see just the past"),
    "llama4_text": (
        {**SMALL, "intermediate_size": 64, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
        "does not see just the past",
    ),
    "diffllama": ({**SMALL, "intermediate_size": 64}, "for that 8 times"),
    "t5": ({}, "it has an encoder"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_served_says_why(kind: str) -> None:
    values, reason = REFUSED[kind]
    with pytest.raises(UnsupportedModel, match=rf"(?s){kind}: .*({reason})"):
        inspect_model(transformers.AutoConfig.for_model(kind, **values))


WRAPPERS_REFUSED = {
    "blip-2": "cannot be run with our attention",
    "whisper": "has an encoder",
    "qwen3_omni_moe": "generates no text with it",
    "siglip": "generates no text with it",
    "musicgen": "several models of text",
}


@pytest.mark.parametrize("kind", WRAPPERS_REFUSED)
def test_models_for_images_and_sounds_are_refused_in_a_sentence(kind: str) -> None:
    """Whatever their code raises, which may be a dump of their configuration."""
    with pytest.raises(UnsupportedModel, match=WRAPPERS_REFUSED[kind]) as raised:
        inspect_model(tiny(kind))
    assert len(str(raised.value)) < 300


def test_a_router_with_a_table_of_integers() -> None:
    with pytest.raises(UnsupportedModel, match=r"its weights include integers, in .*tid2eid"):
        inspect_model(tiny("deepseek_v4"))


def test_what_was_asked_is_learned() -> None:
    gemma = inspect_model(config("gemma2"))
    assert gemma.windows == (24, None, 24)
    assert gemma.softcap == 2.0
    assert inspect_model(config("mistral")).windows == (24, 24, 24)
    assert inspect_model(config("mistral", sliding_window=512)).windows == (None, None, None)
    assert inspect_model(config("qwen2")).windows == (None, None, None)
    moe = inspect_model(config("qwen3_moe"))
    assert (moe.experts_per_token, moe.expert_intermediate, moe.intermediate) == (3, 48, 96)
    assert inspect_model(config("phi")).experts_per_token == 0


def test_refused_when_it_is_loaded(tmp_path: Path) -> None:
    values, reason = REFUSED["falcon"]
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**values))
    save(model, tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        Served(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("bamba", {"time_step_limit": (0.6, 0.8)}),
        ("falcon_h1", {}),  # whose buffers a module around theirs sets up
        ("nemotron_h", {}),
    ],
)
def test_time_steps_are_bounded_in_single_tokens_too(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    reference = make(tmp_path, tiny(kind, **changes))
    a, b = tokens_of(70, 1), tokens_of(29, 2)
    theirs = torch.stack([of(reference, x) for x in (a, b)])
    assert theirs.std() > 0.5
    torch.testing.assert_close(serve(tmp_path, a, b), theirs, rtol=0, atol=2e-4)


def test_a_decoder_without_its_images_and_sounds(tmp_path: Path) -> None:
    reference = make(tmp_path, tiny("phi4_multimodal"))
    a, b = tokens_of(70, 1), tokens_of(29, 2)
    theirs = torch.stack([of(reference, x) for x in (a, b)])
    torch.testing.assert_close(serve(tmp_path, a, b), theirs, rtol=0, atol=1e-4)
    served = Served(tmp_path)
    names = [n for s in served.host.segments for t in s.tensors for n in t.sources]
    assert not any("_embed." in name for name in names)
    served.close()
