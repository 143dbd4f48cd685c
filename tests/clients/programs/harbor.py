"""What harbor's terminus-2 talks to the model with: the next query of a user is a sequence of its own."""

import asyncio
import sys

from harbor.llms.chat import Chat
from harbor.llms.lite_llm import LiteLLM

_, url, key = sys.argv[1:]


async def main() -> None:
    chat = Chat(LiteLLM("openai/policy", api_base=url, api_key=key, collect_rollout_details=True))
    await chat.chat("hello")
    print((await chat.chat("1 + 2?")).content)


asyncio.run(main())
