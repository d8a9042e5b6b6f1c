"""A cluster in virtual time: devices by name, every request answered, faults said plainly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ballast.core.cost import Traffic
from ballast.core.errors import ConfigError
from ballast.core.event import FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.units import MiB
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, Kind, parse_kinds
from ballast.sim.cluster_files import ClusterFiles, read_cluster_files
from ballast.sim.model_catalogue import facts
from ballast.sim.profile import device_profile
from ballast.sim.topology import ClusterLinks


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
    kinds = parse_kinds("4xH100-80G, a100-80g,2 x L4")
    assert [(k.number, k.profile.device) for k in kinds] == [
        (4, "H100-80G"),
        (1, "A100-80G"),
        (2, "L4"),
    ]


def test_groups_and_slices_are_named() -> None:
    kinds = parse_kinds("2xH100-80G:tp4,A100-80G:slices2,L4")
    named = [(k.number, k.profile.device, k.ranks, len(k.slices)) for k in kinds]
    assert named == [(2, "H100-80G", 4, 0), (1, "A100-80G", 1, 2), (1, "L4", 1, 0)]
    group, whole = kinds[0], parse_kinds("H100-80G")[0]
    assert group.link.to_device == 4 * whole.link.to_device
    large = spec("large", "Llama-2-70b")
    assert group.costs(large) == whole.profile.costs(large, tp=4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4xH1000", "H100-80G"),
        ("0xL4", "NUMBERxDEVICE"),
        ("00xL4", "NUMBERxDEVICE"),
        ("", "NUMBERxDEVICE"),
        ("4x", "device"),
        ("2xH100-80G:tp0", "H100-80G"),
    ],
)
def test_what_is_no_device_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_kinds(text)


@pytest.mark.parametrize("preset", ["static", "swap", "balloon"])
def test_everything_is_answered_by_the_models_device(preset: str) -> None:
    names = [f"m{i}" for i in range(7)]
    ends: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    where: dict[str, set[str]] = {}

    def received(device: str, at: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            tokens[output.request_id] += 1
        if isinstance(output, FinishedOutput | FailedOutput):
            ends[type(output).__name__] += 1
            where.setdefault(output.request_id, set()).add(device)

    cluster = Cluster(
        parse_kinds("2xH100-80G"), [spec(n) for n in names], resolve(preset), received
    )
    asked = arrivals(names, 140)
    assert cluster.run(asked) > asked[-1].arrival
    assert ends == Counter(FinishedOutput=140)
    assert all(where[s.id] == set(cluster.controller.homes()[s.model]) for s in asked)
    assert all(tokens[s.id] == s.max_tokens for s in asked)
    for device in cluster.devices.values():
        device.state.pool.validate()


def test_requests_of_one_instant_are_spread_over_the_devices(tmp_path: Path) -> None:
    """Each is routed by what the ones before it got, though the device has not heard of them."""
    homes = tmp_path / "homes.toml"
    homes.write_text("[homes]\nm0 = [0, 1, 2, 3]\n")
    where: Counter[tuple[str, str]] = Counter()

    def received(device: str, at: float, output: Output) -> None:
        if isinstance(output, FinishedOutput):
            where[output.request_id[:1], device] += 1

    files = read_cluster_files(None, str(homes), None)
    four = parse_kinds("4xH100-80G")
    cluster = Cluster(four, [spec("m0")], resolve("recompute"), received, files=files)
    bursts = [
        Submission(
            id=f"{burst}-{i}",
            model="m0",
            prompt=(1 + 40 * burst + i,) * 400,
            max_tokens=20,
            arrival=3.0 * burst,
            ignore_eos=True,
        )
        for burst in range(3)
        for i in range(40)
    ]
    cluster.run(bursts)
    assert where == {(str(burst), name): 10 for burst in range(3) for name in cluster.devices}


def test_a_model_that_is_too_large_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"'big'.*GiB are missing"):
        Cluster(
            parse_kinds("8xL4"),
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
    ).controller.homes()
    assert set(homes.values()) == {("H100-80G:0",)}, "all are easy for the quick one"


def served(kinds: str, specs: list[ModelSpec], n: int = 30, **how: Any) -> tuple[Cluster, float]:
    """A cluster that has served so many requests, and the last token's time."""
    ends: Counter[str] = Counter()
    last = 0.0

    def received(device: str, at: float, output: Output) -> None:
        nonlocal last
        ends[type(output).__name__] += 1
        last = at

    cluster = Cluster(parse_kinds(kinds), specs, resolve("balloon"), received, **how)
    cluster.run(arrivals([s.name for s in specs], n))
    assert ends["FinishedOutput"] == n
    for device in cluster.devices.values():
        device.state.pool.validate()
    return cluster, last


