"""The command workload: its setup, its success rule, its metrics, and problems detected before it runs."""

import asyncio
import os
import sys

import pytest
from tests.workloads.behaviours import BEHAVIOURS

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result
from loopwright.execution.local.system import LocalSystem
from loopwright.testing import WorkloadContract
from loopwright.testing.executors import ignore
from loopwright.workloads.base import Job, Site
from loopwright.workloads.command import CommandWorkload
from loopwright.workloads.command_config import CommandConfig

SCRIPT = f"{BEHAVIOURS}\nimport sys\nprint(globals()[sys.argv[1]](sys.argv[2]))\n"
Y = {"y": {"regex": "y=([0-9.]+)"}}


@pytest.fixture
def site(tmp_path):
    (tmp_path / "scenario").mkdir()
    return Site(
        scenario_dir=tmp_path / "scenario", directory=tmp_path / "run", system=LocalSystem(parallel=2, grace_s=0.1)
    )


def run(site: Site, config: CommandConfig, *arguments: dict) -> list[Result]:
    """Run a trial for each set of arguments, all at the same time."""

    async def main() -> list[Result]:
        workload = CommandWorkload(config, site)
        jobs = [
            Job(n, site.directory / "trials" / str(n), values, b"{}", f"test-{os.getpid()}.{n}", ignore)
            for n, values in enumerate(arguments, 1)
        ]
        try:
            return await asyncio.gather(*map(workload.run, jobs))
        finally:
            await workload.close()

    return asyncio.run(main())


class TestContract(WorkloadContract):
    def make_workload(self, site, behaviour, **settings):
        (site.scenario_dir / "script.py").write_text(SCRIPT)
        config = CommandConfig(
            command=(sys.executable, str(site.scenario_dir / "script.py"), behaviour, "{value}"),
            metrics={"length": {"regex": "'length': ([0-9]+)"}},
            **settings,
        )
        return CommandWorkload(config, site)


class TestSetup:
    def test_runs_once_per_distinct_set_of_its_arguments(self, site):
        (site.scenario_dir / "in.txt").write_text("")
        config = CommandConfig(
            files=("in.txt",),
            setup="sh -c 'test -e in.txt && echo y={a} > made; mktemp -p ../.. built.XXXX'",
            command="sh -c 'cat made; echo {b}'",
            metrics=Y,
        )
        results = run(site, config, *({"a": a, "b": b} for a in (1, 2) for b in (1, 2, 3)))
        assert [result.metrics["y"] for result in results] == [1, 1, 1, 2, 2, 2]
        assert len(list(site.directory.glob("built.*"))) == 2

    def test_shares_directories_with_the_input_files(self, site):
        (site.scenario_dir / "src" / "deep").mkdir(parents=True)
        (site.scenario_dir / "src" / "deep" / "in").write_text("y=4")
        config = CommandConfig(
            files=("src/deep/in",),
            setup="cp src/deep/in src/deep/made",
            command="cat src/deep/made src/deep/in",
            metrics=Y,
        )
        (result,) = run(site, config, {})
        assert (result.outcome, result.metrics) == (Outcome.OK, {"y": 4}), result.reason

    def test_failure_fails_the_trials_that_need_it(self, site):
        config = CommandConfig(setup="sh -c 'echo no such flag >&2; exit {a}'", command="echo y=1", metrics=Y)
        good, bad, worse = run(site, config, {"a": 0}, {"a": 1}, {"a": 1})
        assert (good.outcome, bad.outcome, worse.outcome) == (Outcome.OK, Outcome.CRASHED, Outcome.CRASHED)
        assert "exit code 1" in bad.reason
        assert "no such flag" in bad.reason

    def test_timeout_ends_it(self, site):
        config = CommandConfig(setup="sleep 1000", setup_timeout_s=0.1, command="echo y=1", metrics=Y)
        assert run(site, config, {})[0].outcome is Outcome.TIMEOUT

    def test_products_do_not_replace_a_trials_own_files(self, site):
        config = CommandConfig(setup="touch stdout stderr parameters.json x", command="echo y=1", metrics=Y)
        assert run(site, config, {})[0].outcome is Outcome.OK
        assert (site.directory / "trials" / "1" / "x").is_symlink()
        assert not (site.directory / "trials" / "1" / "stdout").is_symlink()

    def test_an_interrupted_setup_is_repeated(self, site):
        config = CommandConfig(setup="sh -c 'ls; touch half'", command="echo y=1", metrics=Y)
        run(site, config, {})
        (directory,) = (site.directory / "setup").iterdir()
        (directory / ".done").unlink()
        (directory / "left").touch()
        run(site, config, {})
        assert "left" not in (directory / "setup.stdout").read_text()


class TestSuccess:
    @pytest.mark.parametrize(
        ("success", "command", "outcome"),
        [
            ({}, "sh -c 'echo y=1; exit 3'", Outcome.CRASHED),
            ({"exit_codes": [0, 3]}, "sh -c 'echo y=1; exit 3'", Outcome.OK),
            ({"regex": "converged"}, "echo y=1", Outcome.CRASHED),
            ({"regex": "converged"}, "echo y=1 converged", Outcome.OK),
            ({}, "sh -c 'kill -SEGV $$'", Outcome.CRASHED),
        ],
    )
    def test_depends_on_exit_code_and_output(self, site, success, command, outcome):
        config = CommandConfig(command=command, metrics=Y, success=success)
        assert run(site, config, {})[0].outcome is outcome

    def test_the_reason_has_the_exit_code_and_the_last_line_of_stderr(self, site):
        config = CommandConfig(command="sh -c 'echo first >&2; echo out of memory >&2; exit 7'")
        assert run(site, config, {})[0].reason == "exit code 7; stderr ends with: out of memory"


