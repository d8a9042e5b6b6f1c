"""How simulated devices are joined: which of them share links, and how they reach each other."""

from __future__ import annotations

from math import inf

import pytest

from ballast.core.clock import VirtualClock
from ballast.core.errors import ConfigError
from ballast.core.link import Direction, LinkRates
from ballast.memory.copies import Copy
from ballast.sim.event_heap import EventHeap
from ballast.sim.link import SimLink
from ballast.sim.topology import APART, ClusterLinks, HostPlace, PeerLinks, places

LINK, HOST, PORT = LinkRates.even(50.0), LinkRates.even(60.0), LinkRates.even(400.0)
DOWN, UP = Direction


def seconds(*moves: tuple[HostPlace, HostPlace | Direction], n_bytes: int = 600) -> list[float]:
    """How long moves take that begin together: between a device and its host, or its peer."""
    world = moves[0][0].host.world
    ends = [0.0] * len(moves)
    for i, (place, to) in enumerate(moves):
        path = place.to_peer(to) if isinstance(to, HostPlace) else place.route.path[to]

        def ended(at: float, took: float, i: int = i) -> None:
            ends[i] = took

        world.fluid.start(0.0, path, n_bytes, ended)
    world.agenda.run(inf)
    return ends


def test_apart_devices_share_nothing() -> None:
    a, b = places(APART, [(LINK, 1)] * 2)
    assert a.host is not b.host
    assert seconds((a, DOWN)) == seconds((b, DOWN)) == [12.0]


def test_devices_of_a_host_share_its_link() -> None:
    a, b, c = places(ClusterLinks(per_host=2, host=HOST), [(LINK, 1)] * 3)
    assert a.host is b.host is not c.host
    assert seconds((a, DOWN)) == [12.0], "alone its own link is the narrower one"
    a, b = places(ClusterLinks(per_host=2, host=HOST), [(LINK, 1)] * 2)
    assert seconds((a, DOWN), (b, DOWN)) == [20.0, 20.0]


def test_hosts_of_one_world_reach_each_other_over_the_network() -> None:
    joints = ClusterLinks(per_host=1, network=30.0)
    a, b, c = places(joints, [(LINK, 1)] * 3, one_world=True)
    assert len({id(p.host) for p in (a, b, c)}) == 3
    assert a.host.world is b.host.world is c.host.world
    assert a.host.fluid is not b.host.fluid
    ends: list[float] = []
    for path in (a.over_network(c), b.over_network(c), c.over_network(a)):
        a.host.world.fluid.start(0.0, path, 600, lambda at, took: ends.append(took))
    a.host.world.agenda.run(inf)
    assert ends == [20.0, 40.0, 40.0], "two into one host share its wire"
    d, e = places(APART, [(LINK, 1)] * 2)
    with pytest.raises(ConfigError, match="reach each other"):
        d.over_network(e)


def test_a_group_is_on_one_host() -> None:
    units = [(LINK, 1), (LINK, 2), (LINK, 4), (LINK, 1)]
    one, two, four, last = places(ClusterLinks(per_host=2, host=HOST), units)
    hosts = [place.host for place in (one, two, four, last)]
    assert len({id(host) for host in hosts}) == 4
    one, two = places(ClusterLinks(per_host=3), units[:2])
    assert one.host is two.host


def test_peers_over_ports_leave_the_host_alone() -> None:
    joints = ClusterLinks(per_host=2, host=HOST, peers=PeerLinks.NVLINK, port=PORT)
    a, b = places(joints, [(LINK, 1)] * 2)
    assert seconds((a, b)) == [1.5]
    a, b = places(joints, [(LINK, 1)] * 2)
    assert seconds((a, b), (b, DOWN)) == [1.5, 12.0]


def test_peers_over_pcie_slow_what_comes_from_the_host() -> None:
    a, b = places(ClusterLinks(per_host=2, host=HOST, peers=PeerLinks.PCIE), [(LINK, 1)] * 2)
    assert seconds((a, b), (b, DOWN)) == [24.0, 24.0]


@pytest.mark.parametrize(("host", "took"), [(None, 1.0), (LinkRates.even(1e9), 2.0)])
def test_weights_come_over_the_links_of_all_devices_at_once(
    host: LinkRates | None, took: float
) -> None:
    joints = ClusterLinks(
        per_host=4, host=host, peers=PeerLinks.NVLINK, port=LinkRates.even(1e10), several=True
    )
    link = LinkRates.even(500e6)
    made = places(joints, [(link, 1)] * 4)
    clock = VirtualClock()
    heap = EventHeap(clock, made[0].host.world.agenda)
    loads = SimLink(heap, clock, link, route=made[1].route)
    ends: list[float] = []

    class Watch:
        marks = (1_500_000_000,)

        def landed(self, now: float, n_bytes: int) -> None:
            ends.append(now)

    loads.start(1, [Copy(0, 0, 2 * 10**9)], watch=Watch())
    loads.start(2, [Copy(0, 0, 10)])
    loads.start(3, [Copy(0, 0, 10**9)])
    loads.stop(3)
    made[0].host.world.agenda.run(inf)
    assert not loads.moving
    assert len(ends) == 2
    assert 0.7 * took < ends[0] < ends[1]
    assert ends[1] == pytest.approx(took, rel=0.1)


def test_ways_that_there_are_not_are_refused() -> None:
    a, b = places(ClusterLinks(per_host=2), [(LINK, 1)] * 2)
    with pytest.raises(ConfigError, match="do not reach each other"):
        a.to_peer(b)
    with pytest.raises(ConfigError, match="one host"):
        a.to_peer(a)
    with pytest.raises(ConfigError, match="port"):
        ClusterLinks(peers=PeerLinks.NVLINK)
    with pytest.raises(ConfigError, match="over ports"):
        ClusterLinks(several=True)
    with pytest.raises(ConfigError, match="one device or more"):
        ClusterLinks(per_host=0)
