"""The memory that this process may have: the machine's, or what a control group, its own or one
above it, grants."""

from __future__ import annotations

from pathlib import Path

import pytest

from ballast.core.units import GiB, MiB
from ballast.memory.control_groups import control_groups
from ballast.memory.host_memory import available, installed, is_granted

UNLIMITED = 9223372036854771712
"""What version 1 has for no limit."""
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    "34 31 0:38 {top} /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def machine(root: Path, cgroup: str, mountinfo: str) -> Path:
    """A machine of 4 GiB, 3 GiB of it available."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(
        f"MemTotal: {4 << 20} kB\nMemFree: 3 kB\nMemAvailable: {3 << 20} kB\n"
    )
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    (root / "proc" / "self" / "mountinfo").write_text(mountinfo)
    return root


def group(root: Path, path: str, **files: object) -> None:
    directory = root / "sys" / "fs" / "cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def test_a_machine_without_groups_has_its_memory(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", "")
    assert installed(root) == (4 * GiB, "the machine")
    assert available(root) == (3 * GiB, "the machine")
    (root / "proc" / "self" / "cgroup").unlink()
    (root / "proc" / "self" / "mountinfo").unlink()
    assert installed(root) == (4 * GiB, "the machine")


@pytest.mark.parametrize("limited", ["", "system.slice", "system.slice/ballast.service"])
def test_the_limit_of_any_group_above_counts(tmp_path: Path, limited: str) -> None:
    """A systemd unit's MemoryMax, its slice's, and that of a container, whose group is the top."""
    root = machine(tmp_path, "0::/system.slice/ballast.service\n", V2)
    for path in ("", "system.slice", "system.slice/ballast.service"):
        limit = 600 * MiB if path == limited else "max"
        group(root, path, memory__max=limit, memory__current=100 * MiB)
    assert installed(root) == (600 * MiB, f"the control group /{limited}")
    assert available(root) == (500 * MiB, f"the control group /{limited}")
    assert is_granted(installed(root)[1])


def test_the_least_of_several_limits_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a/b\n", V2)
    group(root, "", memory__max="max")
    group(root, "a", memory__max=800 * MiB, memory__current=700 * MiB)
    group(root, "a/b", memory__max=600 * MiB, memory__current=10 * MiB)
    assert installed(root) == (600 * MiB, "the control group /a/b")
    assert available(root) == (100 * MiB, "the control group /a"), "which others use, too"


def test_the_file_cache_makes_way_and_nothing_is_below_zero(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", V2)
    group(root, "", memory__max=600 * MiB, memory__current=590 * MiB)
    assert available(root)[0] == 10 * MiB
    stat = f"anon 1\nshmem {90 * MiB}\nactive_file {100 * MiB}\ninactive_file {300 * MiB}"
    group(root, "", memory__stat=stat)
    assert available(root)[0] == 410 * MiB
    group(root, "", memory__high=500 * MiB)
    assert available(root)[0] == 310 * MiB
    assert installed(root)[0] == 600 * MiB
    group(root, "", memory__current=2 * GiB)
    assert available(root)[0] == 0


@pytest.mark.parametrize("limited", ["", "docker", "docker/abc"])
def test_version_1(tmp_path: Path, limited: str) -> None:
    memberships = "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/\n0::/other\n"
    root = machine(tmp_path, memberships, V1.format(top="/"))
    for path in ("", "docker", "docker/abc"):
        limit = 600 * MiB if path == limited else UNLIMITED
        files = {"memory__limit_in_bytes": limit, "memory__usage_in_bytes": 90 * MiB}
        group(root, f"memory/{path}", **files)
    (root / "sys/fs/cgroup/unified").mkdir()
    assert installed(root) == (600 * MiB, f"the control group /{limited}")
    assert available(root)[0] == 510 * MiB
    cached = f"total_active_file {MiB}\ntotal_inactive_file {9 * MiB}"
    group(root, f"memory/{limited}", memory__stat=cached)
    assert available(root)[0] == 520 * MiB


def test_a_container_that_sees_a_part_of_the_tree(tmp_path: Path) -> None:
    """Without a namespace of its own: the mount point is the container's group."""
    root = machine(tmp_path, "4:memory:/docker/abc/job\n0::/\n", V1.format(top="/docker/abc"))
    limit = {"memory__limit_in_bytes": 500 * MiB, "memory__usage_in_bytes": 0}
    group(root, "memory", **limit)
    group(root, "memory/job", memory__limit_in_bytes=UNLIMITED, memory__usage_in_bytes=0)
    assert installed(root) == (500 * MiB, "the control group /docker/abc")
    # What is above the mount is known by the sum that version 1 keeps.
    group(root, "memory/job", memory__stat=f"hierarchical_memory_limit {400 * MiB}")
    assert installed(root) == (400 * MiB, "the control group /docker/abc/job")


@pytest.mark.parametrize("path", ["/..", "/../../x", "/elsewhere/job", "/gone/since"])
def test_a_group_that_the_mount_does_not_show(tmp_path: Path, path: str) -> None:
    """What can be seen counts, whatever this process's own group is called."""
    top = "/kubepods/pod" if "elsewhere" in path else "/"
    root = machine(tmp_path, f"0::{path}\n", V2.replace(" / /sys", f" {top} /sys"))
    group(root, "", memory__max=600 * MiB, memory__current=0)
    assert installed(root)[0] == 600 * MiB


def test_a_mount_point_with_a_space(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a\n", V2.replace("/sys/fs/cgroup", r"/odd\040place"))
    (root / "odd place" / "a").mkdir(parents=True)
    (root / "odd place" / "a" / "memory.max").write_text("4096\n")
    assert installed(root)[0] == 4096
    assert [g.name for g in control_groups("memory", root)] == ["/a", "/"]


def test_this_machine_has_memory() -> None:
    assert 0 < available()[0] <= installed()[0]
