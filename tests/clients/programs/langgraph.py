"""LangChain's agent, on LangGraph, over its client of OpenAI's API."""

import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

_, url, key = sys.argv[1:]


@tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


agent = create_agent(ChatOpenAI(model="policy", base_url=url, api_key=key), [add])
print(agent.invoke({"messages": [{"role": "user", "content": "add 1 and 2"}]})["messages"][-1].content)
