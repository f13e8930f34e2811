"""The checker of the client matrix notices what it is there for."""

import copy
import json

import pytest

from tests.clients.checker import check
from tests.clients.tap import Exchange

QUESTION, REPLY = (
    "What does tea cost?",
    'I look.\n<tool_call>\n{"name": "price", "arguments": {"item": "tea"}}\n</tool_call>',
)
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def ids(text):
    """One id per byte, and 256 and 257 for the marks."""
    parts = text.replace("<|im_start|>", "\x00S").replace("<|im_end|>", "\x00E").split("\x00")
    return [
        *parts[0].encode(),
        *(token for part in parts[1:] for token in (256 + "SE".index(part[0]), *part[1:].encode())),
    ]


@pytest.fixture
def session():
    """The three records of a session with one turn."""
    header, user = "<|im_start|>assistant\n", ids(PROMPT.removesuffix("<|im_start|>assistant\n"))
    sampled = ids(REPLY + "<|im_end|>")
    start = len(ids(header))
    turn = {"parent": 1, "ids": ids(header) + sampled, "spans": [[start, start + len(sampled), 0]]}
    row = {name: [1] * len(sampled) for name in ("response_mask", "logprobs", "versions")}
    row |= {"prompt_ids": ids(PROMPT), "response_ids": sampled}
    record = {
        "episode": {"nodes": [{"parent": 0, "ids": user, "spans": []}, turn]},
        "turns": [{"node": 2, "verdict": "exact", "reason": "", "sampled_tokens": len(sampled)}],
        "rows": [row],
        "trainable": True,
    }
    call = {"function": {"name": "price", "arguments": '{"item": "tea"}'}}
    answer = {"choices": [{"message": {"content": "I look.", "tool_calls": [call]}}]}
    request = {"messages": [{"role": "user", "content": QUESTION}]}
    exchange = Exchange(
        "POST", "/s/v1/chat/completions", json.dumps(request).encode(), 200, {}, json.dumps(answer).encode()
    )
    return record, [exchange], [{"prompt": PROMPT, "reply": REPLY}]


def change_id(record, exchanges, log):
    record["episode"]["nodes"][1]["ids"][-5] ^= 1


def change_prompt(record, exchanges, log):
    record["episode"]["nodes"][0]["ids"][-5] ^= 1


def drop_row(record, exchanges, log):
    record["rows"].clear()


def change_row(record, exchanges, log):
    record["rows"][0]["response_ids"][3] ^= 1


def drop_logprob(record, exchanges, log):
    record["rows"][0]["logprobs"].pop()


def change_text(record, exchanges, log):
    exchanges[0].response = exchanges[0].response.replace(b"look", b"book")


def change_arguments(record, exchanges, log):
    exchanges[0].response = exchanges[0].response.replace(b"tea", b"pie")


def drop_answer(record, exchanges, log):
    exchanges.clear()


def say_more(record, exchanges, log):
    exchanges[0].request = exchanges[0].request.replace(b"cost?", b"cost today?")


def refuse(record, exchanges, log):
    exchanges.append(Exchange("POST", "/s/v1/chat/completions", b"{}", 400, {}, b"{}"))


def sample_more(record, exchanges, log):
    log.append({"prompt": PROMPT, "reply": "never captured"})


def hide_the_reason(record, exchanges, log):
    record["turns"][0]["verdict"] = "forked"


def test_a_client_that_got_other_token_ids_is_a_problem(session):
    sampled = ids(REPLY + "<|im_end|>")
    assert check(*session, received=[(ids(PROMPT), sampled)]).problems == ()
    assert check(*session, received=[(ids(PROMPT), sampled[:-1])]).problems
    assert check(*session, received=[]).problems


def test_an_exact_session_has_no_problem(session):
    capture = check(*session)
    assert (capture.problems, capture.turns, capture.branches) == ((), 1, 1)


@pytest.mark.parametrize(
    "damage",
    [
        change_id,
        change_prompt,
        drop_row,
        change_row,
        drop_logprob,
        change_text,
        change_arguments,
        drop_answer,
        say_more,
        refuse,
        sample_more,
        hide_the_reason,
    ],
)
def test_damage_is_a_problem(session, damage):
    session = copy.deepcopy(session)
    damage(*session)
    assert check(*session).problems
