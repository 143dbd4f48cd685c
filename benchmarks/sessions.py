"""Time that the model server adds to a request, and memory of a live session, against an echo of the same bodies.

    python benchmarks/sessions.py [--sessions 10,200,2000] [--rate 100] [--seconds 10] [--turns 8]

The engine is fake: it returns prepared tokens and routes of a model of 48 layers with 8 experts per token at once.
HTTP, keys, dialect, forest, renderer, rollout, sample and routes are real. The clients are plain aiohttp in another
process. Their conversations grow by a tool call and its result each turn; a session ends after its turns, and another
begins. Requests come at a fixed rate, independent of responses.

`added_ms` is the time until the reply minus that of an echo: a bare aiohttp handler of the same process that reads the
same bodies and sends responses of the same length. The two take turns. `cpu_ms` is CPU of the serving process per
request, and `ratio` is this over the echo's. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
import numpy as np
import orjson
import uvloop
from aiohttp import web
from rich.console import Console
from rich.table import Table

from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from mslime.config.errors import EngineError
from mslime.config.loader import build
from mslime.config.model_facts import ModelFacts
from mslime.data.source import Prompt
from mslime.data.tokenizer import HFTokenizer
from mslime.rollout.agents.choose import PackageRenderer
from mslime.rollout.generation import EngineLimits, Generator, GroupGate, Sampling, Traffic
from mslime.rollout.group_tracker import new_group
from mslime.rollout.turns import Agents, Rollout
from mslime.rollout.workflow import Engine, Task
from mslime.run.started import search_seldom

LAYERS, TOP_K, EXPERTS = 48, 8, 128
QUESTION, RESULT = "where is the weather of Paris and Rome? " * 60, "the tool says 42 and the answer is false " * 20
SAID = (
    f"<think>\n{'hello world what is the parameter of the function ' * 6}\n</think>\n\n<tool_call>\n"
    '{"name": "lookup", "arguments": {"key": "weather in Paris", "deep": true}}\n</tool_call><|im_end|>'
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks a word up and says what the function found, with its parameter. " * 3,
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string"}, "deep": {"type": "boolean"}},
                "required": ["key"],
            },
        },
    }
    for name in ("lookup", "search", "read", "write", "run")
]


class FakeEngines:
    """Engines that immediately return the same reply, with routes of random experts."""

    def __init__(self, reply: Sequence[int], longest: int) -> None:
        self.clients: list[object] = [self]
        self.dead: dict[str, EngineError] = {}
        self._reply = np.asarray(reply, np.int32)
        self._log_probs = np.full(len(reply), -0.5, np.float32)
        shape = (longest, LAYERS, TOP_K)
        self._routes = np.random.default_rng(0).integers(0, EXPERTS, shape, np.uint8)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """The canned reply. Real replies also need parsing: benchmarks/manager.py measures that."""
        await asyncio.sleep(0)
        n = len(self._reply)
        rows = len(request.input_ids) + n - 1 - request.routes_start
        routes = self._routes[:rows].copy()  # as the decoder of a reply makes them
        return GenerateResult(self._reply, self._log_probs, "stop", ((0, 0, n),), routes, None, 0, "", "fake")


class Sessions:
    """Live rollouts, each behind its own URL until it ends."""

    def __init__(self) -> None:
        tokenizer = made_tokenizer()
        config = build({
            "model": {"path": "."}, "data": {"prompts": ["p.jsonl"]},
            "rollout": {"concurrency": 4096, "max_response_tokens": 1 << 20, "max_total_tokens": 1 << 20},
            "deadlines": {"rollout_function_s": 86400},
        })  # fmt: skip
        model = ModelFacts(
            vocab_size=len(tokenizer), max_positions=1 << 20, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K,
            moe_layer_ids=tuple(range(LAYERS)),
        )  # fmt: skip
        engines = FakeEngines(tokenizer.encode(SAID, add_special_tokens=False), 1 << 14)
        self._generator = Generator(
            config, engines, HFTokenizer(tokenizer), model, EngineLimits(), lambda: 0, lambda *fields: None
        )
        self._sampling = Sampling.for_training(config.rollout, "r3", model, EngineLimits())
        self._agents = Agents(config.rollout, lambda: PackageRenderer("qwen3", tokenizer, "template"))
        self._live: dict[str, tuple[Rollout, asyncio.Task[bool], asyncio.Event]] = {}
        self._limit_s, self._begun = config.deadlines.rollout_function_s, 0

    async def begin(self) -> dict[str, str]:
        """Begin a rollout; returns the address of its model."""
        where: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        over = asyncio.Event()

        async def function(task: Task, engine: Engine) -> None:
            endpoint = await engine.endpoint()
            where.set_result({"url": endpoint.openai_url, "key": endpoint.key})
            await over.wait()

        group = new_group(self._begun, Prompt([0] * 8, None, {}, ""), 1)
        gate = GroupGate(Traffic(open=True), admitted=True)
        rollout = Rollout(
            group, 0, f"g{self._begun}", "benchmark", self._generator, self._sampling, gate, self._agents,
            limit_s=self._limit_s,
        )  # fmt: skip
        self._begun += 1
        work = asyncio.create_task(rollout.play(function, rollout.task(0, evaluation=False)))
        found = await where
        self._live[found["url"]] = rollout, work, over
        return found

    async def end(self, url: str) -> None:
        """Let the rollout's function return."""
        _, work, over = self._live.pop(url)
        over.set()
        await work

    def held(self) -> tuple[list[int], list[int], list[int]]:
        """Per live session: tokens, bytes of their routes, and bytes of memory reserved for routes."""
        found = [r.samples for r, _, _ in self._live.values()]
        routes = [[s.routes for s in samples if s.routes is not None] for samples in found]
        return (
            [sum(map(len, samples)) for samples in found],
            [sum(p.nbytes for r in each for p in r.pieces) for each in routes],
            [sum((p if p.base is None else p.base).nbytes for r in each for p in r.pieces) for each in routes],
        )

    async def close(self) -> None:
        """End all rollouts."""
        works = [work for _, work, _ in self._live.values()]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        await self._agents.close()