def test_a_group_serves_what_one_device_cannot_hold() -> None:
    large = [spec("large", "Llama-2-70b")]
    with pytest.raises(ConfigError, match="are missing"):
        served("8xH100-80G", large)
    two, slower = served("H100-80G:tp4", large)
    (state,) = (device.state for device in two.devices.values())
    single = parse_kinds("H100-80G")[0].profile.hardware
    assert single is not None
    assert state.settings.budget_bytes > 3.5 * 0.9 * single.memory_bytes
    _, quicker = served("H100-80G:tp8", large)
    assert quicker < slower


def test_slices_are_parts_of_a_device_that_share_its_link() -> None:
    specs = [spec(f"m{i}", "LLaMA-7b") for i in range(2)]
    whole, _ = served("A100-80G@eager", specs)
    halves, _ = served("A100-80G@eager:slices2", specs)
    assert len(halves.devices) == 2
    budgets = {d.state.settings.budget_bytes for c in (whole, halves) for d in c.devices.values()}
    assert max(budgets) == pytest.approx(2 * min(budgets), rel=1e-3)

    def brought(cluster: Cluster) -> list[float]:
        story = (device.story.entries for device in cluster.devices.values())
        return [e["seconds"] for es in story for e in es if e.get("event") == "TransferDone"]

    (first, second), (alone, later) = brought(halves), brought(whole)
    half = parse_kinds("A100-80G@eager")[0].link.to_device / 2
    assert first == pytest.approx(specs[0].weight_bytes / half, rel=0.05), "nearly all together"
    assert alone < first, "alone only the mapping of its pages slows it"
    assert later == pytest.approx(alone)
    assert second == pytest.approx(first)


def test_devices_of_a_host_bring_their_models_more_slowly() -> None:
    specs = [spec(f"m{i}") for i in range(4)]
    link = parse_kinds("4xH100-80G")[0].link
    shared = ClusterLinks(per_host=4, host=link)

    def first(**how: Any) -> float:
        cluster, _ = served("4xH100-80G", specs, n=4, **how)
        assert all(len(on) == 1 for on in cluster.controller.homes().values())
        stories = (device.story.entries for device in cluster.devices.values())
        return max(e["seconds"] for es in stories for e in es if e.get("event") == "TransferDone")

    apart = first()
    assert first(files=ClusterFiles(joints=ClusterLinks(per_host=4))) == apart
    # Four that map and copy at once ask for 1.8 times what the link of one carries.
    assert first(files=ClusterFiles(joints=shared)) > 1.5 * apart


def test_models_are_where_a_file_says(tmp_path: Path) -> None:
    specs = [spec(f"m{i}") for i in range(3)]
    file = tmp_path / "homes.toml"
    file.write_text('[homes]\nm0 = [1]\nm1 = ["H100-80G:0", 1]\nm2 = [0, 0]\n')
    cluster, _ = served("2xH100-80G", specs, files=read_cluster_files(None, str(file), None))
    names = [f"H100-80G:{i}" for i in range(2)]
    assert cluster.controller.homes() == {
        "m0": (names[1],),
        "m1": (names[0], names[1]),
        "m2": (names[0],),
    }


