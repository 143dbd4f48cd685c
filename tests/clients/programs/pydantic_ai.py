"""PydanticAI over its client of OpenAI's API."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

_, url, key = sys.argv[1:]
agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=url, api_key=key)))


@agent.tool_plain
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


print(agent.run_sync("add 1 and 2").output)
