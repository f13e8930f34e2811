"""Somebody else's agent, as far as Loopwright knows: it asks a model for one shell command, and runs it.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python3 agent.py "Create a directory called olive."

It knows nothing of training, nor of who trains the model behind its base URL.
"""

import http.client
import json
import os
import sys
from urllib.parse import urlsplit

ASKED = [
    {"role": "system", "content": "Answer with one shell command: mkdir or rm."},
    {"role": "user", "content": "Delete the file song.txt."},
    {"role": "assistant", "content": "rm song.txt"},
]
LIMIT_S = "5"


def ask(instruction):
    """What the model answers; base URL and key come with the environment, as they do for OpenAI's own SDK."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port)
    body = {"model": "policy", "messages": [*ASKED, {"role": "user", "content": instruction}]}
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != http.client.OK:
        sys.exit(f"the model cannot be asked: {response.read().decode()}")
    return json.load(response)["choices"][0]["message"]["content"] or ""


def main(instruction):
    """Whatever the model says is taken for a command: this belongs in a sandbox."""
    command = ask(instruction)
    print(f"$ {command}", flush=True)
    os.spawnvp(os.P_WAIT, "timeout", ["timeout", LIMIT_S, "bash", "-c", command])


if __name__ == "__main__":
    main(sys.argv[1])