@pytest.mark.parametrize(
    ("homes", "says"),
    [
        ("m0 = [0]", "'m1'.*one device or more"),
        ("m0 = [0]\nm1 = []", "'m1'.*one device or more"),
        ("m0 = [0]\nm1 = [1]\nm2 = [0]", "'m2'.*known here"),
        ("m0 = [0]\nm1 = [2]", "numbered from 0 to 1"),
        ('m0 = [0]\nm1 = ["L4:7"]', "'L4:7'.*known here: L4:0, L4:1"),
        ('m0 = [0]\nm1 = "L4:0"', "homes"),
        ("m0 = [0]\nm1 = [1]\n[extra]", "extra"),
    ],
)
def test_faults_in_a_file_of_homes_are_named(tmp_path: Path, homes: str, says: str) -> None:
    file = tmp_path / "homes.toml"
    file.write_text(f"[homes]\n{homes}\n")
    with pytest.raises(ConfigError, match=says):
        served(
            "2xL4",
            [spec("m0"), spec("m1")],
            files=read_cluster_files(None, str(file), None),
        )


def test_a_device_too_small_for_a_given_model_is_named(tmp_path: Path) -> None:
    file = tmp_path / "homes.toml"
    file.write_text("[homes]\nm0 = [0]\nlarge = [1]\n")
    specs = [spec("m0"), spec("large", "Llama-2-13b")]
    with pytest.raises(ConfigError, match=r"L4:1 is too small for it: .*missing"):
        served("H100-80G,L4", specs, files=read_cluster_files(None, str(file), None))


def test_links_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "links.toml"
    file.write_text('per_host = 4\n[host]\nto_device = "60GB/s"\nto_host = 5e10\n')
    assert read_cluster_files(file, None, None).joints == ClusterLinks(
        per_host=4, host=LinkRates(6e10, 5e10, 6e10, 5e10)
    )
    assert read_cluster_files(None, "work", None) == ClusterFiles()
    file.write_text("per_hosts = 4\n")
    with pytest.raises(ConfigError, match="per_host"):
        read_cluster_files(file, None, None)


ORDERS = """
[[orders]]
at = 0.5
lender = 0
borrower = "L4:1"
lend = "256MiB"
[[orders]]
at = 3.0
lender = 0
borrower = 1
recall = "all"
"""


def lent(tmp_path: Path, orders: str, kinds: str = "2xL4", per_host: int = 2) -> Cluster:
    links, file, homes = (tmp_path / name for name in ("l.toml", "o.toml", "h.toml"))
    links.write_text(f'per_host = {per_host}\npeers = "pcie"\n')
    file.write_text(orders)
    homes.write_text("[homes]\nm0 = [0]\nm1 = [1]\n")
    there = read_cluster_files(links, str(homes), file)
    return served(kinds, [spec("m0"), spec("m1")], files=there)[0]