# ------------------------------------------------------------------------------------------- the process that serves


async def serve(settings: Sequence[Any], profile: str | None = None) -> dict[str, Any]:
    """Serve sessions, an echo, and control requests about this process until the clients have sent their figures.

    Args:
        settings: of the clients; see `measure`.
    """
    sessions, figures = Sessions(), asyncio.get_running_loop().create_future()
    search_seldom()  # as in a run
    answer = b"x"

    async def begin(request: web.Request) -> web.Response:
        if ended := await request.text():
            await sessions.end(ended)
        return web.json_response(await sessions.begin())

    async def echo(request: web.Request) -> web.Response:
        orjson.loads(await request.read())
        return web.Response(body=answer, content_type="application/json")

    async def prepare(request: web.Request) -> web.Response:
        nonlocal answer
        answer = b"x" * int(await request.text())
        return web.Response()

    async def state(request: web.Request) -> web.Response:
        tokens, routes, room = sessions.held()
        state = {"cpu": time.process_time(), "rss": resident(), "tokens": tokens, "routes": routes, "room": room}
        return web.json_response(state)

    async def done(request: web.Request) -> web.Response:
        figures.set_result(await request.json())
        return web.Response()

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post(f"/{handler.__name__}", handler) for handler in (begin, echo, prepare, state, done)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    where = f"http://127.0.0.1:{runner.addresses[0][1]}"
    clients = multiprocessing.get_context("spawn").Process(target=clients_of, args=(where, *settings), daemon=True)
    clients.start()
    ended = asyncio.create_task(asyncio.to_thread(clients.join))
    ended.add_done_callback(lambda _: figures.done() or figures.set_exception(RuntimeError("the clients died")))
    try:
        return await profiled(figures, profile)
    finally:
        clients.kill()
        await ended
        await sessions.close()
        await runner.cleanup()


