"""An independent checker: compares three records of one session, without the gateway's code.

The engine's log says what was asked and sampled, the tap what was sent to the client, and the export what was captured.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.clients.tap import Exchange
from tests.clients.wire import Answer, answer_of, dialect_of

_SPECIAL = {256: b"<|im_start|>", 257: b"<|im_end|>"}
_END = "<|im_end|>"
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)


@dataclass(frozen=True)
class Capture:
    """What the checker read and what is wrong with it."""

    problems: tuple[str, ...]
    turns: int
    streams: int
    branches: int
    dialects: tuple[str, ...]
    forks: tuple[str, ...]
    """The gateway's reason for each turn that is not exact."""
    ignored: tuple[str, ...]
    """Fields that the gateway accepted without effect, from its response headers."""


@dataclass(frozen=True)
class _Turn:
    """One captured turn: everything before its first sampled token, and the sampled text."""

    prompt: str
    sampled: str


def check(
    record: Mapping[str, Any],
    exchanges: Sequence[Exchange],
    log: Sequence[Mapping[str, str]],
    received: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
) -> Capture:
    """Check one session; `received` are the ids of each prompt and completion, if the client asked for them."""
    turns, calls = list(_turns(record)), [each for each in exchanges if dialect_of(each) and each.status == 200]
    problems = [*_refusals(exchanges), *_rows(record), *_engine(turns, log), *_answers(turns, calls)]
    verdicts = [turn for turn in record["turns"] if turn["verdict"] != "exact"]
    problems += [f"turn at node {turn['node']} is broken" for turn in verdicts if turn["verdict"] == "broken"]
    problems += ["a fork has no reason" for turn in verdicts if not turn["reason"]]
    if received is not None and turns != [_Turn(_decode(prompt), _decode(sampled)) for prompt, sampled in received]:
        problems.append("the client's token ids differ from the captured ones")
    if not record["trainable"]:
        problems.append("the session is not trainable")
    ignored = {name for each in calls for name in each.headers.get("x-loopwright-ignored", "").split(",")}
    return Capture(
        problems=tuple(problems),
        turns=len(turns),
        streams=sum(each.streamed for each in calls),
        branches=len(record["rows"]),
        dialects=tuple(sorted({str(dialect_of(each)) for each in calls})),
        forks=tuple(turn["reason"] for turn in verdicts),
        ignored=tuple(sorted(name.strip() for name in ignored if name.strip())),
    )


def _decode(ids: Sequence[int]) -> str:
    return b"".join(_SPECIAL.get(token) or bytes((token,)) for token in ids).decode()


def _path(record: Mapping[str, Any], number: int) -> list[int]:
    """All ids from the root to a node. Node 0 is the root, which is not in the export."""
    ids: list[int] = []
    while number:
        node = record["episode"]["nodes"][number - 1]
        ids, number = [*node["ids"], *ids], node["parent"]
    return ids


def _turns(record: Mapping[str, Any]) -> Iterator[_Turn]:
    for node in record["episode"]["nodes"]:
        if node["spans"]:
            before = [*_path(record, node["parent"]), *node["ids"][: node["spans"][0][0]]]
            sampled = [token for start, stop, _ in node["spans"] for token in node["ids"][start:stop]]
            yield _Turn(_decode(before), _decode(sampled))


def _refusals(exchanges: Sequence[Exchange]) -> Iterator[str]:
    for each in exchanges:
        if dialect_of(each) and each.status != 200:
            yield f"{each.path} answered {each.status}: {each.response[:300].decode(errors='replace')}"


def _rows(record: Mapping[str, Any]) -> Iterator[str]:
    """The rows are branches of the graph, and hold every sampled token once, each with a logprob."""
    nodes = record["episode"]["nodes"]
    paths = [_path(record, number) for number in range(1, len(nodes) + 1)]
    sampled = sum(stop - start for node in nodes for start, stop, _ in node["spans"])
    trained = sum(sum(row["response_mask"]) for row in record["rows"])
    if not sampled == trained == sum(turn["sampled_tokens"] for turn in record["turns"]):
        yield f"{sampled} tokens were sampled, and the rows train on {trained}"
    for index, row in enumerate(record["rows"]):
        lengths = {name: len(row[name]) for name in ("response_ids", "response_mask", "logprobs", "versions")}
        if len(set(lengths.values())) != 1:
            yield f"row {index}: lengths differ: {lengths}"
        if [*row["prompt_ids"], *row["response_ids"]] not in paths:
            yield f"row {index} is not a branch of the graph"


def _engine(turns: Sequence[_Turn], log: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Each turn has the prompt that the engine got, and the tokens that it sampled."""
    unused = list(log)
    for turn in turns:
        whole = turn.prompt + turn.sampled
        for entry in unused:
            full = entry["prompt"] + entry["reply"] + _END
            # A forced start of the turn is part of the prompt, and a stop text ends the turn early.
            if turn.prompt.startswith(entry["prompt"]) and full.startswith(whole):
                unused.remove(entry)
                break
        else:
            yield f"the engine never sampled {turn.sampled[:80]!r} for this prompt: …{turn.prompt[-200:]!r}"
    for entry in unused:
        yield f"what the engine sampled was not captured: {entry['reply'][:80]!r}"


def _answers(turns: Sequence[_Turn], calls: Sequence[Exchange]) -> Iterator[str]:
    """Each answer says what one captured turn says, and that turn's prompt has all that the request said."""
    unused = list(turns)
    for exchange in calls:
        answer, texts = answer_of(exchange), list(_said(json.loads(exchange.request)))
        for turn in unused:
            if _agrees(answer, turn) and _in_order(texts, turn.prompt):
                unused.remove(turn)
                break
        else:
            lost = any(_agrees(answer, turn) for turn in unused)
            what = "whose prompt has all of the request's texts" if lost else "that says so"
            yield f"no captured turn {what}: {answer}"
    for turn in unused:
        yield f"a captured turn reached no client: {turn.sampled[:80]!r}"


def _agrees(answer: Answer, turn: _Turn) -> bool:
    forced = turn.prompt.rpartition("<|im_start|>assistant\n")[2]
    sampled = forced + turn.sampled.removesuffix(_END)
    found = [json.loads(each) for each in _CALL.findall(sampled)] if answer.calls else []
    if answer.calls != [(each["name"], each["arguments"]) for each in found]:
        return False
    text = _CALL.sub("", sampled).rstrip() if found else sampled
    if answer.reasoning:
        text = text.partition("</think>")[2].lstrip()
        if answer.reasoning != sampled.partition("</think>")[0].removeprefix("<think>").strip():
            return False
    # The text of a turn that a stop text ended is without it.
    return answer.text == text or (
        not turn.sampled.endswith(_END) and bool(answer.text) and text.startswith(answer.text)
    )


def _in_order(texts: Sequence[str], prompt: str) -> bool:
    position = 0
    for text in texts:
        position = prompt.find(text, position) + len(text)
        if position < len(text):
            return False
    return True


def _said(body: Mapping[str, Any]) -> Iterator[str]:
    """All texts of a request that are not the policy's own, in their order."""
    for name in ("system", "instructions"):
        yield from _texts(body.get(name))
    items = body.get("messages", body.get("input", ()))
    if isinstance(items, str):
        yield items
        return
    for item in items:
        if item.get("role") != "assistant":
            yield from _texts(item.get("content"))
            yield from _texts(item.get("output"))


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        if text := _BILLING.sub("", content):
            yield text
    elif isinstance(content, Sequence):
        for part in content:
            yield from _texts(part.get("text") if "text" in part else part.get("content"))
