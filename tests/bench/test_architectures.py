"""The command that tries every architecture: a few of them, and what it makes of the results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import architectures
from benchmarks.architectures import (
    BEGIN,
    END,
    Case,
    Outcome,
    attempt,
    cases,
    documented,
    kind_result,
    kinds,
    run,
    summary,
    write_table,
)


def test_each_is_served_exactly_or_refused_with_a_reason() -> None:
    found = run(["dbrx", "cpmant", "blip"], quick=True)
    (dbrx,), (cpmant,), (blip,) = (variants.values() for variants in found.values())
    assert (dbrx.result, dbrx.tokens, dbrx.ties) == ("exact", 48, 0)
    assert dbrx.logprob_error < 1e-4
    assert dbrx.most_repeated <= 0.25
    assert dbrx.load_ms > 0
    assert cpmant.result == "refused"
    assert "the positions of tokens" in cpmant.reason
    assert blip.result == "unmade"
    assert "pixel_values" in blip.reason
    counted = summary(found)
    assert [counted[k] for k in ("exact", "refused", "wrong", "crashed", "unmade")] == [
        *(1, 1, 0, 0, 1)
    ]


NO_LONGER_REFUSED = {
    "granitemoehybrid": "attention alone",  # Granite 4 without Mamba
    "hunyuan_v1_dense": "alpha",  # rotary embeddings named dynamic, which do not change
    "mixtral": "router logits",
}


@pytest.mark.parametrize("kind", NO_LONGER_REFUSED)
def test_what_was_refused_without_need(kind: str) -> None:
    (case,) = (c for c in cases(kind) if c.variant == NO_LONGER_REFUSED[kind])
    outcome = attempt(case)
    assert replace(outcome, load_ms=0, logprob_error=0, most_repeated=0) == Outcome(
        "exact", tokens=48
    )


def test_a_wrong_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = architectures.compare

    def shifted(model: object, prompt: object, answer: object, verdict: object) -> None:
        original(model, tuple(reversed(prompt)), answer, verdict)  # type: ignore[arg-type,call-overload]

    monkeypatch.setattr(architectures, "compare", shifted)
    outcome = attempt(Case("llama", "as it is", {}))
    assert outcome.result == "wrong"
    assert "tokens of 48 differ" in outcome.reason


def test_every_model_type_is_tried() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(kinds())
    assert all(cases(kind)[0].variant == "as it is" for kind in ("llama", "gemma3", "mamba"))


def test_a_kind_is_what_its_published_layout_is() -> None:
    def of(*results: str) -> str:
        return kind_result({str(i): Outcome(result) for i, result in enumerate(results)})

    assert of("exact", "refused", "unmade") == "exact"
    assert of("refused", "exact") == "refused"
    assert of("exact", "wrong", "crashed") == "wrong"
    assert of("exact", "crashed") == "crashed"
    assert of("refused", "unmade") == "refused"


def test_the_table(tmp_path: Path) -> None:
    found = {
        "b": {"as it is": Outcome("exact", tokens=3)},
        "a": {"as it is": Outcome("refused", "a: its 3 layers | differ")},
        "c": {"as it is": Outcome("refused", "c: its 4 layers | differ")},
        "d": {"as it is": Outcome("unmade", "TypeError: no")},
        "e": {"as it is": Outcome("refused", "e: states"), "alone": Outcome("exact", tokens=3)},
    }
    text = documented(found)
    assert "5 architectures, of which 1 are served exactly in their published layout" in text
    assert "| its n layers \\| differ | `a`, `c` |  |" in text
    assert "| states | `e` | `e` |" in text
    assert "no such small checkpoint of them: `d`." in text
    file = tmp_path / "models.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table(file, text)
    assert file.read_text() == f"before\n{BEGIN}\n{text}\n{END}\nafter\n"
    file.write_text("no marks")
    with pytest.raises(ValueError, match="architectures: begin"):
        write_table(file, text)
