"""instructor: a typed answer, by a forced tool call or as JSON."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

MODES = {"chat, tools": instructor.Mode.TOOLS, "chat, JSON schema": instructor.Mode.JSON_SCHEMA}


class Bill(BaseModel):
    """What the customer pays."""

    items: list[str]
    total: int


client = instructor.from_openai(OpenAI(), mode=MODES[sys.argv[1]])
question = {"role": "user", "content": "What do tea and cake cost?"}
bill = client.chat.completions.create(model="policy", response_model=Bill, messages=[question])
print(json.dumps(f"{' and '.join(bill.items)}: {bill.total}"))
