"""CloudAI's files on the command line."""


def test_the_command_line(tmp_path, loopwright):
    """One campaign through `run`, `verify`, `dry-run` and `convert`."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "system.toml").write_text('name = "h"\nscheduler = "standalone"\noutput_path = "results"\n')
    bash = 'name = "b"\ndescription = "d"\ntest_template_name = "BashCmd"\n[cmd_args]\ncmd = ["true", "echo {x}"]\n'
    (tmp_path / "tests" / "b.toml").write_text(bash)
    (tmp_path / "s.toml").write_text('name = "s"\n[[Tests]]\nid = "b"\ntest_name = "b"\n')
    files = ("--cloudai", "system.toml", "tests", "s.toml")
    assert loopwright("verify", *files).stdout == "s.toml: good (b)\n"
    assert "bash -c 'echo {x}'" in loopwright("dry-run", *files).stdout
    done = loopwright("run", *files, "--quiet")
    assert (done.returncode, "b: 2 ok of 2 trials" in done.stdout) == (0, True), done.stderr
    assert len(list(tmp_path.glob("results/s_*/b/ledger.db"))) == 1
    done = loopwright("convert", "cloudai", *files[1:], "-o", "study.toml")
    assert done.returncode == 0, done.stderr
    assert loopwright("verify", "study.toml").returncode == 0
    assert loopwright("run", "s.toml", "tests").returncode == 2
    assert loopwright("verify", "--cloudai", "system.toml", "no-such", "s.toml").returncode == 2
