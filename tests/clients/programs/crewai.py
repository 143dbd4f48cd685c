"""CrewAI with calls of tools in the API's own form."""

import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

_, url, key = sys.argv[1:]


@tool("add")
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


model = LLM(model="openai/policy", base_url=url, api_key=key)
agent = Agent(role="adder", goal="add", backstory="none", llm=model, tools=[add], verbose=False)
print(Crew(agents=[agent], tasks=[Task(description="1 + 2?", expected_output="a number", agent=agent)]).kickoff())
