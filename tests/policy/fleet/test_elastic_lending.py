"""Which devices lend to which, and when they take back, by SwiftCache's algorithm and corrected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ballast.core.cost import Traffic
from ballast.core.fleet import (
    DeviceCapacity,
    DeviceLoad,
    FleetDecision,
    FleetView,
    LeaseView,
    LendPages,
    ModelDemand,
    ModelLoad,
    RecallPages,
)
from ballast.policy.fleet.elastic_lending import ElasticLending
from ballast.policy.presets import resolve

PAGE = 1024
NEEDS = (ModelDemand("m", 0, 0, kv_bytes_per_token=64, block_tokens=16),)
"""A page is a block of 16 tokens."""


def device(
    name: str,
    free: int,
    kv: int = 0,
    cached: int = 0,
    waiting: int = 0,
    tokens: int = 0,
    longest: int = 0,
    mean: int = 0,
) -> DeviceLoad:
    """`tokens`: of all that wait."""
    hosting = ModelLoad(
        "m",
        0.0,
        waiting,
        0,
        traffic=Traffic(1.0, mean, 0),
        kv_pages=kv,
        cached_pages=cached,
        waiting=waiting,
        lacking=waiting,
        lacking_tokens=tokens,
        longest_tokens=longest,
    )
    return DeviceLoad(DeviceCapacity(name, 100 * PAGE), (hosting,), PAGE, 100, free)


def view(now: float, *devices: DeviceLoad, leases: Sequence[LeaseView] = ()) -> FleetView:
    names = [d.name for d in devices]
    pairs = tuple((a, b) for a in names for b in names if a != b)
    return FleetView(now, devices, NEEDS, tuple(leases), pairs)


def asked(decision: FleetDecision) -> list[tuple[str, str, str, int | None]]:
    found = []
    for a in decision.actions:
        assert isinstance(a, LendPages | RecallPages)
        found.append((type(a).__name__, a.lender, a.borrower, a.pages))
    return found


def decide(
    policy: ElasticLending, *devices: DeviceLoad, leases: Sequence[LeaseView] = ()
) -> list[object]:
    return [*asked(policy(view(0.0, *devices, leases=leases), None))]


def test_any_device_borrows_what_it_lacks_from_those_that_can_spare_most() -> None:
    a = device("a", 10, kv=80, cached=10, waiting=2, tokens=40 * 16)
    assert decide(ElasticLending(), a, device("b", 15), device("c", 8), device("d", 4)) == [
        ("LendPages", "b", "a", 15),
        ("LendPages", "c", "a", 6),  # 41 blocks in whole ones, 10 free, 10 cached
    ]
    assert decide(ElasticLending(), replace(a, free=90), device("b", 15)) == []


def test_a_device_keeps_what_it_needed_lately_and_one_more_request() -> None:
    policy = ElasticLending(window=10.0)
    short = device("a", 0, waiting=1, tokens=1000 * 16)
    memo = policy(view(0.0, device("b", 40, kv=50)), None).memo
    calm = device("b", 90, mean=5 * 16)
    decision = policy(view(5.0, short, calm), memo)
    assert asked(decision) == [("LendPages", "b", "a", 90 - 50 - 5)]
    assert asked(policy(view(11.0, short, calm), memo)) == [("LendPages", "b", "a", 90 - 5)]


def test_a_lender_takes_back_what_its_requests_lack_and_no_more() -> None:
    lender = device("b", 3, kv=10, waiting=1, tokens=8 * 16)
    lease = LeaseView("b", "a", 30, 0)
    assert decide(ElasticLending(), device("a", 0, kv=99), lender, leases=[lease]) == [
        ("RecallPages", "b", "a", 5)
    ]
    lease = LeaseView("b", "a", 30, 5)
    assert decide(ElasticLending(), device("a", 0, kv=99), lender, leases=[lease]) == []


def test_pages_that_their_borrower_needs_no_more_go_home() -> None:
    policy, lease = ElasticLending(window=10.0), LeaseView("b", "a", 30, 0)
    memo: object = None
    for now in range(18):
        kv, borrowed = (99, 20) if now < 8 else (40, 0)
        d = device("a", 100 - kv, kv=kv)
        d = replace(d, hosting=(d.hosting[0]._replace(borrowed_pages=borrowed),))
        decision = policy(view(float(now), d, device("b", 20), leases=[lease]), memo)
        memo = decision.memo
        expected = [("RecallPages", "b", "a", 30)] if now >= 17 else []
        assert asked(decision) == expected, now


def test_a_device_that_misses_prefixes_borrows_room_for_as_many() -> None:
    a = device("a", 0, kv=99, cached=60)
    a = replace(a, hosting=(a.hosting[0]._replace(missed_blocks=7),))
    seen = view(0.0, a, device("b", 50))
    assert asked(ElasticLending()(seen, None)) == [("LendPages", "b", "a", 7)]
    (lend,) = ElasticLending()(seen, None).actions
    assert lend.why == "a misses prefixes of 7 pages, b can spare 50"
    ahead = replace(a, hosting=(a.hosting[0]._replace(traffic=Traffic(1.0, 5 * 16, 0)),))
    assert decide(ElasticLending(), ahead, device("b", 50)) == [("LendPages", "b", "a", 7 + 5)]
    short = device("c", 0, waiting=1, tokens=46 * 16)  # requests come first
    assert decide(ElasticLending(), a, device("b", 50), short) == [
        ("LendPages", "b", "c", 46),
        ("LendPages", "b", "a", 4),
    ]
    assert decide(ElasticLending(published=1), a, device("b", 50)) == []
    # What has been lent for that stays, though it is not used yet.
    policy, lease = ElasticLending(window=10.0), LeaseView("b", "a", 7, 0)
    calm = replace(a, hosting=(a.hosting[0]._replace(missed_blocks=0),))
    memo: object = None
    for now in range(12):
        seen = view(float(now), a if now == 10 else calm, device("b", 50))
        leases = (lease,) if now == 11 else ()
        decision = policy(replace(seen, leases=leases), memo)
        memo = decision.memo
    assert asked(decision) == []


def test_pages_with_prefixes_stay_as_long_as_their_borrower_has_no_room_for_them() -> None:
    policy, lease = ElasticLending(window=10.0), LeaseView("b", "a", 30, 0)
    for kv, expected in ((90, []), (60, [("RecallPages", "b", "a", 30)])):
        memo: object = None
        d = device("a", 100 - kv, kv=kv, cached=kv)
        d = replace(d, hosting=(d.hosting[0]._replace(borrowed_pages=20),))
        for now in range(11):
            decision = policy(view(float(now), d, device("b", 20), leases=[lease]), memo)
            memo = decision.memo
        assert asked(decision) == expected


def test_pairs_that_operators_have_taken_are_left_alone() -> None:
    seen = view(0.0, device("a", 0, waiting=1, tokens=99), device("b", 50))
    assert asked(ElasticLending()(seen, None))
    assert asked(ElasticLending()(replace(seen, pairs=(("a", "b"),)), None)) == []


def test_a_master_alone_borrows() -> None:
    short = [device(name, 0, waiting=1, tokens=64 * 16) for name in "ab"]
    policy = ElasticLending(master=2)
    assert decide(policy, *short, device("c", 20)) == [("LendPages", "c", "b", 20)]


def test_algorithm_1_as_published() -> None:
    """It lends all but the longest request's room, though many run at once, and takes nothing back
    for a request that would fit if nobody else were there."""
    policy = ElasticLending(published=1)
    busy = device("b", 20, kv=60, waiting=9, tokens=9 * 4 * 16, longest=6 * 16)
    master = device("a", 0, waiting=1, tokens=200 * 16)
    assert decide(policy, master, busy) == [("LendPages", "b", "a", 20)]
    lease = [LeaseView("b", "a", 20, 0)]
    empty = replace(busy, free=0)
    assert decide(policy, master, empty, leases=lease) == []
    assert decide(ElasticLending(), master, empty, leases=lease) == [("RecallPages", "b", "a", 20)]
    long = device("b", 0, kv=60, waiting=1, tokens=70 * 16)
    assert decide(policy, master, long, leases=lease) == [("RecallPages", "b", "a", 10)]


def test_the_preset_has_the_fleet_policys_options() -> None:
    preset = resolve("swiftcache", {"published": 1, "master": 2})
    assert preset.fleet == ElasticLending(published=1, master=2)
    assert preset.values["published"] == 1
    assert resolve("swiftcache").fleet == ElasticLending()


def test_prefixes_that_nobody_misses_make_way_for_those_that_somebody_misses() -> None:
    """A lender whose cache fills its memory with prefixes of one use has all of it to spare."""
    policy = ElasticLending(window=10.0)
    a = device("a", 0, kv=99, cached=60)
    a = replace(a, hosting=(a.hosting[0]._replace(missed_blocks=30),))
    full = device("b", 2, kv=98, cached=90)
    decision = policy(view(0.0, a, full), None)
    assert asked(decision) == [("LendPages", "b", "a", 30)]
    # It misses some of what it gave up: it takes as much back, and gives up no more for a while.
    lease, memo = LeaseView("b", "a", 30, 0), decision.memo
    misses = replace(full, hosting=(full.hosting[0]._replace(missed_blocks=4),))
    decision = policy(view(1.0, a, misses, leases=[lease]), memo)
    assert asked(decision) == [("RecallPages", "b", "a", 4)]
    decision = policy(view(2.0, a, full, leases=[lease]), decision.memo)
    assert asked(decision) == [("LendPages", "b", "a", 2)]
    assert asked(policy(view(12.0, a, full, leases=[lease]), decision.memo))[0][3] == 30
