"""Anthropic's SDK, whose tool runner asks for a thread, is refused, and sends the whole conversation by itself."""

import sys

from anthropic import Anthropic, beta_tool

url, _, key = sys.argv[1:]


@beta_tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


runner = Anthropic(base_url=url, api_key=key, max_retries=0).beta.messages.tool_runner(
    model="policy", max_tokens=500, tools=[add], messages=[{"role": "user", "content": "add 1 and 2"}]
)
print(list(runner)[-1].content[-1].text)
