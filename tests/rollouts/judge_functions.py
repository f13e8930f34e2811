"""Judging functions, as a user would write them."""

import os
import threading
import time

from loopwright.core.trial import Reward

RELEASE = threading.Event()
STARTED = threading.Event()
CALLS = []


def exact(answer, label):
    CALLS.append(answer)
    return answer == label


async def exact_async(answer, label):
    return float(answer == label)


def parts(answer, tokens):
    return {"right": answer == "4", "short": -0.5 * tokens}


def rewarded(answer):
    return Reward(2.0, {"a": 3.0, "b": -1.0})


def fail(answer):
    raise RuntimeError("broken on purpose")


def hang(answer):
    while True:
        time.sleep(0.05)


async def hang_async(answer):
    import asyncio

    await asyncio.sleep(1000)


def blocked(answer):
    STARTED.set()
    RELEASE.wait(60)
    return 1.0


def exact_each(answer, label):
    CALLS.append(tuple(answer))
    return [a == b for a, b in zip(answer, label, strict=True)]


def each_its_own(answer):
    odd = {"unclear": RuntimeError("cannot tell"), "odd": "much"}
    return [odd.get(a, 1.0) for a in answer]


def leave(answer):
    raise SystemExit(3)


def everything(**facts):
    return 1.0


def unknown(answer, lable):
    return 1.0


def returns_nan(answer):
    return float("nan")


def returns_none(answer):
    return None


def returns_text(answer):
    return "1.0"


def returns_no_parts(answer):
    return {}


def returns_text_part(answer):
    return {"a": "1"}


def returns_huge(answer):
    return 10**400


def shortest(payloads):
    return [-len(payload.answer) for payload in payloads]


def too_few(payloads):
    return [1.0]


def fail_group(payloads):
    raise RuntimeError("broken on purpose")


def hang_group(payloads):
    while True:
        time.sleep(0.05)


def smaller(parts):
    return min(parts.values())


def two(one, other):
    return 1.0


def too_few_answers(answer):
    return [1.0]


def exact_or_die(answer, label):
    if answer == "die":
        os._exit(1)
    return answer == label


def exact_by(answer, label):
    """Returns the process id that judged."""
    return Reward(float(answer == label), {"exact": float(answer == label), "pid": float(os.getpid())})
