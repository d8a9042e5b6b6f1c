"""What a fleet asks of a machine that has not got it: named before anything is loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ballast.cluster.machine_check import check_machine, machine_faults, memory_warning
from ballast.core.errors import ConfigError, DeviceError
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, ModelSettings
from ballast.core.units import GiB
from ballast.memory.cuda.probe import gpu_bytes
from ballast.memory.host_memory import Bound


def fleet(*devices: DeviceSettings) -> FleetSettings:
    models = (ModelSettings(name="a", path="a"),)
    links = (LinkSettings(),) * (len(devices) - 1)
    return FleetSettings(models=models, device=devices[0], others=devices[1:], other_links=links)


def cpu(n_bytes: int, name: str = "cpu:0") -> DeviceSettings:
    return DeviceSettings(name=name, budget_bytes=n_bytes)


def gpu(number: int, n_bytes: int = GiB) -> DeviceSettings:
    return cpu(n_bytes, f"cuda:{number}")


def machine(n_bytes: int, who: str = "the machine") -> Callable[[], Bound]:
    return lambda: (n_bytes, who)


def none() -> list[int]:
    raise DeviceError("CUDA", "the NVIDIA driver's libcuda.so.1 is not installed")


def test_a_budget_that_the_machine_has_not_says_what_it_has() -> None:
    check_machine(fleet(cpu(8 * GiB)), machine(8 * GiB), none)
    with pytest.raises(ConfigError) as caught:
        check_machine(fleet(cpu(9 * GiB)), machine(8 * GiB), none)
    assert str(caught.value).startswith(
        "devices[0].budget: '9GiB': the machine has 8GiB of memory in all"
    )
    both = fleet(cpu(5 * GiB), cpu(4 * GiB, "cpu:1"))
    with pytest.raises(ConfigError, match="of all devices: '9GiB': the control group grants 8GiB"):
        check_machine(both, machine(8 * GiB, "the control group"), none)


def test_a_gpu_takes_no_memory_of_the_host() -> None:
    check_machine(fleet(gpu(0, 40 * GiB)), machine(8 * GiB), lambda: [80 * GiB])
    with pytest.raises(ConfigError, match=r"devices\[0\].budget: '81GiB': cuda:0 has 80GiB in all"):
        check_machine(fleet(gpu(0, 81 * GiB)), machine(8 * GiB), lambda: [80 * GiB])


def test_a_gpu_that_is_not_there_says_what_to_do() -> None:
    found = list(machine_faults(fleet(gpu(0), gpu(1)), machine(GiB), none))
    assert len(found) == 1
    assert found[0].key == "devices[0].name"
    for word in ("libcuda.so.1 is not installed", "ballast doctor", "leave `name` out"):
        assert word in str(found[0])
    with pytest.raises(
        ConfigError, match=r"devices\[1\].name: 'cuda:3': CUDA shows cuda:0, cuda:1"
    ):
        check_machine(fleet(gpu(0), gpu(3)), machine(GiB), lambda: [GiB, GiB])


def test_what_is_used_by_others_now_is_warned_of() -> None:
    assert memory_warning(fleet(cpu(8 * GiB)), machine(8 * GiB)) is None
    result = memory_warning(fleet(cpu(8 * GiB)), machine(6 * GiB))
    assert result == "budgets of 8GiB exceed the memory that is available now, 6GiB (the machine)"


def test_the_driver_is_asked_in_a_process_of_its_own() -> None:
    with pytest.raises(DeviceError, match=r"libnone.so.7 is not installed"):
        gpu_bytes("libnone.so.7")
    with pytest.raises(DeviceError, match="cuInit"):
        gpu_bytes("libc.so.6")  # a library that has no such function


DRIVER = """
#include <stddef.h>
int cuInit(unsigned flags) { return %d; }
int cuGetErrorString(int code, const char **why) { *why = "no device"; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 7; return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = ((size_t)80 << 30) + device; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler for a driver's stand-in")
def test_what_a_driver_answers(tmp_path: Path) -> None:
    def driver(code: int) -> str:
        source, library = tmp_path / f"{code}.c", tmp_path / f"{code}.so"
        source.write_text(DRIVER % code)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        return str(library)

    assert gpu_bytes(driver(0)) == [80 * GiB + 7, 80 * GiB + 8]
    with pytest.raises(DeviceError, match=r"cuInit: no device \(100\)"):
        gpu_bytes(driver(100))


REFUSED = """
import sys
from ballast.cli import app
from ballast.core.errors import ConfigError
try:
    app(["serve", sys.argv[1], "--port", "0"], standalone_mode=False)
except ConfigError as error:
    print(error)
print(sorted({"torch", "fastapi", "numba", "zmq", "transformers"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("{budget: 1GiB, name: 'cuda:0'}", "this machine has no GPU that CUDA can use"),
        ("{budget: 4000TiB}", "of memory in all"),
    ],
)
def test_a_server_refuses_before_it_imports_what_takes_seconds(
    tmp_path: Path, device: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: [{{name: a, path: .}}]\ndevices: [{device}]\n")
    command = [sys.executable, "-c", REFUSED, str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    *_, result, heavy = ran.stdout.splitlines()
    assert says in result
    assert heavy == "[]"
