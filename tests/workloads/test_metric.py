"""Metrics: numbers from a command's output, from a file it wrote, or from its resource usage."""

import json

import pytest
from pydantic import ValidationError

from loopwright.workloads.command import MetricMissing, PatternTimeout, read_metric
from loopwright.workloads.command_config import CommandConfig, MetricConfig


@pytest.fixture
def read(tmp_path):
    def read(metric: dict, stdout: str | bytes = "", usage=None, timeout_s=10.0, **files: str) -> float:
        (tmp_path / "stdout").write_bytes(stdout.encode() if isinstance(stdout, str) else stdout)
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        return read_metric(MetricConfig.model_validate(metric), tmp_path, tmp_path / "stdout", usage or {}, timeout_s)

    return read


@pytest.mark.parametrize(
    ("metric", "stdout", "value"),
    [
        ({"regex": "GFLOP/s: ([0-9.]+)"}, "GFLOP/s: 1.5\nGFLOP/s: 2.5\n", 2.5),
        ({"regex": "t=([-+0-9.e]+)"}, "t=-1e-3", -0.001),
        ({"regex": "y=([0-9]+)"}, b"\xff\xfe\x00 y=3 \xff", 3.0),
        ({"regex": "µs: ([0-9]+)"}, "µs: 7", 7.0),
        ({"json": "/a/1/b"}, '{"a": [0, {"b": 2.5}]}', 2.5),
        ({"json": "/y"}, 'log line\nanother\n{"y": 4}\n', 4.0),
        ({"json": ""}, "42", 42.0),
        ({"json": "/a~1b/m~0n"}, '{"a/b": {"m~n": 1}}', 1.0),
    ],
)
def test_a_number_is_read_from_the_output(read, metric, stdout, value):
    assert read(metric, stdout) == value


def test_a_number_is_read_from_a_file(read):
    assert read({"file": "out.json", "json": "/x"}, **{"out.json": '{"x": 3}'}) == 3.0
    assert read({"file": "log", "regex": "x=(.*)"}, log="x=4") == 4.0


def test_a_number_is_read_from_stderr_or_csv(read):
    assert read({"regex": "x=(.) y=(.)", "group": 2, "stream": "stderr"}, stderr="x=1 y=2") == 2.0
    assert read({"csv": "p99"}, "test, p99\nget, 1.5\nset, 2.5\n\n") == 2.5
    assert read({"csv": "y", "file": "out.csv"}, **{"out.csv": 'x,"y"\n1,"3"\n'}) == 3.0
    for text, words in (("a,b\n1,2\n", "has no column 'c'"), ("c\n", "no value in column"), ("", "has no column")):
        with pytest.raises(MetricMissing, match=words):
            read({"csv": "c"}, text)


def test_several_metrics_are_read_at_a_time():
    several = [{"names": ["a", "b"], "regex": "(.) (.)"}, {"names": ["c"], "json": "/r"}, {"names": ["d"], "csv": True}]
    metrics = CommandConfig(command="x", read=several, metrics={"e": {"resource": "wall_s"}}).all_metrics()
    assert (metrics["b"].group, metrics["c"].json_pointer, metrics["d"].csv) == (2, "/r/c", "d")
    for wrong, words in (
        ([{"names": ["a", "b"], "regex": "(.)"}], "has no group 2"),
        ([{"names": ["a"], "csv": True}, {"names": ["a"], "json": ""}], "a: a metric is read twice"),
        ([{"names": ["a"]}], "give exactly one of"),
    ):
        with pytest.raises(ValidationError, match=words):
            CommandConfig(command="x", read=wrong)


def test_resource_usage_is_a_metric(read):
    assert read({"resource": "wall_s"}, usage={"wall_s": 0.5}) == 0.5


@pytest.mark.parametrize(
    ("metric", "stdout", "words"),
    [
        ({"regex": "y=([0-9]+)"}, "", "stdout is empty"),
        ({"regex": "y=([0-9]+)"}, "z=1", "nothing in stdout matches"),
        ({"regex": "y=(.*)"}, "y=fast", "'fast' in stdout is not a number"),
        ({"regex": "y=(.*)"}, "y=nan", "not a finite number"),
        ({"regex": "y=(.*)"}, "y=inf", "not a finite number"),
        ({"json": "/y"}, "no json", "neither stdout nor its last line is JSON"),
        ({"json": "/y"}, "", "nor its last line is JSON"),
        ({"json": "/y/z"}, '{"y": 1}', "has no '/y/z'"),
        ({"json": "/9"}, "[1]", "has no '/9'"),
        ({"json": "/y"}, '{"y": "1"}', "not a number"),
        ({"json": "/y"}, '{"y": true}', "not a number"),
        ({"json": "/y"}, '{"y": null}', "not a number"),
        ({"json": "/y"}, '{"y": NaN}', "not a finite number"),
        ({"json": "/y"}, "[" * 100_000, "nor its last line is JSON"),
        ({"json": "/y"}, json.dumps({"y": 10**400}), "not a"),
        ({"file": "gone", "json": "/y"}, "{}", "the command did not write gone"),
    ],
)
def test_a_missing_number_is_explained(read, metric, stdout, words):
    with pytest.raises(MetricMissing) as raised:
        read(metric, stdout)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ({}, "give exactly one of regex, json, csv, resource"),
        ({"regex": "(x)", "json": "/x"}, "give exactly one"),
        ({"regex": "("}, "is not a regular expression"),
        ({"regex": "x"}, "needs a group"),
        ({"json": "x"}, "write '/x'"),
        ({"resource": "joules"}, "wall_s"),
        ({"resource": "wall_s", "file": "x"}, "`file` goes with regex or json"),
        ({"json": "/x", "file": "/etc/passwd"}, "must be relative"),
        ({"json": "/x", "file": "../x"}, "must be relative"),
    ],
)
def test_invalid_settings_are_refused(metric, words):
    with pytest.raises(ValidationError) as raised:
        MetricConfig.model_validate(metric)
    assert words in str(raised.value)


def test_a_pattern_that_backtracks_without_end_names_itself_and_its_input(read):
    with pytest.raises(
        PatternTimeout, match=r"matching '\(a\|aa\)\+\$' in stdout \(5,001 bytes\) took more than 0.05 s"
    ):
        read({"regex": "(a|aa)+$"}, "a" * 5000 + "x", timeout_s=0.05)


@pytest.mark.parametrize("text", ["m.rps", "$.m.rps", "m/rps"])
def test_a_json_path_that_is_no_pointer_is_refused_with_the_pointer(text):
    with pytest.raises(ValidationError, match="is not a JSON pointer; write '/m/rps'"):
        CommandConfig(command="x", metrics={"y": {"json": text}})
    with pytest.raises(ValidationError, match="is not a JSON pointer; write '/m/rps'"):
        CommandConfig(command="x", read=[{"names": ["y"], "json": text}])
