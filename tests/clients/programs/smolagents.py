"""smolagents, which writes its history anew as text: a sequence for each step."""

import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

_, url, key = sys.argv[1:]


@tool
def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: a number
        b: another
    """
    return str(a + b)


model = OpenAIServerModel(model_id="policy", api_base=url, api_key=key)
print(ToolCallingAgent(tools=[add], model=model, verbosity_level=0).run("add 1 and 2"))
