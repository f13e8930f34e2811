"""Scripted policies, one for each kind of client: what they say follows from the prompt alone.

The gateway of a test imports a copy of this file. Each prompt and reply is also written to `engine.jsonl`: the truth
that a capture is compared with.
"""

import json
import re
from functools import wraps
from pathlib import Path

VERSE = "Tea is hot — très chaud ☕,\nand cake is sweet;\na crumb for the mouse,\nthe rest we eat. 🐭"
PRICES = {"tea": 3, "cake": 4}
FIX = "sed -i 's/a - b/a + b/' calc.py"


def logged(policy):
    """A policy that gets the messages of the prompt as (role, text), and whose replies are logged."""

    @wraps(policy)
    def script(prompt, random):
        messages = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
        reply = policy(messages)
        with Path("engine.jsonl").open("a") as log:
            log.write(json.dumps({"prompt": prompt, "reply": reply}) + "\n")
        return reply

    return script


def call(name, **arguments):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def results(messages):
    """The results of the last turn's calls."""
    last = max((index for index, (role, _) in enumerate(messages) if role == "assistant"), default=-1)
    return [text for role, text in messages[last + 1 :] if role == "tool"]


def has_tool(messages, name):
    return f'"name":"{name}"' in messages[0][1].replace('": "', '":"')


@logged
def shop(messages):
    """A shopkeeper: a word, a verse, two calls in one turn, their sum, and a goodbye."""
    question = [text for role, text in messages if role == "user"][-1]
    if prices := results(messages):
        return f"That is {sum(int(re.findall(r'[0-9]+', text)[-1]) for text in prices)} in all."
    if "cost" in question:
        return "I look it up.\n" + "\n".join(call("price", item=item) for item in PRICES if item in question)
    if "verse" in question:
        return VERSE
    return "You are welcome." if "Thank" in question else "My name is Tilly."


@logged
def bill(messages):
    """The answer of a structured request: as a call where there is a tool, else as JSON."""
    bill = {"items": list(PRICES), "total": sum(PRICES.values())}
    return call("Bill", **bill) if has_tool(messages, "Bill") else json.dumps(bill)


@logged
def coder(messages):
    """Writes Python between `<code>` marks, as smolagents asks for."""
    if not any("Observation" in text for _, text in messages):
        return "Thought: I look up both prices.\n<code>\nprint(price('tea'), price('cake'))\n</code>"
    if not any("7" in text for role, text in messages if role in ("user", "tool") and "Observation" in text):
        return "Thought: I add them up.\n<code>\nprint(3 + 4)\n</code>"
    return "Thought: That is all.\n<code>\nfinal_answer('That is 7 in all.')\n</code>"


@logged
def answerer(messages):
    """Calls a tool in every turn, as smolagents demands; it sends the calls and results back as text."""
    observations = [text for role, text in messages if role == "user" and "Observation" in text]
    if not observations:
        return "\n".join(call("price", item=item) for item in PRICES)
    return call("final_answer", answer=f"That is {sum(map(int, re.findall('[0-9]+', observations[-1])))} in all.")


@logged
def mini(messages):
    """First answers without a tool call, which mini drops; then fixes the file."""
    if not any("calc.py" in text for _, text in messages):
        return "I am done.\n" + call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    if not any("Tool call error" in text for _, text in messages):
        return "I would add the numbers."
    steps = ["cat calc.py", FIX, "python3 -c 'import calc; print(calc.add(20, 3))'"]
    done = sum(role == "tool" for role, _ in messages)
    command = steps[done] if done < len(steps) else "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    return f"Step {done + 1}.\n" + call("bash", command=command)


@logged
def aider(messages):
    """One edit, in aider's format."""
    block = "<<<<<<< SEARCH\n    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE"
    return f"The sign is wrong.\n\ncalc.py\n```python\n{block}\n```\n"


@logged
def claude(messages):
    """Reads, fixes and runs a file with Claude Code's own tools."""
    steps = [
        call("Bash", command="cat calc.py", description="Show the file"),
        call("Bash", command=FIX, description="Fix the sign")
        + "\n"
        + call("Bash", command="python3 -c 'import calc; print(calc.add(20, 3))'", description="Run it"),
    ]
    done = sum(role == "assistant" for role, _ in messages)
    if not has_tool(messages, "Bash"):
        return "A title"
    return f"Step {done + 1}.\n{steps[done]}" if done < len(steps) else "The sign was wrong; add(20, 3) is 23 now."


@logged
def team(messages):
    """Claude Code with two sub-agents in one turn, each of which runs a command."""
    results = sum(role == "tool" for role, _ in messages)
    name = "Agent" if has_tool(messages, "Agent") else "Task"
    if any("You are the fixer" in text for role, text in messages if role == "user"):
        return "Fixed." if results else call("Bash", command=FIX, description="Fix the sign")
    if any("You are the reader" in text for role, text in messages if role == "user"):
        return "Read." if results else call("Bash", command="cat calc.py", description="Show the file")
    if results:
        return "Both are done."
    parts = ("fixer", "reader")
    return "I delegate.\n" + "\n".join(
        call(name, description=part, prompt=f"You are the {part}.", subagent_type="general-purpose") for part in parts
    )


@logged
def codex(messages):
    """Fixes a file with codex's shell."""
    steps = ["cat calc.py", FIX, "python3 -c 'import calc; print(calc.add(20, 3))'"]
    done = sum(role == "assistant" for role, _ in messages)
    if done == len(steps):
        return "The sign was wrong; add(20, 3) is 23 now."
    if has_tool(messages, "exec_command"):
        return f"Step {done + 1}.\n" + call("exec_command", cmd=steps[done])
    return f"Step {done + 1}.\n" + call("shell_command", command=steps[done])


@logged
def terminus(messages):
    """Types into a terminal, in terminus-2's JSON."""
    done = sum(role == "assistant" for role, _ in messages)
    keys = [["cat calc.py\n", FIX + "\n"], ["python3 -c 'import calc; print(calc.add(20, 3))'\n"]]
    commands = [{"keystrokes": key, "duration": 0.5} for key in (keys[done] if done < len(keys) else [])]
    plan = {"analysis": f"Step {done + 1}.", "plan": "Fix the sign.", "commands": commands}
    return json.dumps(plan if commands else {**plan, "task_complete": True})
