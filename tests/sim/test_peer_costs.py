"""How long the successor of a worker takes to start in virtual time."""

from __future__ import annotations

from ballast.sim.peer_costs import PeerCosts, WorkerStarts

COSTS = PeerCosts(start=1.0, cold_start=4.0, prepare=3.0)


def test_a_spare_that_waits_is_taken_and_prepared_again() -> None:
    starts = WorkerStarts(COSTS)
    assert starts.seconds(2.9) == 4.0, "it is being prepared yet"
    assert starts.seconds(3.0) == 1.0
    assert starts.seconds(9.0) == 4.0, "no worker has served since"
    starts.served(13.0)
    assert starts.seconds(15.9) == 4.0
    assert starts.seconds(16.0) == 1.0
