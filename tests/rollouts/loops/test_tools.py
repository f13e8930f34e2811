"""The tool loop: tool descriptions, calls and results."""

import asyncio
import json
import threading
import time
from enum import StrEnum
from typing import Annotated, Literal

import pytest
from pydantic import Field

from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.engines.scripted import ScriptedConfig
from loopwright.rollouts import threads
from loopwright.rollouts.loops.tools import FunctionTool, ToolLoopConfig
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest

TASK = Task("t", ({"role": "user", "content": "Go."},))


class Unit(StrEnum):
    KM = "km"
    MILE = "mile"


def convert(
    value: float,
    unit: Unit,
    places: list[str],
    mode: Literal["exact", "rough"] = "exact",
    note: str | None = None,
    digits: Annotated[int, Field(ge=0, description="how many")] = 2,
    schema: str = "metric",
    marker=threads,
) -> float:
    """Convert a length.

    Rounds half to even.
    """
    return value


class TestSchemas:
    def test_a_tool_is_described_by_its_signature_and_docstring(self):
        function = FunctionTool(convert).schema["function"]
        assert function["name"] == "convert"
        assert function["description"] == "Convert a length.\n\nRounds half to even."
        assert function["parameters"] == {
            "type": "object",
            "additionalProperties": False,
            "$defs": {"Unit": {"enum": ["km", "mile"], "type": "string"}},
            "properties": {
                "value": {"type": "number"},
                "unit": {"$ref": "#/$defs/Unit"},
                "places": {"type": "array", "items": {"type": "string"}},
                "mode": {"enum": ["exact", "rough"], "type": "string", "default": "exact"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                "digits": {"type": "integer", "minimum": 0, "description": "how many", "default": 2},
                "schema": {"type": "string", "default": "metric"},
                "marker": {},
            },
            "required": ["value", "unit", "places"],
        }

    def test_a_call_gets_its_arguments_and_defaults(self):
        def tool(unit: Unit, title: str = "t", marker: object = threads):
            return unit, title, marker

        assert FunctionTool(tool).bind('{"unit": "km"}')() == (Unit.KM, "t", threads)
        assert "title" in FunctionTool(tool).schema["function"]["parameters"]["properties"]

    @pytest.mark.parametrize("arguments", ["{}", '{"unit": "mil"}', '{"unit": "km", "extra": 1}', "[]", "no"])
    def test_wrong_arguments_are_refused(self, arguments):
        def tool(unit: Unit):
            raise AssertionError

        with pytest.raises(ValueError, match="validation error"):
            FunctionTool(tool).bind(arguments)

    @pytest.mark.parametrize("source", ["*values", "**values", "value, /", "value: threading.Lock", "value: 'Missing'"])
    def test_a_signature_that_cannot_be_described(self, source):
        scope = {"threading": threading}
        exec(f"def tool({source}): ...", scope)
        with pytest.raises(TypeError, match="cannot be described to a policy"):
            FunctionTool(scope["tool"])


def test_problems_name_the_tool(tmp_path):
    (tmp_path / "tools_bad.py").write_text(
        "number = 3\ndef star(*a): ...\ndef fine(): ...\nclass other:\n    def fine(self): ...\n"
    )
    tools = ("tools_bad:nothing", "nowhere_here:f", "tools_bad:number", "tools_bad:star", "f", "tools_bad:fine")
    problems = ToolLoopConfig(tools=tools).problems(tmp_path)
    assert [problem.key for problem in problems] == [f"tools[{i}]" for i in range(5)]
    twice = ToolLoopConfig(tools=("tools_bad:fine", "tools_bad:fine")).problems(tmp_path)
    assert [str(problem) for problem in twice] == ["tools: two tools are called 'fine'; rename one of them."]


TOOLS = """
import asyncio, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
together = threading.Barrier(2, timeout=20)
where = []

def double(x: int) -> int:
    "Twice."
    where.append(threading.current_thread().name)
    return 2 * x

def meet(name: str) -> str:
    together.wait()
    return name

async def ameet(name: str) -> str:
    await asyncio.sleep(0.01)
    return name

def broken():
    raise KeyError("no such key")

class Mute(Exception):
    def __str__(self):
        raise RuntimeError

def mute():
    raise Mute

def leave():
    sys.exit(3)

async def aleave():
    sys.exit(3)

async def cancel():
    raise asyncio.CancelledError

def slow():
    raise TimeoutError("the server was slow")

def hang():
    time.sleep(3)

async def ahang():
    await asyncio.sleep(1000)

def big():
    return {"n": 2 ** 100, "when": os}

def names():
    return os.fsdecode(b"caf\\xe9")

def odd():
    return {(1, 2): 3}

def long():
    return "x" * 100

def lazy():
    async def later():
        return "later"
    return later()
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tools")
    (directory / "tools_of_test.py").write_text(TOOLS)
    (directory / "tools_script.py").write_text(
        "turns = []\ndef script(prompt, random):\n    return turns[prompt.count('<|im_start|>assistant') - 1]\n"
    )
    return directory


def call(tool, /, **arguments):
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def roll(directory, turns, names=("double",), **settings):
    """Let a policy take these turns; returns the episode and the tool results."""

    async def main():
        config = ToolLoopConfig(tools=tuple(f"tools_of_test:{name}" for name in names), **settings)
        worker = LoopWorker.build(config, ScriptedConfig(script="tools_script:script", slip=0.0), directory)
        import tools_script

        tools_script.turns[:] = turns
        try:
            return await asyncio.wait_for(worker.handle(RolloutRequest(TASK, "0")), 30)
        finally:
            await worker.close()

    episode = asyncio.run(main())
    return episode, [m["content"] for m in episode.messages() if m["role"] == "tool"]


def test_tools_are_called_until_the_policy_answers_without_a_call(directory):
    episode, results = roll(directory, [call("double", x=4), call("double", x=8), "16"])
    assert results == ["8", "16"]
    assert (episode.outcome, episode.answer, episode.turns) == (Outcome.OK, "16", 3)
    assert episode.attempts[-1].phases_s["tools"] > 0


def test_tool_results_are_masked_out_of_training(directory):
    episode, _ = roll(directory, [call("double", x=4), "8"])
    (row,) = episode.rows()
    sampled = [i for i, mark in zip(row.response_ids, row.response_mask, strict=True) if mark]
    assert bytes(i for i in sampled if i < 256).decode() == call("double", x=4) + "8"
    assert sum(row.response_mask) < len(row.response_ids)
    tool = next(node for node in episode.nodes if node.message.get("role") == "tool")
    assert tool.sampled == 0


def test_calls_of_one_turn_run_in_parallel_and_are_answered_in_order(directory):
    _, results = roll(
        directory,
        [call("meet", name="a") + call("ameet", name="b") + call("meet", name="c"), "done"],
        ("meet", "ameet"),
    )
    assert results == ["a", "b", "c"]


def test_synchronous_tools_run_off_the_event_loop(directory):
    import tools_of_test

    roll(directory, [call("double", x=1), "done"])
    assert tools_of_test.where[-1] == "loopwright-tool"


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (call("broken"), "error: KeyError: 'no such key'"),
        (call("mute"), "error: Mute"),
        (call("leave"), "error: RuntimeError: the call raised SystemExit(3)"),
        (call("aleave"), "error: RuntimeError: the worker raised SystemExit(3)"),
        (call("cancel"), "error: RuntimeError: the worker cancelled its own call"),
        (call("slow"), "error: TimeoutError: the server was slow"),
        (call("treble"), "error: unknown tool 'treble'; the tools are broken, mute"),
        (call("double", x="two"), "error: invalid arguments for double: x: Input should be a valid integer"),
        (call("double"), "error: invalid arguments for double: x: Field required"),
        ("<tool_call>{nonsense", 'error: this call is not a JSON object with "name" and "arguments": {nonsense'),
        (call("big"), '{"n": 1267650600228229401496703205376, "when": "<module'),
        (call("names"), "caf?"),
        (call("odd"), "{(1, 2): 3}"),
        (call("long"), "x" * 50),
        (call("lazy"), "later"),
    ],
    ids=lambda value: None,
)
def test_the_policy_gets_the_result_or_error_of_each_call(directory, turn, expected):
    names = ("broken", "mute", "leave", "aleave", "cancel", "slow", "double", "big", "names", "odd", "long", "lazy")
    episode, (result,) = roll(directory, [turn, "well"], names, max_tool_chars=50 if "long" in turn else 8000)
    assert result.startswith(expected)
    assert (episode.outcome, episode.answer) == (Outcome.OK, "well")
    assert episode.to_bytes()


@pytest.mark.parametrize("name", ["hang", "ahang"])
def test_a_hanging_tool_times_out_and_blocks_nothing(directory, name):
    start = time.monotonic()
    episode, results = roll(directory, [call(name) + call("double", x=3), "well"], (name, "double"), tool_timeout_s=0.2)
    assert results == [f"error: {name} took longer than 0.2 s", "6"]
    assert episode.answer == "well"
    assert time.monotonic() - start < 2


def test_exceeding_max_turns_is_the_policys_fault(directory):
    episode, results = roll(directory, [call("double", x=1)] * 3, max_turns=2)
    assert (episode.outcome, episode.fault) == (Outcome.TRUNCATED, Fault.POLICY)
    assert (episode.turns, len(results)) == (2, 1)


def test_a_policy_cannot_escape_its_score_by_calling_a_tool_until_the_deadline(directory):
    episode, _ = roll(directory, [call("ahang"), "well"], ("ahang",), deadline_s=0.2)
    assert (episode.outcome, episode.fault) == (Outcome.TRUNCATED, Fault.POLICY)
    assert "waited for tools" in episode.reason


def test_a_tool_with_too_many_hanging_calls_is_not_called_again(directory, monkeypatch):
    monkeypatch.setattr(threads, "MAX_HANGING_CALLS", 2)
    turns = [call("hang"), call("hang"), call("hang"), "well"]
    episode, _ = roll(directory, turns, ("hang",), tool_timeout_s=0.05)
    assert (episode.outcome, episode.fault) == (Outcome.CRASHED, Fault.WORKLOAD)
    assert "2 calls never returned" in episode.reason
