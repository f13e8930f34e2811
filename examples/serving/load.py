"""Loads an OpenAI-compatible server as a profile says, and prints its throughput and its latency as JSON."""

import argparse
import json
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

SYSTEM = "You are the assistant of a public library. Answer in one short sentence, politely, and only about books.\n"
TEXT = "the reading room opens at nine and closes at five; on friday the reading room closes at three; " * 2


@dataclass(frozen=True)
class Profile:
    """How many clients ask at a time, how often in all, what, and how long the answers are."""

    clients: int
    requests: int
    prompt: str
    tokens: int


PROFILES = {
    # Short questions after the same instructions: many at a time, and a prefix that can be kept.
    "chat": Profile(4, 8, SYSTEM + "Question {n}: which book about the sea should I read first?\nAnswer:", 8),
    # A text that is written again: long prompts, and answers that can be guessed from them.
    "rewrite": Profile(2, 4, "Letter {n}: " + TEXT + "\nThe same letter again: " + TEXT[:95], 16),
}


def main() -> None:
    """Send the requests of a profile, after one that only warms the server up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--profile", choices=PROFILES, required=True)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    profile = PROFILES[options.profile]
    complete(options.url, options.model, "Hello", 1)
    started = time.perf_counter()
    with ThreadPoolExecutor(profile.clients) as clients:
        prompts = [profile.prompt.format(n=n) for n in range(profile.requests)]
        latencies = list(clients.map(lambda text: complete(options.url, options.model, text, profile.tokens), prompts))
    seconds = time.perf_counter() - started
    result = {
        "tokens_per_s": profile.requests * profile.tokens / seconds,
        "p90_latency_s": statistics.quantiles(latencies, n=10, method="inclusive")[-1],
    }
    print(json.dumps(result))


def complete(url: str, model: str, prompt: str, tokens: int) -> float:
    """Ask for exactly so many tokens; returns the seconds that took."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        json.load(response)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