def test_devices_lend_what_a_file_orders(tmp_path: Path) -> None:
    cluster = lent(tmp_path, ORDERS)
    lender, borrower = cluster.devices.values()
    (got,) = [e for e in borrower.story.entries if e.get("event") == "Lent"]
    assert len(got["page_numbers"]) == 256 * MiB // borrower.state.settings.page_bytes
    assert any(e.get("event") == "Returned" for e in lender.story.entries)
    assert lender.state.lending.lent == borrower.state.lending.borrowed == {}


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        (ORDERS.replace("lender = 0", "lender = 1"), "two devices of one host"),
        (ORDERS.replace("lender = 0", "lender = 7"), "numbered from 0 to 1"),
        (ORDERS.replace('lend = "256MiB"', 'lend = "4KiB"'), "a page or more"),
        (ORDERS.replace('recall = "all"', ""), "one of lend, recall, drain"),
        (ORDERS.replace('recall = "all"', "drain = 0\nuncordon = 0"), "one of lend, recall, drain"),
        ("[[orders]]\nat = 1\nplace = 0", "with model"),
        ('[[orders]]\nat = 1\nmodel = "m7"\nplace = 0', "m7"),
        (ORDERS.replace("at = 3.0", "at = -3.0"), "at"),
    ],
)
def test_faults_in_orders_are_named(tmp_path: Path, orders: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        lent(tmp_path, orders)


def test_an_operator_drains_a_device_and_gives_it_back(tmp_path: Path) -> None:
    links, orders, homes = (tmp_path / name for name in ("l.toml", "o.toml", "h.toml"))
    links.write_text('per_host = 2\npeers = "pcie"\n')
    orders.write_text("[[orders]]\nat = 2.0\ndrain = 0\n[[orders]]\nat = 4.0\nuncordon = 0\n")
    homes.write_text("[homes]\nm0 = [0]\nm1 = [1]\n")
    tokens: Counter[str] = Counter()
    ends: list[tuple[str, float, Output]] = []
    done: list[tuple[float, str, str | None]] = []

    def received(device: str, at: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            assert output.index == tokens[output.request_id], "in order, none twice"
            tokens[output.request_id] += 1
        else:
            ends.append((device, at, output))

    cluster = Cluster(
        parse_kinds("2xH100-80G"),
        [spec("m0"), spec("m1")],
        resolve("balloon"),
        received,
        on_move=lambda at, order, refused: done.append((at, type(order).__name__, refused)),
        files=read_cluster_files(links, str(homes), orders),
    )
    asked = [replace(s, max_tokens=s.max_tokens + 100) for s in arrivals(["m0", "m1"], 120)]
    cluster.run(asked)
    assert done == [(2.0, "Drain", None), (4.0, "Uncordon", None)]
    assert all(isinstance(output, FinishedOutput) for _, _, output in ends)
    assert {s.id: s.max_tokens for s in asked} == tokens
    first, second = cluster.devices
    late = {device for device, at, _ in ends if 3.0 < at < 4.0}
    assert late == {second}, "all of the first device's requests have moved"
    assert cluster.controller.moved > 0, "running ones with their KV"
    assert cluster.controller.homes() == {"m0": (first, second), "m1": (second,)}
    assert {device for device, at, _ in ends if at > 4.0} == {first, second}
    for device in cluster.devices.values():
        device.state.pool.validate()


def test_devices_of_different_hosts_do_not_lend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two devices of one host"):
        lent(tmp_path, ORDERS, per_host=1)
    with pytest.raises(ConfigError, match="pages of one size"):
        lent(tmp_path, ORDERS.replace('"L4:1"', "1"), "H100-80G:tp2,L4", per_host=3)


def test_a_model_that_comes_to_another_host_crosses_the_network(tmp_path: Path) -> None:
    orders, homes = (tmp_path / name for name in ("o.toml", "h.toml"))
    orders.write_text("[[orders]]\nat = 1.0\ndrain = 0\n")
    homes.write_text("[homes]\nm0 = [0]\nm1 = [1]\n")
    asked = arrivals(["m0", "m1"], 120)
    model = {s.id: s.model for s in asked}
    n_bytes = sum(spec("m0").segment_bytes)

    def first(seconds: float) -> float:
        """When the other device answers its first request of the model."""
        found: list[float] = []

        def received(device: str, at: float, output: Output) -> None:
            if device.endswith(":1") and model[output.request_id] == "m0":
                found.append(at)

        files = read_cluster_files(None, str(homes), orders)
        network = None if not seconds else n_bytes / seconds
        files = replace(files, joints=replace(files.joints, network=network))
        kinds = parse_kinds("2xH100-80G")
        cluster = Cluster(
            kinds, [spec("m0"), spec("m1")], resolve("balloon"), received, files=files
        )
        cluster.run(asked)
        return min(found)

    assert 1.0 < first(0.0) < 2.0 <= first(1.0)
