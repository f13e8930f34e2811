"""`loopwright verify` and `dry-run`: everything about a scenario without running it."""

from pathlib import Path

from loopwright.envs.live.address import Address

ROOT = Path(__file__).parents[2]


def test_a_good_scenario_exits_with_0(loopwright, scenario):
    done = loopwright("verify", scenario())
    assert (done.returncode, done.stdout.strip()) == (0, f"{scenario()}: good (first)")


def test_every_scenario_of_a_folder_is_checked_and_every_problem_listed(loopwright, scenario, tmp_path):
    scenario(name="all/good.toml")
    scenario(name="all/bad.toml", agent='{ type = "grit" }', more="[run.rewards]\nmetric_failur = 1")
    (tmp_path / "all" / "worse.toml").write_text("name = ")
    done = loopwright("verify", "all")
    assert done.returncode == 2
    assert "all/good.toml: good (first)" in done.stdout
    lines = done.stderr.splitlines()
    assert any(line.startswith("all/bad.toml: [run.agent] type: ") for line in lines)
    assert any(line.startswith("all/bad.toml: [run.rewards]: ") and "'metric_failure'" in line for line in lines)
    assert any(line.startswith("all/worse.toml: ") for line in lines)


def test_our_examples_are_valid_and_their_tasks_are_not_scenarios(loopwright):
    done = loopwright("verify", ROOT / "examples")
    assert "quickstart.toml: good (matmul)" in done.stdout
    assert "task.toml" not in done.stderr


def test_an_address_that_nothing_serves_is_a_problem(loopwright, tmp_path):
    live = (
        f'[[run]]\nname = "r"\nagent = {{ type = "random", trials = 5 }}\n[run.live]\naddress = "unix://{tmp_path}/s"'
    )
    (tmp_path / "live.toml").write_text(f'name = "live"\n{live}\n')
    done = loopwright("verify", "live.toml")
    assert done.returncode == 2
    assert f"[run.live] address: no server answers at unix://{tmp_path}/s (No such file or directory)" in done.stderr
    with Address.parse(f"unix://{tmp_path}/s").listen(public=False):
        assert loopwright("verify", "live.toml").returncode == 0


def test_nothing_to_check_exits_with_2(loopwright, tmp_path):
    (tmp_path / "empty").mkdir()
    done = loopwright("verify", "empty")
    assert done.returncode == 2
    assert "no .toml file" in done.stderr


def test_a_dry_run_shows_the_space_the_trials_and_the_first_commands(loopwright, scenario):
    done = loopwright("dry-run", scenario())
    assert done.returncode == 0, done.stderr
    assert "6 trials" in done.stdout
    assert "echo y=1 'two words'" in done.stdout
    assert "1, 2, 3" in done.stdout


def test_a_dry_run_begins_with_the_pinned_trials(loopwright, scenario):
    start = 'start = [{ x = 3, mode = "b" }]'
    for agent in ("grid", "random"):
        lines = loopwright(
            "dry-run", scenario(agent=f'{{ type = "{agent}", trials = 2, {start} }}')
        ).stdout.splitlines()
        first = next(number for number, line in enumerate(lines) if "the first trials" in line) + 1
        assert lines[first].strip() == "echo y=3 b"
        assert len(lines[first:]) == 2


def test_a_dry_run_shows_values_unchanged(loopwright, scenario):
    path = scenario(name="[i].toml")
    path.write_text(path.read_text().replace('"study"', '"a [/study]"').replace('"b"', '"[/b]", "[red]"'))
    done = loopwright("dry-run", path)
    assert done.returncode == 0, done.stderr
    assert "a [/study]" in done.stdout
    assert "two words, [/b], [red]" in done.stdout


def test_a_dry_run_runs_nothing(loopwright, scenario, tmp_path):
    path = scenario(command="touch ran-{x}-{mode}")
    before = set(tmp_path.rglob("*"))
    assert loopwright("dry-run", path).returncode == 0
    assert set(tmp_path.rglob("*")) == before


def test_a_dry_run_of_a_bad_scenario_exits_with_2(loopwright, scenario):
    assert loopwright("dry-run", scenario(agent='{ type = "random" }')).returncode == 2


def test_overridden_settings_of_remote_loops_are_checked_and_shown(loopwright):
    remote = ROOT / "examples" / "rollouts" / "remote.toml"
    done = loopwright("verify", remote, "--set", "gateway.port=eighty")
    assert done.returncode == 2
    assert "[run.gateway] port" in done.stderr
    done = loopwright("dry-run", remote, "--set", "loop.concurrency=3")
    assert done.returncode == 0, done.stderr
    assert "remote, 3 rollouts at a time" in done.stdout
