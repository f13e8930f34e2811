"""Command templates: split into words before values are inserted, so that a value stays within its word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.workloads.base import CommandTemplate, as_text


@given(st.text())
def test_a_value_stays_within_its_word(value):
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
def test_placeholders_are_filled_in(text, words):
    assert CommandTemplate(text).words({"a": 1}) == words


@pytest.mark.parametrize("text", ["", "   ", "echo 'open", "echo x{a:words}", "echo {a:word}", ()])
def test_invalid_templates_are_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        CommandTemplate(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [("x y", "x y"), (True, "true"), (False, "false"), (5, "5"), (0.1, "0.1"), (1e-9, "1e-09"), ([1, "a"], '[1,"a"]')],
)
def test_a_value_is_written_as_text(value, text):
    assert as_text(value) == text


def test_the_names_of_a_template():
    assert CommandTemplate("run {a} --b={b} {c:words} {{d}}").names == {"a", "b", "c"}


def test_the_program_is_known_unless_it_contains_a_placeholder():
    assert CommandTemplate("./bench {a}").program == "./bench"
    assert CommandTemplate("./bench-{a}").program is None


def test_an_option_before_an_argument_is_found():
    template = CommandTemplate("run --depth {depth} --width={width} {more}")
    assert template.option_before("depth") == "--depth"
    assert template.option_before("width") is None
    assert template.option_before("more") is None


def test_values_that_a_command_line_cannot_contain():
    template = CommandTemplate("run {a} {opt:words}")
    assert "NUL" in template.problem_with("a", "x\0y")
    assert "cannot be split into words" in template.problem_with("opt", "an open 'quote")
    assert template.problem_with("a", "an open 'quote") is None
