"""LangChain's agent over its client of Anthropic's API."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool

url, _, key = sys.argv[1:]


@tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


agent = create_agent(ChatAnthropic(model="policy", base_url=url, api_key=key, max_tokens=500), [add])
print(agent.invoke({"messages": [{"role": "user", "content": "add 1 and 2"}]})["messages"][-1].content)
