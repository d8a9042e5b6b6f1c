"""Who can lend to whom, and why not."""

from __future__ import annotations

from ballast.core.capability import (
    CUDA,
    GROUP,
    IMPORT,
    MAP,
    Capability,
    GpuReach,
    Lendable,
    capabilities,
)
from ballast.core.units import KiB, MiB


def test_each_direction_of_each_pair() -> None:
    devices = [
        Lendable("cpu:0", 256 * KiB),
        Lendable("cpu:1", 256 * KiB),
        Lendable("small", 64 * KiB),
        Lendable("away", 256 * KiB, host="other"),
        Lendable("gpu", 256 * KiB, kind="cuda"),
        Lendable("group", 256 * KiB, kind=GROUP),
    ]
    found = {(c.lender, c.borrower): c for c in capabilities(devices)}
    assert len(found) == 6 * 5
    for pair in (
        ("cpu:0", "cpu:1"),
        ("cpu:1", "cpu:0"),
    ):
        assert found[pair] == Capability(*pair, MAP)
        del found[pair]
    assert all(c.means is None for c in found.values())
    assert found["cpu:0", "small"].why == "their pages differ: 256KiB and 64KiB"
    assert found["away", "cpu:1"].why == "they are on different hosts"
    assert found["cpu:0", "gpu"].why == "a cuda device cannot use the memory of a cpu device"
    assert found["gpu", "cpu:0"].why == "a cpu device cannot use the memory of a cuda device"
    assert found["group", "cpu:1"].why.startswith("a cpu device cannot use the memory of a tensor")


def test_gpus_lend_to_those_that_reach_them() -> None:
    def gpu(name: str, reach: GpuReach | None, page: int = 2 * MiB) -> Lendable:
        return Lendable(name, page, kind=CUDA, reach=reach)

    devices = [
        gpu("cuda:0", GpuReach("A", ("B",))),
        gpu("cuda:1", GpuReach("B", ("A", "C"))),
        gpu("cuda:2", GpuReach("C", ())),
        gpu("cuda:3", GpuReach("C", ())),
        gpu("cuda:4", None),
        gpu("cuda:5", GpuReach("B", ("A", "B", "C")), 4 * MiB),
    ]
    found = {(c.lender[-1] + c.borrower[-1]): c for c in capabilities(devices)}
    assert {pair for pair, c in found.items() if c.means == IMPORT} == {
        *("10", "01"),
        *("21", "31"),  # one way only
        *("23", "32"),  # one GPU
    }
    assert found["12"].why == "its driver says that it cannot use the memory of B in place"
    assert found["14"].why == "it is not known which GPUs cuda:4 can reach"
    assert found["50"].why == "their pages differ: 4MiB and 2MiB"


def test_one_device_has_nobody_to_lend_to() -> None:
    assert capabilities([Lendable("cpu:0", 256 * KiB)]) == ()
