"""`scripts/house` measures small made packages, and fails where a figure is beyond its limit."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "house"
PACKAGE = "made_for_house"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    """The script as a module; its name has no `.py`, and it leaves no compiled file behind."""
    loader = SourceFileLoader("house_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    wrote = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    sys.modules[loader.name] = module
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = wrote
        del sys.modules[loader.name]
    return module


def write(root: Path, files: dict[str, str]) -> None:
    """Write the files of a package; `__init__` files that are not named are empty."""
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for parent in path.parents:
            if parent == root:
                break
            (parent / "__init__.py").touch()


def figures(house: ModuleType, root: Path, files: dict[str, str]) -> dict[str, Any]:
    """Measure a package of these files; the figures by name."""
    write(root, files)
    return {figure.name: figure for figure in house.measure(root, PACKAGE)}


def function(name: str, lines: int) -> str:
    """A function of so many lines."""
    return f"def {name}() -> None:\n" + "    pass\n" * (lines - 1)


def test_lengths_of_functions_without_those_of_kernels(house: ModuleType, tmp_path: Path) -> None:
    code = "".join(function(f"f{n}", n) for n in range(2, 12))
    found = figures(
        house,
        tmp_path,
        {"a.py": code, "kernels/b.py": function("long", 99), "c.py": function("most", 60)},
    )
    # 2, 3, .., 11 and 60: the sixth and the tenth of eleven.
    assert found["function length, median"].value == 7
    assert found["function length, p90"].value == 11
    assert found["function length, max"].value == 60
    long = found["functions of 60 lines and more"]
    assert long.found == [f"{PACKAGE}/c.py:1: most, 60 lines"]


def test_methods_and_nested_functions_are_counted_and_decorators_are_not(
    house: ModuleType, tmp_path: Path
) -> None:
    code = (
        "class A:\n"
        "    @property\n"
        "    def outer(self) -> int:\n"
        "        async def inner() -> int:\n"
        "            return 1\n"
        "        return 2\n"
    )
    found = figures(house, tmp_path, {"a.py": code})
    assert found["function length, median"].value == 2
    assert found["function length, max"].value == 4


def test_a_package_without_functions(house: ModuleType, tmp_path: Path) -> None:
    found = figures(house, tmp_path, {"a.py": ""})
    assert found["function length, max"].value == 0
    assert found["typed returns"].value == 1


def test_long_files(house: ModuleType, tmp_path: Path) -> None:
    files = {"a.py": "x = 1\n" * 400, "b.py": "x = 1\n" * 401, "kernels/c.py": "x = 1\n" * 401}
    found = figures(house, tmp_path, files)["files over 400 lines"]
    assert found.found == [f"{PACKAGE}/b.py:1: 401 lines"]


def test_typed_returns(house: ModuleType, tmp_path: Path) -> None:
    code = "def a() -> int: ...\ndef b(): ...\ndef c() -> int: ...\nasync def d() -> int: ...\n"
    files = {"a.py": code, "kernels/b.py": "def e(): ...\n"}
    found = figures(house, tmp_path, files)["typed returns"]
    assert found.value == 0.75
    assert found.found == [f"{PACKAGE}/a.py:2: b"]


def test_public_names_of_several_classes(house: ModuleType, tmp_path: Path) -> None:
    one = "class Place: ...\nclass _Own: ...\nclass Outer:\n    class Plan: ...\n"
    two = "class _Own: ...\nclass Place: ...\nclass Plan: ...\n"
    found = figures(house, tmp_path, {"a.py": one, "b.py": two})
    names = found["public class names defined more than once"]
    assert names.found == [f"{PACKAGE}/a.py:1, {PACKAGE}/b.py:2: Place"]


def methods(names: str) -> str:
    return "".join(f"    def {name}(self) -> None: self._{name} = 1\n" for name in names)


def test_large_classes_are_counted_with_what_they_inherit(
    house: ModuleType, tmp_path: Path
) -> None:
    base = f"class Base:\n    def __len__(self) -> int: ...\n{methods('abcdefghijk')}"
    large = f"from {PACKAGE}.a import Base\nclass Large(Base):\n{methods('klmnopqrstu')}"
    inner = "def make() -> None:\n    class Large(Large):\n        pass\n"
    fields = "".join(f"    f{n}: int\n" for n in range(16))
    records = f"@dataclass\nclass Facts:\n{fields}class Held:\n{fields}"
    files = {"a.py": base, "b.py": large, "c.py": inner, "d.py": records}
    found = figures(house, tmp_path, files)
    many = found["classes of more than 20 methods"]
    assert many.found == [f"{PACKAGE}/b.py:2: Large, 21 methods"]
    many = found["classes of more than 15 attributes"]
    assert many.found == [
        f"{PACKAGE}/b.py:2: Large, 21 attributes",
        f"{PACKAGE}/d.py:19: Held, 16 attributes",
    ]


def test_cycles_also_under_type_checking(house: ModuleType, tmp_path: Path) -> None:
    checked = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {} import {}\n"
    found = figures(
        house,
        tmp_path,
        {
            "a.py": f"from {PACKAGE} import b\n",
            "b.py": f"from {PACKAGE} import c\n",
            "c.py": checked.format(PACKAGE, "a"),
            "d.py": f"from {PACKAGE} import a, e\n",
            "e.py": "import os\n",
        },
    )["import cycles between files"]
    assert found.found == [f"{PACKAGE}.a <-> {PACKAGE}.b <-> {PACKAGE}.c"]


def test_small_modules_with_one_importer(house: ModuleType, tmp_path: Path) -> None:
    found = figures(
        house,
        tmp_path,
        {
            "small.py": "x = 1\n" * 49,
            "larger.py": "x = 1\n" * 50,
            "shared.py": "x = 1\n",
            "a.py": f"from {PACKAGE} import small, larger, shared\n",
            "b.py": f"from {PACKAGE} import shared\n",
        },
    )["modules under 50 lines with one importer"]
    assert found.found == [f"{PACKAGE}/small.py:1: 49 lines, for {PACKAGE}.a"]


MAPPED = '"""Keeps books.\n\n- `a`: What a is for,\n  in two lines.\n- `sub`: A package.\n"""\n'


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        (MAPPED, None),
        (MAPPED.replace("- `sub`: A package.\n", ""), "sub is not in the map"),
        (MAPPED.replace("`sub`", "`gone`"), "sub is not in the map; gone does not exist"),
        (MAPPED.replace("Keeps books.\n\n", "\n"), "no purpose"),
        ("", "no purpose; a is not in the map; sub is not in the map"),
    ],
)
def test_maps_of_packages(
    house: ModuleType, tmp_path: Path, docstring: str, fault: str | None
) -> None:
    sub = '"""Also keeps books.\n\n- `b`: What b is for.\n"""\n'
    files = {"a.py": "", "sub/b.py": "", "__init__.py": docstring, "sub/__init__.py": sub}
    found = figures(house, tmp_path, files)["packages without a map of their modules"]
    assert found.found == ([f"{PACKAGE}/__init__.py:1: {fault}"] if fault else [])


def test_a_figure_beyond_its_limit_fails_and_says_where(
    house: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"__init__.py": '"""Keeps books.\n\n- `a`: What a is for.\n"""\n', "a.py": ""}
    write(tmp_path, good)
    arguments = ["--root", str(tmp_path), "--package", PACKAGE]
    assert house.main(arguments) == 0
    table = capsys.readouterr().out
    assert "BEYOND" not in table
    assert len(table.splitlines()) == len(house.LIMITS)
    write(tmp_path, {"a.py": "def untyped(): ...\n"})
    assert house.main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    beyond = [n for n, line in enumerate(lines) if line.endswith("BEYOND")]
    assert [lines[n].split("  ")[0] for n in beyond] == ["typed returns"]
    assert lines[beyond[0] + 1] == f"    {PACKAGE}/a.py:1: untyped"


def test_no_limit_is_beyond_what_may_be_and_each_has_its_figure(
    house: ModuleType, tmp_path: Path
) -> None:
    assert figures(house, tmp_path, {"a.py": ""}).keys() == house.LIMITS.keys()
    for limit in house.LIMITS.values():
        assert limit.is_reached(limit.goal)
        # A limit is never stricter than the goal.
        assert limit.holds(limit.goal)
