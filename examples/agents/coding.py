"""An external coding agent as a rollout: headless Claude Code, in its own process and directory."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from mslime.rollout.workflow import Engine, Episode, Task

COMMAND = ("claude", "-p", "--dangerously-skip-permissions")


async def fix(task: Task, engine: Engine) -> Episode:
    """Run the agent on a row: its text is the order, `metadata.files` the initial files, and `label` the content that
    the agent must leave in `answer.txt`.
    """
    endpoint = await engine.endpoint()
    with tempfile.TemporaryDirectory() as home:
        for name, text in task.metadata.get("files", {}).items():
            (Path(home) / name).write_text(text)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "ANTHROPIC_BASE_URL": endpoint.url,
            "ANTHROPIC_AUTH_TOKEN": endpoint.key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        }
        agent = await asyncio.create_subprocess_exec(
            *COMMAND, "--model", endpoint.model, task.text, cwd=home, env=environment,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            _, errors = await agent.communicate()
        finally:
            if agent.returncode is None:  # a limit has ended the rollout
                agent.kill()
                await agent.wait()
        answer = Path(home) / "answer.txt"
        if agent.returncode and not answer.exists():
            return Episode(failed=f"claude ended with {agent.returncode}: {errors.decode(errors='replace')[-500:]}")
        right = answer.exists() and answer.read_text().strip() == str(task.label)
        return Episode(reward=float(right))
