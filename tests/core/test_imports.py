"""Packages that import their public names at first use."""

import subprocess
import sys

import pytest

import loopwright.envs
from loopwright.core.imports import import_function, lazy_exports


def test_every_exported_name_is_importable():
    assert [name for name in loopwright.envs.__all__ if getattr(loopwright.envs, name, None) is None] == []
    assert sorted(loopwright.envs.__all__) == loopwright.envs.__all__


def test_importing_the_package_does_not_import_gymnasium():
    script = "import sys, loopwright.envs; sys.exit('gymnasium' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module .loopwright\.envs. has no attribute 'Nonsense'"):
        lazy_exports("loopwright.envs")("Nonsense")


def test_modules_of_the_same_name_beside_two_scenarios_are_two(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for place, module in (("a", "twice.py"), ("b", "twice/__init__.py"), ("a/inner", "twice.py")):
        file = tmp_path / place / module
        file.parent.mkdir(parents=True)
        file.write_text(f"import json\ndef place():\n    json.places.append({place!r})\n")
        (tmp_path / place / "json.py").write_text("")
    monkeypatch.setattr(sys.modules["json"], "places", places := [], raising=False)
    for place in ("a", "b", "a", "a/inner"):
        import_function("twice:place", tmp_path / place)()
    assert places == ["a", "b", "a", "a/inner"], "and Python's own modules are imported once"
    first, again = (import_function("twice:place", tmp_path / "b") for _ in range(2))
    assert first is again


def test_packages_without_an_init_file_beside_two_scenarios_are_two(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for place in ("a", "b"):
        file = tmp_path / place / "helpers_of_both" / "names.py"
        file.parent.mkdir(parents=True)
        file.write_text(f"def place():\n    return {place!r}\n")
    places = [import_function("helpers_of_both.names:place", tmp_path / place)() for place in ("a", "b", "a")]
    assert places == ["a", "b", "a"]
