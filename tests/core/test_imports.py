"""Packages that import their public names at first use."""

import subprocess
import sys

import pytest

import loopwright.envs
from loopwright.core.imports import lazy_exports


def test_every_exported_name_is_importable():
    assert [name for name in loopwright.envs.__all__ if getattr(loopwright.envs, name, None) is None] == []
    assert sorted(loopwright.envs.__all__) == loopwright.envs.__all__


def test_importing_the_package_does_not_import_gymnasium():
    script = "import sys, loopwright.envs; sys.exit('gymnasium' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module .loopwright\.envs. has no attribute 'Nonsense'"):
        lazy_exports("loopwright.envs")("Nonsense")
