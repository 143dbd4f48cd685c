"""Google's agent development kit, over LiteLLM."""

import asyncio
import sys

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

_, url, key = sys.argv[1:]


def add(a: int, b: int) -> dict[str, int]:
    """Adds."""
    return {"sum": a + b}


async def main() -> None:
    model = LiteLlm(model="openai/policy", api_base=url, api_key=key)
    runner = InMemoryRunner(agent=LlmAgent(name="adder", model=model, tools=[add]))
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="u")
    message = types.Content(role="user", parts=[types.Part(text="add 1 and 2")])
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=message):
        last = event.content.parts[-1].text
    print(last)


asyncio.run(main())
