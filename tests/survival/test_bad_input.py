"""Bad input always gets a message that names the problem, the place and the fix, and never a traceback."""

import pytest

from loopwright.cli import main
from tests.survival.campaign import CommandResult

PLAIN = """
name = "plain"
[[run]]
name = "once"
[run.workload]
type = "command"
command = "true"
"""

SCENARIOS = {
    "missing": (None, "there is no such file. Give the path of a scenario, one TOML file."),
    "directory": (
        "directory",
        "is a directory. Give one of the scenarios in it, or check them all with `loopwright verify`.",
    ),
    "binary": (b"\x7fELF\x02\x01\xff\xfe" * 100, "is not text: byte 6 is not UTF-8. Give a scenario, one TOML file."),
    "empty": (b"", "[[run]]: is missing; a scenario has at least one [[run]]."),
    "broken": (b'name = "x"\n[[run]\n', "is not valid TOML: Expected ']]' at the end of an array declaration"),
    "unknown key": (PLAIN.encode() + b"comand = 3\n", "unknown key 'comand'."),
    "bad name": (PLAIN.replace("once", "../once").encode(), "not '../once'."),
}


@pytest.fixture
def loopwright(tmp_path, monkeypatch, capfd):
    """The command line, called in this process because there are many cases."""

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["loopwright", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        output = capfd.readouterr()
        return CommandResult(exit_info.value.code or 0, output.out, output.err)

    return call


def write(path, content):
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("verb", ["run", "dry-run", "verify"])
def test_an_invalid_scenario_file_is_reported_with_its_problem(loopwright, tmp_path, verb):
    options = ["--output", tmp_path / "out"] if verb == "run" else []
    for name, (content, message) in SCENARIOS.items():
        if verb == "verify" and content == "directory":
            continue  # `verify` accepts a directory of scenarios
        path = write(tmp_path / f"{name}.toml", content)

        result = loopwright(verb, path, *options)

        assert result.code == 2, name
        assert message in result.out + result.err, name
        assert str(path) in result.out + result.err, name
        assert "Traceback" not in result.err, name
        assert not (tmp_path / "out").exists(), name


def test_a_scenario_that_begins_with_a_byte_order_mark_is_read(loopwright, tmp_path):
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + PLAIN.encode())

    result = loopwright("verify", "marked.toml")

    assert result.code == 0, result.err


@pytest.mark.parametrize("verb", ["resume", "report", "export"])
@pytest.mark.parametrize("place", ["nowhere", "folder", "file"])
def test_a_directory_without_a_campaign_is_named(loopwright, tmp_path, verb, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()

    result = loopwright(verb, place)

    assert result.code == 1
    assert result.err.startswith("error: ")
    assert place in result.err
    assert "Give the --output directory" in result.err
    assert result.err.count("\n") == 1


def test_an_output_that_is_a_file_is_refused(loopwright, tmp_path):
    (tmp_path / "plain.toml").write_text(PLAIN)
    (tmp_path / "file").write_text("mine")

    result = loopwright("run", "plain.toml", "--output", "file")

    assert result.code == 1
    assert result.err.startswith("error: cannot write to file: ")
    assert "choose another --output" in result.err.lower()
    assert (tmp_path / "file").read_text() == "mine"


def test_an_output_with_an_earlier_campaign_is_refused_and_unchanged(loopwright, tmp_path):
    (tmp_path / "plain.toml").write_text(PLAIN)
    assert loopwright("run", "plain.toml", "--output", "out").code == 0
    ledger = (tmp_path / "out" / "once" / "ledger.db").read_bytes()

    result = loopwright("run", "plain.toml", "--output", "out")

    assert result.code == 1
    continue_it = "Continue it with `loopwright resume out`, choose another --output, or delete it with --overwrite."
    assert result.err == f"error: out already contains a campaign. {continue_it}\n"
    assert (tmp_path / "out" / "once" / "ledger.db").read_bytes() == ledger


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"[]", b"{}", b'{"home": 3}'])
def test_a_damaged_campaign_file_is_named(loopwright, tmp_path, damage):
    (tmp_path / "plain.toml").write_text(PLAIN)
    assert loopwright("run", "plain.toml", "--output", "out").code == 0
    (tmp_path / "out" / "campaign.json").write_bytes(damage)

    result = loopwright("resume", "out")

    assert result.code == 1
    assert "out/campaign.json is damaged" in result.err
    assert "Traceback" not in result.err
