"""A cluster in virtual time: devices by name, every request answered, faults said plainly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ballast.core.cost import Traffic
from ballast.core.errors import ConfigError
from ballast.core.event import Failed, Finished, Output, TokenOut
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.policy.presets import resolve
from ballast.sim.catalogue import facts
from ballast.sim.cluster import Cluster, Kind, kinds_of
from ballast.sim.profile import device_profile


def spec(name: str, like: str = "Llama-2-7b") -> ModelSpec:
    return replace(facts(like).spec(max_model_len=4096), name=name, fingerprint=name)


def arrivals(models: list[str], n: int) -> list[Submission]:
    return [
        Submission(
            id=f"r{i}",
            model=models[i % len(models)],
            prompt=(1 + i % 7,) * (40 + 11 * (i % 30)),
            max_tokens=5 + i % 60,
            arrival=i / 20,
            ignore_eos=True,
        )
        for i in range(n)
    ]


def test_kinds_of_devices_are_named() -> None:
    kinds = kinds_of("4xH100-80G, a100-80g,2 x L4")
    assert [(k.number, k.profile.device) for k in kinds] == [
        (4, "H100-80G"),
        (1, "A100-80G"),
        (2, "L4"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4xH1000", "H100-80G"),
        ("0xL4", "NUMBERxDEVICE"),
        ("00xL4", "NUMBERxDEVICE"),
        ("", "NUMBERxDEVICE"),
        ("4x", "device"),
    ],
)
def test_what_is_no_device_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kinds_of(text)


@pytest.mark.parametrize("preset", ["static", "swap", "balloon"])
def test_everything_is_answered_by_the_models_device(preset: str) -> None:
    names = [f"m{i}" for i in range(7)]
    ends: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    where: dict[str, set[str]] = {}

    def heard(device: str, at: float, output: Output) -> None:
        if isinstance(output, TokenOut):
            tokens[output.request_id] += 1
        if isinstance(output, Finished | Failed):
            ends[type(output).__name__] += 1
            where.setdefault(output.request_id, set()).add(device)

    cluster = Cluster(kinds_of("2xH100-80G"), [spec(n) for n in names], resolve(preset), heard)
    asked = arrivals(names, 140)
    assert cluster.run(asked) > asked[-1].arrival
    assert ends == Counter(Finished=140)
    assert all(where[s.id] == set(cluster.controller.book.homes[s.model]) for s in asked)
    assert all(tokens[s.id] == s.max_tokens for s in asked)
    for device in cluster.devices.values():
        device.state.pool.validate()


def test_a_model_that_is_too_large_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"'big'.*GiB are missing"):
        Cluster(
            kinds_of("8xL4"),
            [spec("big", "Llama-2-70b")],
            resolve("balloon"),
            lambda device, at, output: None,
        )


def test_profiles_of_one_name_are_told_apart() -> None:
    """As `ballast profile` writes them, of a slow machine and of a quick one."""
    quick, slow = (device_profile(name) for name in ("H100-80G", "V100-32G"))
    slow = slow.model_copy(update={"device": quick.device})
    expected = {name: Traffic(2.0, 1000.0, 200.0) for name in ("m0", "m1", "m2")}
    homes = Cluster(
        [Kind(1, quick), Kind(1, slow)],
        [spec(name) for name in expected],
        resolve("balloon", placement="work"),
        lambda device, at, output: None,
        traffic=expected,
    ).controller.book.homes
    assert set(homes.values()) == {("H100-80G:0",)}, "all are easy for the quick one"
