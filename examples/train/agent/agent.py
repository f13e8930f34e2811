"""A third-party agent: it asks a model for one shell command and runs it.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python3 agent.py "Create a directory called olive."

It is unaware of Loopwright and of the training of its model.
"""

import http.client
import json
import os
import sys
from urllib.parse import urlsplit

CONVERSATION = [
    {"role": "system", "content": "Answer with one shell command: mkdir or rm."},
    {"role": "user", "content": "Delete the file song.txt."},
    {"role": "assistant", "content": "rm song.txt"},
]
LIMIT_S = "5"


def ask(instruction):
    """The model's answer; base URL and key come from the environment, as for OpenAI's own SDK."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port)
    body = {"model": "policy", "messages": [*CONVERSATION, {"role": "user", "content": instruction}]}
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != http.client.OK:
        sys.exit(f"the call to the model failed: {response.read().decode()}")
    return json.load(response)["choices"][0]["message"]["content"] or ""


def main(instruction):
    """Run the answer as a command. Use a sandbox."""
    command = ask(instruction)
    print(f"$ {command}", flush=True)
    os.spawnvp(os.P_WAIT, "timeout", ["timeout", LIMIT_S, "bash", "-c", command])


if __name__ == "__main__":
    main(sys.argv[1])
