"""Plays environments of `verifiers` for mslime, in a separate Python environment: `serve_verifiers.py --help`.

It imports verifiers, aiohttp (a dependency of verifiers) and the standard library, but not mslime. Copy it into the
environment of your tasks. `mslime_plugins.environments.verifiers:Verifiers` connects to it (docs/environments.md).

    python serve_verifiers.py tasks --env '{"taskset": {"id": "gsm8k-v1"}}' > tasks.jsonl      rows for data.prompts
    python serve_verifiers.py serve --env '{"taskset": {"id": "gsm8k-v1"}}' --port 8700

POST /run {"base_url", "key", "model", "task", "sampling"} plays one episode against that model server, and returns
{"reward": number or null, "metrics": {name: number}, "error": text}. GET /health returns {"env": id}.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from typing import Any

try:
    import verifiers.v1 as vf
    from aiohttp import web
    from verifiers.v1.utils.loaders import environment_class, load_environment
except ModuleNotFoundError as error:
    absent = f"{error.name} is missing: run this script in the Python environment of verifiers"
else:
    absent = ""

_keys = itertools.count()


def environment(settings: dict[str, Any]) -> Any:
    """Environment from verifiers' `[env]` settings."""
    taskset = settings.get("taskset", {}).get("id", "")
    kind = environment_class(taskset, settings.get("id", ""))
    return load_environment(_config_of(kind).model_validate(settings))


def _config_of(kind: type) -> Any:
    """Configuration class of an environment's class declaration: `Env[ThatConfig]`."""
    for base in getattr(kind, "__orig_bases__", ()):
        for argument in getattr(base, "__args__", ()):
            if isinstance(argument, type) and issubclass(argument, vf.EnvConfig):
                return argument
    return vf.EnvConfig


async def play(env: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Play one episode; returns its result."""
    task_class = type(env.taskset).task_type()
    task = task_class(task_class.data_type().model_validate(request["task"]), env.config.taskset.task)
    variable = f"MSLIME_ROLLOUT_{next(_keys)}"  # verifiers reads API keys from the environment
    os.environ[variable] = request["key"]
    try:
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
        sampling = vf.SamplingConfig.model_validate(request.get("sampling") or {})
        context = vf.ModelContext(client=client, model=request["model"], sampling=sampling)
        (slot,) = env.slots(task)
        return result_of(await env.run_slot(slot, context))
    finally:
        del os.environ[variable]


def result_of(episode: Any) -> dict[str, Any]:
    """Reward and metrics of an episode: the means over its trainable traces; its first error."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    traces = [t for t in episode.traces if t.agent is None or t.agent.trainable]
    names = {name for t in traces for name, value in t.metrics.items() if value is not None}
    return {
        "reward": sum(t.reward for t in traces) / len(traces) if traces and episode.ok else None,
        "metrics": {name: mean([t.metrics.get(name) for t in traces]) for name in sorted(names)},
        "error": "" if episode.ok else f"{errors[0].type}: {errors[0].message}" if errors else "the episode failed",
    }


def mean(values: list[float | None]) -> float:
    """Mean of the known values."""
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known)


def rows(env: Any, limit: int | None) -> list[dict[str, Any]]:
    """Rows for `data.prompts`: the model's first input, and the whole task."""
    found: list[dict[str, Any]] = []
    for task in itertools.islice(env.taskset, limit):
        data = task.data.model_dump(mode="json", exclude_unset=True)
        prompt = data.get("prompt") or data.get("name") or str(data.get("idx"))
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        found.append({"prompt": text, "label": None, "metadata": {"task": data, "data_source": env.config.env_id}})
    return found


async def serve(env: Any, host: str, port: int) -> None:
    """Serve until the process ends."""

    async def run(request: web.Request) -> web.Response:
        body = await request.json()
        try:
            return web.json_response(await play(env, body))
        except Exception as error:  # an error of the task: reported, and the server continues
            return web.json_response({"reward": None, "metrics": {}, "error": f"{type(error).__name__}: {error}"})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"env": env.config.env_id})

    app = web.Application(client_max_size=64 * 2**20)
    app.add_routes([web.post("/run", run), web.get("/health", health)])
    async with env.serving():
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        print(f"serving {env.config.env_id} at {runner.addresses[0][0]}:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Entry point of the command line."""
    parser = argparse.ArgumentParser(description="Plays environments of verifiers for mslime.")
    parser.add_argument("what", choices=["serve", "tasks"])
    parser.add_argument("--env", required=True, help="verifiers' [env] settings as JSON; at least the taskset's id")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="its clients can run your environments",
    )
    parser.add_argument("--port", type=int, default=8700)
    parser.add_argument("--limit", type=int, help="maximum number of tasks")
    given = parser.parse_args()
    if absent:
        parser.exit(2, f"error: {absent}\n")
    env = environment(json.loads(given.env))
    if given.what == "tasks":
        for row in rows(env, given.limit):
            sys.stdout.write(json.dumps(row) + "\n")
        return
    asyncio.run(serve(env, given.host, given.port))


if __name__ == "__main__":
    main()
