"""OpenAI's agents SDK, by responses."""

import sys

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

_, url, key = sys.argv[1:]
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


model = OpenAIResponsesModel(model="policy", openai_client=AsyncOpenAI(base_url=url, api_key=key))
print(Runner.run_sync(Agent(name="adder", tools=[add], model=model), "add 1 and 2").final_output)