async def profiled(work: asyncio.Future[dict[str, Any]], path: str | None) -> dict[str, Any]:
    """Await the work, and write a profile of this thread to `path`."""
    if path is None:
        return await work
    import cProfile

    with cProfile.Profile(time.thread_time) as profile:
        found = await work
    profile.dump_stats(path)
    return found


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# ------------------------------------------------------------------------------------------ the process of the clients


@dataclass
class Slot:
    """A session from its agent's side."""

    url: str
    key: str
    left: int
    messages: list[Any] = field(default_factory=lambda: [{"role": "user", "content": QUESTION}])

    def body(self) -> bytes:
        """Body of its next request."""
        return orjson.dumps({"model": "policy", "messages": self.messages, "tools": TOOLS})

    def take(self, reply: bytes) -> None:
        """Append the reply and the tool's result."""
        message = orjson.loads(reply)["choices"][0]["message"]
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": RESULT}
        self.messages += [message, answer]
        self.left -= 1


@dataclass
class Window:
    """Measurements of a window: seconds of each request, and CPU seconds of the server and of the clients."""

    seconds: list[float] = field(default_factory=list[float])
    server: float = 0.0
    clients: float = 0.0

    def __add__(self, other: Window) -> Window:
        return Window(self.seconds + other.seconds, self.server + other.server, self.clients + other.clients)


class Clients:
    """The agents of all sessions."""

    def __init__(self, http: aiohttp.ClientSession, server: str, turns: int) -> None:
        self._http, self._server, self._turns = http, server, turns
        self._free, self._bodies = asyncio.Queue[Slot](), list[bytes]()

    async def control(self, path: str, body: str | bytes = b"") -> Any:
        """Send a control request to the serving process."""
        async with self._http.post(f"{self._server}/{path}", data=body) as response:
            return orjson.loads(await response.read() or b"null")

    async def begin(self, sessions: int) -> None:
        """Open sessions, and advance each to a different turn, as if agents had started at different times."""
        slots = [Slot(**await self.control("begin"), left=self._turns) for _ in range(sessions)]
        gate, ages = asyncio.Semaphore(4), random.Random(0)

        async def grow(slot: Slot, turns: int) -> None:
            for _ in range(turns):
                async with gate:
                    await self.ask(slot)

        await asyncio.gather(*(grow(slot, ages.randrange(1, self._turns)) for slot in slots))
        for slot in slots:
            self._free.put_nowait(slot)

    async def ask(self, slot: Slot) -> float:
        """Send a request and read its reply; returns the seconds."""
        body, key = slot.body(), {"Authorization": f"Bearer {slot.key}"}
        self._bodies.append(body)
        started = time.perf_counter()
        async with self._http.post(f"{slot.url}/chat/completions", data=body, headers=key) as response:
            reply = await response.read()
        seconds = time.perf_counter() - started
        assert response.status == 200, reply[:300]
        slot.take(reply)
        return seconds

    async def turn(self) -> float:
        """Send a request of the longest-waiting session; a finished session is replaced by a new one."""
        slot = await self._free.get()
        if not slot.left:
            slot = Slot(**await self.control("begin", slot.url), left=self._turns)
        seconds = await self.ask(slot)
        self._free.put_nowait(slot)
        return seconds

    async def echoed(self) -> float:
        """Send an earlier request to the echo."""
        body = self._bodies.pop()
        started = time.perf_counter()
        async with self._http.post(f"{self._server}/echo", data=body) as response:
            await response.read()
        return time.perf_counter() - started

    async def window(self, one: Callable[[], Coroutine[Any, Any, float]], rate: float, count: int) -> Window:
        """Send `count` requests at `rate`, each at its scheduled time."""
        before, mine, begun = await self.control("state"), time.process_time(), time.perf_counter()
        tasks = list[asyncio.Task[float]]()
        for number in range(count):
            await asyncio.sleep(begun + number / rate - time.perf_counter())
            tasks.append(asyncio.create_task(one()))
        seconds = list(await asyncio.gather(*tasks))
        after = await self.control("state")
        return Window(seconds, after["cpu"] - before["cpu"], time.process_time() - mine)


