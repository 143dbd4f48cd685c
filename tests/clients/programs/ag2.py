"""ag2 by OpenAI's responses."""

import asyncio
import sys

from ag2 import Agent
from ag2.config import OpenAIResponsesConfig

_, url, key = sys.argv[1:]


def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


agent = Agent("adder", config=OpenAIResponsesConfig("policy", base_url=url, api_key=key), tools=[add])
print(asyncio.run(agent.ask("add 1 and 2")).body)
