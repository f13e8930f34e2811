"""Command templates: split into words once, so that a value stays inside its word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.workloads.template import CommandTemplate, as_text


@given(st.text())
def test_a_value_stays_one_word_whatever_it_holds(value):
    assert CommandTemplate("run --name={a} {a} 'x {a}'").words({"a": value}) == [
        "run",
        f"--name={value}",
        value,
        f"x {value}",
    ]


@given(st.lists(st.sampled_from(["-O3", "-march=native", "a b", "'", '"', "", "\\"])))
def test_words_of_a_value_are_split_like_a_shell_would(words):
    from shlex import join

    assert CommandTemplate("gcc {opt:words} x.c").words({"opt": join(words)}) == ["gcc", *words, "x.c"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo {{a}}", ["echo", "{a}"]),
        ("echo {{{a}}}", ["echo", "{1}"]),
        ("echo '{a} b' c", ["echo", "1 b", "c"]),
        ("echo { a }", ["echo", "{", "a", "}"]),
        ("echo {missing} --x={missing} y", ["echo", "y"]),
        (("echo", "two words {a}"), ["echo", "two words 1"]),
    ],
)
def test_places(text, words):
    assert CommandTemplate(text).words({"a": 1}) == words


@pytest.mark.parametrize("text", ["", "   ", "echo 'open", "echo x{a:words}", "echo {a:word}", ()])
def test_what_is_no_template(text):
    with pytest.raises(ValueError, match=r".+"):
        CommandTemplate(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [("x y", "x y"), (True, "true"), (False, "false"), (5, "5"), (0.1, "0.1"), (1e-9, "1e-09"), ([1, "a"], '[1,"a"]')],
)
def test_a_value_as_text(value, text):
    assert as_text(value) == text


def test_what_a_template_names():
    assert CommandTemplate("run {a} --b={b} {c:words} {{d}}").names == {"a", "b", "c"}


def test_the_program_is_known_unless_an_argument_decides_it():
    assert CommandTemplate("./bench {a}").program == "./bench"
    assert CommandTemplate("./bench-{a}").program is None


def test_an_option_that_an_absent_value_would_leave_alone():
    template = CommandTemplate("run --depth {depth} --width={width} {more}")
    assert template.option_before("depth") == "--depth"
    assert template.option_before("width") is None
    assert template.option_before("more") is None


def test_a_value_that_no_command_line_can_hold():
    template = CommandTemplate("run {a} {opt:words}")
    assert "NUL" in template.problem_with("a", "x\0y")
    assert "cannot be split into words" in template.problem_with("opt", "an open 'quote")
    assert template.problem_with("a", "an open 'quote") is None