async def measure(server: str, sessions: int, rate: float, seconds: float, turns: int) -> dict[str, Any]:
    """Figures for one number of sessions."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = Clients(http, server, turns)
        empty = await clients.control("state")
        await clients.begin(sessions)
        clients._bodies.clear()
        await clients.control("prepare", str(1200))
        ours, echo, count = Window(), Window(), int(rate * seconds / 4)
        for _ in range(4):
            ours += await clients.window(clients.turn, rate, count)
            echo += await clients.window(clients.echoed, rate, count)
        full = await clients.control("state")
        found = figures(ours, echo) | held(empty, full) | {"sessions": sessions, "rate": rate}
        await clients.control("done", orjson.dumps(found))
        return found


def figures(ours: Window, echo: Window) -> dict[str, float]:
    """Figures of requests to the model server and to the echo."""
    n, us, them = len(ours.seconds), ours.seconds, echo.seconds
    return {
        "requests": n,
        "added_ms": 1e3 * (median(us) - median(them)),
        "added_p99_ms": 1e3 * (quantiles(us, n=100)[98] - quantiles(them, n=100)[98]),
        "echo_ms": 1e3 * median(them),
        "cpu_ms": 1e3 * ours.server / n,
        "echo_cpu_ms": 1e3 * echo.server / n,
        "client_cpu_ms": 1e3 * ours.clients / n,
        "ratio": ours.server / echo.server,
    }


def held(empty: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, float]:
    """Figures of live sessions: bytes of routes per token (least, most, overall) and bytes reserved for routes."""
    tokens, routes, room = (np.asarray(full[name], float) for name in ("tokens", "routes", "room"))
    each = routes[routes > 0] / tokens[routes > 0]
    return {
        "tokens": float(tokens.mean()),
        "route_bytes_per_token": float(routes.sum() / tokens.sum()),
        "route_bytes_per_token_least": float(each.min()),
        "route_bytes_per_token_most": float(each.max()),
        "route_room_per_token": float(room.sum() / tokens.sum()),
        "kib_per_session": (full["rss"] - empty["rss"]) / 1024 / len(tokens),
    }


def clients_of(server: str, *settings: Any) -> None:
    """Entry point of the clients' process."""
    asyncio.run(measure(server, *settings))


# ------------------------------------------------------------------------------------------------------ command line


def made_tokenizer() -> Any:
    """A tokenizer of a few hundred tokens with the special ones of Qwen3."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.fixtures.made_tokenizer import tokenizer_for

    return tokenizer_for("qwen3")


COLUMNS = (
    "requests", "added_ms", "added_p99_ms", "echo_ms", "cpu_ms", "ratio", "client_cpu_ms", "tokens",
    "route_bytes_per_token", "route_room_per_token", "kib_per_session",
)  # fmt: skip


def main() -> None:
    """Measure every number of sessions and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="10,200,2000")
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds of requests to the server, and again to the echo"
    )
    parser.add_argument("--turns", type=int, default=8, help="turns per session")
    parser.add_argument("--profile", help="file for a profile of the serving thread (slows it down)")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft < hard else (soft, hard))
    found: dict[str, Any] = {}
    for sessions in map(int, args.sessions.split(",")):
        settings = (sessions, args.rate, args.seconds, args.turns)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as Ray uses for actors
            found[str(sessions)] = runner.run(serve(settings, args.profile))
    load = os.getloadavg()[0]
    table = Table(title=f"{args.rate:g} requests/s, {args.turns} turns a session; load average {load:.1f}")
    for column in ("sessions", *COLUMNS):
        table.add_column(column.replace("_", " "), justify="right")
    for sessions, values in found.items():
        table.add_row(sessions, *(f"{values[c]:,.2f}" if values[c] < 100 else f"{values[c]:,.0f}" for c in COLUMNS))
    Console(width=200).print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
