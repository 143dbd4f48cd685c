"""AutoGen's assistant."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

_, url, key = sys.argv[1:]
told = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}


async def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


client = OpenAIChatCompletionClient(model="policy", base_url=url, api_key=key, model_info=told)
agent = AssistantAgent("adder", client, tools=[add], max_tool_iterations=5)
print(asyncio.run(agent.run(task="add 1 and 2")).messages[-1].to_text())
