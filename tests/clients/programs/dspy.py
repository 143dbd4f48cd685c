"""dspy's ReAct, each call of which is a conversation of its own. Its cache would answer for the model."""

import sys

import dspy

_, url, key = sys.argv[1:]


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


with dspy.context(lm=dspy.LM("openai/policy", api_base=url, api_key=key, max_tokens=300, cache=False)):
    print(dspy.ReAct("question -> answer", tools=[add])(question="1 + 2?").answer)
