"""The registry: names in TOML to classes in Python, ours and those of installed packages."""

import sys

import pytest

from loopwright.core.registry import Registry

PLUGIN = """
class Annealing:
    class Config:
        "Cools down."


class Grid:
    "Another package's."
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with entry points, installed the way pip leaves one."""
    (tmp_path / "loopwright_plugin_of_test.py").write_text(PLUGIN)
    facts = tmp_path / "loopwright_plugin_of_test-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: loopwright-plugin-of-test\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[loopwright.test_agents]\n"
        "annealing = loopwright_plugin_of_test:Annealing\n"
        "settings = loopwright_plugin_of_test:Annealing.Config\n"
        "grid = loopwright_plugin_of_test:Grid\n"
        "broken = loopwright_plugin_that_is_not_there:Thing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("loopwright_plugin_of_test", None)


@pytest.fixture
def registry():
    return Registry("agent", "loopwright.test_agents")


def test_an_installed_package_joins_by_its_entry_point(installed, registry):
    assert "annealing" in registry.names()
    assert registry.get("annealing").__name__ == "Annealing"


def test_an_entry_point_may_name_something_inside_a_class(installed, registry):
    assert registry.get("settings").__doc__ == "Cools down."


def test_nothing_is_imported_until_it_is_used(installed, registry):
    assert "broken" in registry.names()
    assert "loopwright_plugin_of_test" not in sys.modules


def test_a_broken_package_is_an_import_error_when_it_is_used(installed, registry):
    with pytest.raises(ImportError, match="loopwright_plugin_that_is_not_there"):
        registry.get("broken")


def test_a_broken_package_does_not_hide_the_others(installed, registry):
    assert list(registry.working()) == ["annealing", "settings", "grid"]


def test_a_name_that_the_package_lacks_is_an_import_error(registry):
    registry.add_lazily("gone", "collections:Gone")
    with pytest.raises(ImportError, match="Gone"):
        registry.get("gone")


def test_a_package_cannot_replace_a_built_in_name(installed, registry):
    registry.add_lazily("grid", "collections:Counter")
    assert registry.get("grid").__name__ == "Counter"
    assert registry.names().count("grid") == 1


def test_an_item_can_be_added_by_hand(registry):
    registry.add("mine", int)
    assert registry.get("mine") is int
    assert list(registry) == ["mine"]


def test_an_unknown_name_gets_the_known_ones_and_the_nearest(registry):
    registry.add("tpe", int)
    registry.add("grid", int)
    with pytest.raises(KeyError, match=r"unknown agent 'tpee'\. Known: tpe, grid\. Did you mean 'tpe'\?"):
        registry.get("tpee")


def test_something_of_another_kind_is_an_import_error(installed):
    registry = Registry("agent", "loopwright.test_agents", Registry)
    with pytest.raises(ImportError, match=r"is not a subclass of loopwright\.Registry"):
        registry.get("grid")
