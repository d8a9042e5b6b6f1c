"""Devices that prefill and devices that decode, in virtual time: every request is told whole."""

from __future__ import annotations

from collections import defaultdict

import pytest

from ballast.core.errors import ConfigError
from ballast.core.event import FailedOutput, Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.settings import Role
from ballast.policy.presets import resolve
from ballast.sim import controller
from ballast.sim.cluster import Cluster, parse_kinds
from ballast.sim.cluster_files import ClusterFiles, GivenHomes
from ballast.sim.peer_costs import ASSUMED
from ballast.sim.topology import APART, ClusterLinks, PeerLinks
from tests.sim.test_cluster import spec

OUTPUT = 200
NVLINK = ClusterLinks(per_host=3, peers=PeerLinks.NVLINK, port=LinkRates.even(200e9))
JOINED = {
    "nvlink": NVLINK,
    "pcie": ClusterLinks(per_host=3, peers=PeerLinks.PCIE),
    "memory": ClusterLinks(per_host=3, peers=PeerLinks.MEMORY),
}
SPLIT = "1xH100-80G:prefill,2xH100-80G:decode"


def arrivals(n: int, first: int = 100) -> list[Submission]:
    return [
        Submission(
            id=f"r{i}",
            model="m" if i % 3 else "other",
            prompt=tuple(1 + (i * k) % 97 for k in range(first + 37 * (i % 11))),
            max_tokens=1 if i % 10 == 9 else OUTPUT,
            arrival=0.05 * i,
            ignore_eos=True,
        )
        for i in range(n)
    ]


class Run:
    """What came of one."""

    def __init__(
        self,
        devices: str = SPLIT,
        joints: ClusterLinks = NVLINK,
        preset: str = "balloon",
        wanted: list[Submission] | None = None,
        homes: GivenHomes | None = None,
    ) -> None:
        self.tokens: defaultdict[str, list[tuple[int, float, str]]] = defaultdict(list)
        self.ends: dict[str, Output] = {}
        self.cluster = Cluster(
            parse_kinds(devices),
            [spec("m"), spec("other")],
            resolve(preset),
            self._heard,
            files=ClusterFiles(joints=joints, homes=homes),
        )
        self.wanted = arrivals(60) if wanted is None else wanted
        self.cluster.run(self.wanted)
        for device in self.cluster.devices.values():
            device.state.validate()
            assert not any(m.kv.counts.used_blocks for m in device.state.models.values())

    def _heard(self, device: str, at: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            self.tokens[output.request_id].append((output.index, at, device))
        else:
            assert output.request_id not in self.ends, output
            self.ends[output.request_id] = output

    def validate(self) -> None:
        """All tokens came once, in order of index and time, and all requests have ended well."""
        for submission in self.wanted:
            got = self.tokens[submission.id]
            assert [index for index, _, _ in got] == list(range(submission.max_tokens))
            assert [at for _, at, _ in got] == sorted(at for _, at, _ in got)
        assert len(self.ends) == len(self.wanted)
        assert not any(isinstance(end, FailedOutput) for end in self.ends.values())

    @property
    def moved(self) -> int:
        return self.cluster.controller.moved


@pytest.mark.parametrize("joints", JOINED)
@pytest.mark.parametrize("preset", ["balloon", "recompute+fcfs"])
def test_first_tokens_come_where_prompts_are_computed_and_the_last_elsewhere(
    preset: str, joints: str
) -> None:
    ran = Run(joints=JOINED[joints], preset=preset)
    ran.validate()
    (prefills,) = (
        n for n, d in ran.cluster.devices.items() if d.state.settings.role is Role.PREFILL
    )
    assert {got[0][2] for got in ran.tokens.values()} == {prefills}
    long = [got for id, got in ran.tokens.items() if len(got) > 1]
    assert len(long) == 54
    assert ran.moved == 54
    assert all(got[-1][2] != prefills for got in long)


def test_equal_runs_are_equal() -> None:
    assert Run().tokens == Run().tokens


def test_short_prompts_wait_for_a_block_of_kv() -> None:
    ran = Run(wanted=arrivals(3, first=5))
    ran.validate()
    assert len(ran.tokens["r0"]) == OUTPUT
    assert ran.moved == 3


def test_a_request_ends_where_it_began_if_no_device_that_decodes_serves_its_model() -> None:
    homes = GivenHomes("a test", {"m": [0], "other": [0, 1]})
    ran = Run(homes=homes)
    ran.validate()
    assert {device for id, got in ran.tokens.items() for _, _, device in got} == set(
        list(ran.cluster.devices)[:2]
    )
    assert ran.moved == sum(s.model == "other" and s.max_tokens > 1 for s in ran.wanted)


def test_devices_without_roles_do_not_hand_over() -> None:
    ran = Run("3xH100-80G")
    ran.validate()
    assert ran.moved == 0


def test_roles_are_read_beside_groups() -> None:
    kinds = parse_kinds("2xH100-80G:tp4:decode, H100-80G:prefill,H100-80G")
    assert [k.role for k in kinds] == [Role.DECODE, Role.PREFILL, Role.BOTH]
    assert [(k.number, k.ranks) for k in kinds] == [(2, 4), (1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("devices", "joints", "says"),
    [
        (SPLIT, APART, "reach each other"),
        ("2xH100-80G:prefill", NVLINK, "another device has to decode"),
        ("2xH100-80G:decode", NVLINK, "another device has to prefill"),
    ],
)
def test_roles_that_no_request_could_follow_are_refused(
    devices: str, joints: ClusterLinks, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Run(devices, joints)


def test_a_request_that_is_on_its_way_when_the_last_has_arrived_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "SETTLING", ASSUMED.message / 4)
    warming, last = (
        Submission(
            id=f"{at:g}",
            model="m",
            prompt=tuple(range(1, 200)),
            max_tokens=OUTPUT,
            arrival=at,
            ignore_eos=True,
        )
        for at in (0.0, 5.0)
    )
    ran = Run(wanted=[warming, last])
    ran.validate()
    assert {device for _, _, device in ran.tokens[last.id]} > {ran.tokens[last.id][0][2]}
