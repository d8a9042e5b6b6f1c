"""Models are spread over devices by weights and work; what cannot fit says what is missing."""

from __future__ import annotations

from collections import Counter

import pytest

from ballast.core.errors import ConfigError
from ballast.core.fleet import DeviceCapacity, ModelDemand
from ballast.core.units import GiB
from ballast.policy.fleet.initial_placement import spread

ROOMS = [DeviceCapacity(f"d{i}", 80 * GiB, "big") for i in range(4)]


def need(model: str, size: int, work: float = 0.0) -> ModelDemand:
    return ModelDemand(model, (size + 2) * GiB, size * GiB, {"big": work})


def test_equal_models_are_spread_evenly() -> None:
    homes = spread([need(f"m{i}", 14) for i in range(12)], ROOMS)
    assert Counter(d for on in homes.values() for d in on) == {r.device: 3 for r in ROOMS}


def test_weights_may_exceed_memory_and_are_balanced() -> None:
    sizes = {f"m{i}": 10 + 7 * (i % 9) for i in range(40)}
    homes = spread([need(m, size) for m, size in sizes.items()], ROOMS)
    held = Counter({r.device: 0 for r in ROOMS})
    for model, (device,) in homes.items():
        held[device] += sizes[model]
    assert sum(held.values()) > 4 * 80
    assert max(held.values()) - min(held.values()) <= max(sizes.values())


def test_busy_models_do_not_share_a_device_while_another_is_idle() -> None:
    homes = spread([need("hot", 2, 0.9), need("warm", 2, 0.8), need("big", 70)], ROOMS[:3])
    assert len({d for on in homes.values() for d in on}) == 3


def test_a_model_goes_where_it_fits() -> None:
    rooms = [DeviceCapacity("small", 24 * GiB, "little"), DeviceCapacity("large", 80 * GiB, "big")]
    assert spread([need("m", 30)], rooms) == {"m": ["large"]}


def test_what_is_missing_is_said_in_bytes() -> None:
    with pytest.raises(ConfigError, match=r"'m'.*needs at least 142GiB.* 80GiB.*62GiB are missing"):
        spread([need("m", 140)], ROOMS)
    with pytest.raises(ConfigError, match="missing"):
        spread([need("m", 1)], [])


def test_the_order_of_models_does_not_matter() -> None:
    needs = [need(f"m{i}", 5 + i % 3, 0.1 * (i % 2)) for i in range(10)]
    assert spread(needs, ROOMS) == spread(needs[::-1], ROOMS)


def test_a_model_too_busy_for_a_device_gets_several() -> None:
    homes = spread([need("hot", 10, 1.8), need("cold", 10, 0.1)], ROOMS)
    assert len(homes["hot"]) == 3
    assert len(set(homes["hot"])) == 3
    assert homes["cold"][0] not in homes["hot"]


def test_copies_go_where_all_weights_still_fit() -> None:
    homes = spread([need("hot", 30, 3.0), need("cold", 60), need("colder", 55)], ROOMS[:3])
    assert homes == {"hot": ["d0"], "cold": ["d1"], "colder": ["d2"]}


def test_no_more_devices_than_there_are() -> None:
    assert len(spread([need("hot", 10, 50.0)], ROOMS)["hot"]) == len(ROOMS)


def test_slow_devices_count_for_less() -> None:
    """Two slow ones, each of which it would fill 1.4 times, beside one it would fill to 0.9."""
    rooms = [
        *(DeviceCapacity(f"s{i}", 80 * GiB, "slow") for i in range(2)),
        DeviceCapacity("f", 80 * GiB, "fast"),
    ]
    hot = ModelDemand("hot", GiB, GiB, {"slow": 1.4, "fast": 0.9})
    cold = [ModelDemand(f"cold{i}", GiB, GiB) for i in range(3)]
    assert len(spread([hot, *cold], rooms)["hot"]) == 2


def test_copies_follow_the_busiest_seconds_and_not_the_mean() -> None:
    bursty = ModelDemand("bursty", GiB, GiB, {"big": 0.1}, peak={"big": 1.8})
    steady = [
        ModelDemand(f"steady{i}", GiB, GiB, {"big": 0.3}, peak={"big": 0.4}) for i in range(4)
    ]
    homes = spread([bursty, *steady], ROOMS)
    assert len(homes["bursty"]) == 3
    assert all(len(homes[need.model]) == 1 for need in steady)
    alone = spread([bursty, *steady], ROOMS, by_work=False)
    assert all(len(on) == 1 for on in alone.values())


def test_devices_without_a_model_serve_the_busiest() -> None:
    hot, warm = need("hot", 10, 0.4), need("warm", 10, 0.3)
    homes = spread(
        [hot, warm, need("never asked", 10)], [*ROOMS, DeviceCapacity("d4", 80 * GiB, "big")]
    )
    assert [len(homes[m]) for m in ("hot", "warm", "never asked")] == [2, 2, 1]
    assert {d for on in homes.values() for d in on} == {*(r.device for r in ROOMS), "d4"}
    # Where nothing is known of the load, nobody needs a second device.
    assert all(len(on) == 1 for on in spread([need("a", 10)], ROOMS).values())
