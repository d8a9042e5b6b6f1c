"""What `exactness_bfloat16` and `invariant_cost` make of answers, runs and measured choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ballast.bench.inprocess import Answer
from ballast.core.event import FinishedOutput
from ballast.core.settings import DeviceSettings
from ballast.fleet.fleet_file import load_fleet
from ballast.kernels import choices
from ballast.kernels.choice_file import ChoiceFile, KernelChoice
from ballast.policy.presets import PRESETS
from benchmarks import exactness_bfloat16, migration
from benchmarks.exactness_bfloat16 import Comparison, onednn_from_two_rows
from benchmarks.invariant_cost import PHASES, chosen, rate
from benchmarks.turns import Run


def answer(tokens: list[int], logprobs: list[float | None] | None = None) -> Answer:
    end = FinishedOutput("a", "length", 1, len(tokens), 0, 0)
    return Answer(tokens, logprobs or [-1.0] * len(tokens), end=end)


def test_each_token_and_each_bit_of_a_log_probability_counts() -> None:
    compared = Comparison()
    compared.add({"a": answer([1, 2, 3, 4])}, {"a": answer([1, 2, 3, 4])})
    assert (compared.tokens, compared.wrong, compared.differing) == (4, 0, 0)
    assert compared.ok
    compared.add({"b": answer([5, 6], [-1.0, -2.0])}, {"b": answer([5, 6], [-1.0, -2.0000001])})
    assert (compared.wrong, compared.inexact) == (0, 1)
    compared.add({"c": answer([7, 8, 9])}, {"c": answer([7, 1, 1])})
    assert (compared.tokens, compared.wrong, compared.differing) == (9, 2, 1)
    assert not compared.ok


def test_the_controls_matrices_are_onednns_from_two_rows_on() -> None:
    before = choices._choices
    with onednn_from_two_rows():
        assert choices.from_rows(64, 64, torch.bfloat16) == 2
        assert choices.from_rows(64, 64, torch.bfloat16, invariant=True) == choices.NEVER
    assert choices._choices is before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_devices_in_bfloat16_are_invariant(tmp_path: Path, dtype: str) -> None:
    file = migration.two_devices(tmp_path, "llama", dtype)
    fleet = load_fleet(file, presets=PRESETS)
    assert {m.dtype for m in fleet.models} == {dtype}
    assert [d.invariant for d, _ in fleet.devices.values()] == [dtype == "bfloat16" or None] * 2


def test_settled_changes_the_device_alone() -> None:
    settings = exactness_bfloat16.fleet({"m": Path("m")}, 2**20, exactness_bfloat16.BFLOAT16)
    found = exactness_bfloat16.settled(settings, step_tokens=7)
    assert (found.device.invariant, found.device.step_tokens) == (True, 7)
    assert found.models == settings.models
    assert isinstance(found.device, DeviceSettings)


def test_prefill_counts_prompts_and_the_rest_new_tokens() -> None:
    runs = [Run(2, 100, 20, 4.0, 1.0, ()), Run(2, 100, 20, 6.0, 3.0, ())]
    rates = {phase.name: rate(runs, phase) for phase in PHASES}
    assert rates == {"tokens_ratio.1": 4.0, "tokens_ratio.16": 4.0, "prefill_ratio": 50.0}


def test_what_was_measured_is_read_from_the_children(tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    assert chosen(file) == {}
    kept = KernelChoice(from_rows=64, ratios={"64": 0.9})
    ChoiceFile(file).keep("bfloat16 8x8", kept)
    assert chosen(file) == {"bfloat16 8x8": cast(Any, kept.model_dump())}
