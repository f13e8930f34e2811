from random import Random

from loopwright.selection.importance import importances
from tests.reports.test_html import chart, page, words


def test_importance_ranks_parameters_and_finds_an_interaction_without_main_effects():
    random = Random(1)
    a, b, c, d = ([random.random() for _ in range(600)] for _ in range(4))
    values = [5 * a[n] + 8 * (b[n] - 0.5) * (c[n] - 0.5) for n in range(600)]

    found = importances(["a", "b", "c", "d"], [a, b, c, d], values)

    shares = {each.names: each for each in found}
    assert found[0].names == ("a",)
    assert next(each for each in found if len(each.names) == 2).names == ("b", "c")
    assert shares["d",].share < 0.05
    assert all(each.low <= each.share <= each.high for each in found)


def test_importance_needs_trials_and_variance():
    assert importances(["a"], [[1, 2, 3]], [1.0, 2.0, 3.0]) == []
    assert importances(["a"], [list(range(50))], [1.0] * 50) == []
    assert importances([], [], [float(n) for n in range(50)]) == []


def test_a_value_that_always_fails_is_visible(begin, tmp_path):
    run = begin()
    for n in range(40):
        mode = ("fast", "safe", "<b>broken</b>")[n % 3]
        if n % 3 == 2:
            run.add({"mode": mode, "tile": n}, outcome="crashed", reason="no such mode")
        else:
            run.add({"mode": mode, "tile": n}, float(n))

    text, table = words(tmp_path), chart(tmp_path)["table"]

    assert "mode <b>broken</b> 13 of 13 ▲ always fails".replace("▲ ", "") in text
    assert "<b>broken</b>" not in page(tmp_path)
    assert "What matters for gflops" in text
    assert table["names"][:3] == ["trial", "outcome", "gflops"]
    assert [len(column) for column in table["columns"]] == [40] * len(table["names"])


def test_a_table_of_very_many_trials_is_thinned_and_says_so(begin, tmp_path, monkeypatch):
    monkeypatch.setattr("loopwright.reports.search.insights.TABLE_ROWS", 50)
    monkeypatch.setattr("loopwright.reports.search.insights._THINNED", 20)
    run = begin()
    for n in range(60):
        run.add({"tile": n}, float(n))

    text, table = words(tmp_path), chart(tmp_path)["table"]

    assert "20 of 60 trials are listed" in text
    assert {57, 58, 59, 60} <= set(table["columns"][0]), "the best are kept"


def test_importance_is_shown_for_each_objective(begin, tmp_path):
    """Given one parameter that makes it fast and another that makes it small, each objective names its own."""
    run, random = begin(objectives=["speed", "−size"]), Random(1)
    for _ in range(40):
        tile, level = random.random(), random.random()
        run.add({"tile": tile, "level": level}, tile, -level)

    speed, size = words(tmp_path).split("What matters for ")[1:]
    assert speed.split().index("tile") < speed.split().index("level")
    assert size.split().index("level") < size.split().index("tile")
    assert speed.startswith("speed")
    assert size.startswith("size")