def test_environment_variables_are_searched_too(site):
    config = CommandConfig(command="sh -c 'echo y=$N$FIXED'", env={"N": [1, 2], "FIXED": 5}, metrics=Y)
    results = run(site, config, {"N": 1, "FIXED": 5}, {"N": 2, "FIXED": 5})
    assert [result.metrics["y"] for result in results] == [15.0, 25.0]


def test_resource_usage_can_be_a_metric(site):
    config = CommandConfig(command="true", metrics={"wall": {"resource": "wall_s"}})
    assert run(site, config, {})[0].metrics["wall"] > 0


def test_peak_memory_of_a_small_program_is_a_metric(site):
    config = CommandConfig(command="true", metrics={"memory": {"resource": "max_rss_bytes"}})
    assert 100_000 < run(site, config, {})[0].metrics["memory"] < 8_000_000


def test_all_missing_metrics_are_named(site):
    config = CommandConfig(command="echo y=1", metrics={**Y, "z": {"regex": "z=(.)"}, "w": {"file": "w", "json": "/w"}})
    (result,) = run(site, config, {})
    assert (result.outcome, dict(result.metrics)) == (Outcome.METRIC_MISSING, {})
    assert "z: nothing in stdout" in result.reason
    assert "w: the command did not write w" in result.reason


def test_a_missing_program_is_a_crash_with_a_reason(site):
    (result,) = run(site, CommandConfig(command="./gone"), {})
    assert result.outcome is Outcome.CRASHED
    assert "gone" in result.reason


class TestFingerprint:
    def fingerprint(self, site: Site, **settings) -> str:
        return CommandWorkload(CommandConfig(**{"command": "echo {a}", **settings}), site).fingerprint()

    def test_covers_the_command_and_its_metrics(self, site):
        (site.scenario_dir / "in").write_text("1")
        variants = [{}, {"command": "echo -n {a}"}, {"setup": "true"}, {"metrics": Y}, {"files": ["in"]}]
        variants.append({"success": {"regex": "x"}})
        assert len({self.fingerprint(site, **variant) for variant in variants}) == len(variants)

    def test_does_not_cover_searched_values_and_the_timeout(self, site):
        assert self.fingerprint(site) == self.fingerprint(site, args={"a": [1, 2]}, timeout_s=5, constraints=["a > 1"])

    def test_covers_all_files_of_a_directory(self, site):
        (site.scenario_dir / "data" / "deep").mkdir(parents=True)
        (site.scenario_dir / "data" / "deep" / "x").write_text("1")
        before = self.fingerprint(site, files=["data"])
        (site.scenario_dir / "data" / "deep" / "x").write_text("2")
        assert self.fingerprint(site, files=["data"]) != before


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"command": "echo {aa}"}, "command", "unknown argument {aa}. Known: a. Did you mean 'a'?"),
        ({"command": "no-such-program {a}"}, "command", "'no-such-program' is not on the PATH"),
        ({"command": "/no/such {a}"}, "command", "'/no/such' is not an executable file"),
        ({"command": "./gone {a}"}, "command", "it does not exist"),
        ({"command": "./here {a}"}, "command", "add it: files = ['here']"),
        ({"command": "echo {a}", "files": ["gone"]}, "files", "'gone' does not exist"),
        ({"command": "echo {a}", "files": ["stdout"]}, "files", "would replace stdout in each trial's directory"),
        (
            {"command": "echo {a}", "constraints": ["b > 1"]},
            "constraints",
            "'b > 1': unknown parameter b. Known parameters: a.",
        ),
        ({"command": "echo {a}", "env": {"a": 1}}, "env", "'a' is also an argument"),
        ({"command": "echo {a:words}", "args": {"a": ["x", "'y"]}}, "args.a", '"\'y" cannot be split into words'),
        ({"command": "echo {a}", "args": {"a": ["x", "y\0"]}}, "args.a", "contains a NUL character"),
        (
            {"command": "echo {a} -d {d}", "args": {"a": [1, 2], "d": {"values": [1, 2], "when": "a == 1"}}},
            "command",
            "-d loses its value when d is absent; write -d={d} as one word, or give d an `otherwise`.",
        ),
    ],
)
def test_problems_are_detected_before_anything_runs(site, settings, key, words):
    (site.scenario_dir / "here").touch()
    (site.scenario_dir / "stdout").touch()
    config = CommandConfig(**{"args": {"a": [1, 2]}, **settings})
    problems = config.problems(site.scenario_dir) + config.missing_programs(site.scenario_dir)
    assert [problem.key for problem in problems if words in problem.message] == [key], problems


def test_an_invalid_success_pattern_is_refused():
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        CommandConfig(command="true", success={"regex": "("})


def test_an_optional_metric_does_not_fail_a_trial(site):
    optional = {"z": {"regex": "z=(.)", "required": False}, "rss": {"resource": "max_rss_bytes"}}
    (result,) = run(site, CommandConfig(command="echo y=1", metrics={**Y, **optional}), {})
    assert (result.outcome, result.metrics["y"]) == (Outcome.OK, 1), result.reason
    assert "z" not in result.metrics
