"""The requests, the pace of links and the ratios of `mirage_live` are what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from ballast.bench.inprocess import Answer
from ballast.core.event import FailedOutput, FinishedOutput
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.policy.presets import PRESETS, resolve
from ballast.sim.model_catalogue import facts
from ballast.weights.weight_stream import Loads
from benchmarks.mirage_live import MAIN, Variant, base_of, headlines, over, overlap, summary
from benchmarks.mirage_live_run import Seen, measured
from benchmarks.mirage_live_setting import LINKS, NAMES, Setting, bursts, filling, ratio_of

SPEC = facts("OPT-13b").spec(max_model_len=2048)
SETTING = Setting(
    fleet=FleetSettings(models=(), device=DeviceSettings(budget_bytes=1 << 30)),
    spec=SPEC,
    kv_tokens=1000,
    step=0.04,
    rate=2.0,
)


@pytest.mark.parametrize("seed", range(3))
def test_seeds_differ_in_when_requests_come_not_in_how_many(seed: int) -> None:
    made = bursts(4.0, 10.0, seed)
    assert Counter(r.model for r in made.requests) == dict.fromkeys(NAMES, 20)
    for name in NAMES:
        assert max(r.at for r in made.requests if r.model == name) == pytest.approx(10.0)
    assert made == bursts(4.0, 10.0, seed)
    assert made.requests != bursts(4.0, 10.0, seed + 1).requests


def test_bursts_are_bursty() -> None:
    """Half of the requests come in far less than half of the time, without a gap to speak of."""
    gaps = [
        gap
        for seed in range(20)
        for name in NAMES
        for gap in np.diff(
            sorted(r.at for r in bursts(8.0, 20.0, seed).requests if r.model == name)
        )
    ]
    assert np.std(gaps) / np.mean(gaps) > 2.0
    assert np.median(gaps) < 0.1 * np.mean(gaps)


def test_a_paced_link_copies_a_layer_in_its_ratio_of_the_layers_work() -> None:
    link = SETTING.pace(3.0)
    assert link.bytes_per_second is not None
    assert link.mixed_bytes_per_second is not None
    copy = SETTING.layer_bytes / link.bytes_per_second
    assert copy == pytest.approx(3.0 * SETTING.step / SPEC.n_layers)
    assert link.mixed_bytes_per_second / link.bytes_per_second == pytest.approx(366 / 427)
    assert SETTING.under("mirage", {"cap": 0}, 3.0).link == link


def test_ratios_of_real_links_agree_with_what_their_layers_take() -> None:
    """OPT-13b's layer takes 1.47 ms at 427 GB/s; PCIe 5 carries an eighth of that."""
    work = 1.47e-3 / ratio_of(LINKS["GH200"])
    assert 0.3e-3 < work < 1.5e-3  # a step of 12 to 60 ms, over 40 layers
    assert 5 < ratio_of(LINKS["PCIe 5"]) / ratio_of(LINKS["GH200"]) < 15


def test_as_many_sequences_as_fill_the_kv() -> None:
    assert filling(1000, 100.0, 100.0) == 7
    assert filling(10, 100.0, 100.0) == 1


def test_every_variant_is_a_preset_with_its_options() -> None:
    for variant in MAIN.values():
        comparison = variant.comparison.on(temporal=1.0)
        preset = comparison.rows[variant.row].preset
        assert preset in PRESETS
        assert resolve(preset, comparison.options(variant.row)).options["temporal"] == 1.0


def answer(times: Sequence[float], *, failed: bool = False) -> Answer:
    end = (
        FailedOutput("r", "memory", "none left")
        if failed
        else FinishedOutput("r", "length", 3, len(times), 0, 0)
    )
    return Answer(tokens=[1] * len(times), times=list(times), end=end)


def test_latencies_count_from_when_requests_were_due() -> None:
    """And a request that failed has no place in a comparison."""
    answers = [answer([1.5, 1.75, 2.75]), answer([3.5])]
    seen = measured([1.0, 3.0], answers, 3, Loads())
    assert (seen.requests, seen.preemptions) == (2, 3)
    with pytest.raises(RuntimeError, match="1 of 3 requests were not served"):
        measured([1.0, 3.0, 2.0], [*answers, answer([4.0], failed=True)], 3, Loads())
    found = seen.summary()
    assert found["answered"] == 2
    assert found["p50_ttft"] == 0.5
    assert found["p50_tbt"] == pytest.approx((0.25 + 1.0) / 2)
    assert found["throughput"] == pytest.approx(4 / 2.5)


def run(seconds: float, copying: float = 0.0, stalled: float = 0.0) -> Seen:
    """Clients whose times are all in proportion to `seconds`."""
    answers = [answer([seconds, 2 * seconds]), answer([2 * seconds, 4 * seconds])]
    loads = Loads(1, 1, copying, stalled)
    return Seen(measured([0.0, seconds], answers, 0, loads), 0.0)


def test_ratios_are_of_the_same_round() -> None:
    found = over([run(0.5), run(0.25)], [run(1.0), run(2.0)])
    assert found["p99_ttft"].values == (0.5, 0.125)
    assert found["throughput"].values == (2.0, 8.0)


def test_each_variant_is_compared_on_its_own_terms() -> None:
    variants = {
        "recompute": Variant("recompute"),
        "mirage": Variant("mirage"),
        "recompute, shares": Variant("recompute", "shares"),
        "mirage, shares": Variant("mirage", "shares"),
    }
    seconds = {"recompute": 1.0, "mirage": 0.5, "recompute, shares": 4.0}
    rounds = {name: [run(seconds.get(name, 1.0))] for name in variants}
    result = summary(variants, rounds)
    assert result["compared_with"] == {
        "recompute": "recompute, shares",
        "mirage": "recompute",
        "recompute, shares": None,
        "mirage, shares": "recompute, shares",
    }
    medians = {name: of["p99_ttft"]["median"] for name, of in result["over"].items()}
    assert medians == {"recompute": 0.25, "mirage": 0.5, "mirage, shares": 0.25}
    # A variant that a device refused leaves nothing to compare with.
    assert base_of("mirage", {"mirage": Variant("mirage")}) is None


def test_what_is_not_there_is_null_and_nothing_copied_hides_nothing() -> None:
    seen = {"recompute": [run(1.0)], "mirage": [run(0.5, copying=4.0, stalled=1.0)]}
    keys = headlines({"spatial": seen, "temporal": {**seen, "mirage": [run(0.5)]}})
    assert keys["throughput_over_kvswap"] is None
    assert keys["p99_tbt_over_recompute"] == 0.5
    assert keys["overlap"] == 0.75
    assert overlap([run(1.0)]) is None
    with_swapping = headlines({"spatial": {**seen, "kvswap": [run(2.0)]}})
    assert with_swapping["p99_ttft_over_kvswap"] == 0.25
