"""Claude Code, as the package that holds its command line starts it."""

import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query

url, _, key = sys.argv[1:]
environment = {
    "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_API_KEY": "", "IS_SANDBOX": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}  # fmt: skip


async def main() -> None:
    options = ClaudeAgentOptions(
        model="policy", env=environment, permission_mode="bypassPermissions", setting_sources=[],
        system_prompt={"type": "preset", "preset": "claude_code"},
    )  # fmt: skip
    async for message in query(prompt="What does a.txt say?", options=options):
        if isinstance(message, ResultMessage):
            print(message.result)


asyncio.run(main())
