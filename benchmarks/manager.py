"""CPU of the rollout service by response and by token, against the bare HTTP exchange of the same answers.

    python benchmarks/manager.py [--engines 256] [--requests 50000] [--cases short,qwen3-30b,deepseek-v3]

The fleet is fake: one process listens on a port for each engine and sends a canned answer in SGLang 0.5.23's format at
once. Real are the requests, HTTP, parsing, the pool, groups, books and the assembly of shards. CPU seconds are those of
this process alone; measure on a quiet machine all the same. The floor is an aiohttp client that posts the same bodies
and reads the answers without looking at them. Ends with one line of JSON; `ratio` is CPU over the floor.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from rich.console import Console
from rich.table import Table

from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.generating import GenerateRequest
from mslime.backends.sglang.pool import EnginePool
from mslime.config.loader import build
from mslime.config.model_facts import ModelFacts
from mslime.config.schema import RunConfig
from mslime.control.assemble import assemble
from mslime.data.sample import Sample
from mslime.data.source import PromptSource
from mslime.data.tokenizer import load_tokenizer
from mslime.rollout.protocols import EngineLimits
from mslime.rollout.service import RolloutService

PROMPT, GROUP, VOCABULARY = 128, 8, 256
IN_FLIGHT = 4000


@dataclass(frozen=True)
class Case:
    """Responses of `tokens` tokens, of a model that routes in `layers` layers to `top_k` of `experts` experts."""

    tokens: int
    layers: int
    top_k: int
    experts: int

    @property
    def facts(self) -> ModelFacts:
        """What clients and service know of the model."""
        return ModelFacts(
            vocab_size=VOCABULARY, max_positions=1 << 20, num_layers=self.layers, num_experts=self.experts,
            moe_layer_ids=tuple(range(self.layers)), top_k=self.top_k,
        )  # fmt: skip

    def answer(self) -> bytes:
        """What an engine says to any prompt."""
        random, n = np.random.default_rng(0), self.tokens
        ids = random.integers(1, 200, n).tolist()
        routes = random.integers(0, self.experts, (PROMPT + n - 1, self.layers, self.top_k)).astype(np.int32)
        meta = {
            "id": "x" * 20, "finish_reason": {"type": "length", "length": n}, "prompt_tokens": PROMPT,
            "completion_tokens": n, "cached_tokens": 0, "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": n}],
            "output_token_logprobs": [[-float(x), t, None] for x, t in zip(random.random(n) * 3, ids, strict=True)],
            "routed_experts": base64.b64encode(routes.tobytes()).decode(),
        }  # fmt: skip
        return json.dumps({"text": "x" * n, "output_ids": ids, "meta_info": meta}).encode()


CASES = {"short": Case(16, 4, 2, 16), "qwen3-30b": Case(1024, 48, 8, 128), "deepseek-v3": Case(1024, 61, 8, 256)}


def fake_fleet(pipe: Connection, engines: int, answer: bytes) -> None:
    """Servers that send `answer` to every request, until the process is ended. Their ports go into the pipe."""

    async def reply(request: web.Request) -> web.Response:
        await request.read()
        body = answer if request.path == "/generate" else b'{"success": true}'
        return web.Response(body=body, content_type="application/json")

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", reply)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        for _ in range(engines):
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        pipe.send([address[1] for address in runner.addresses])
        await asyncio.Event().wait()

    asyncio.run(serve())


class FakeScorer:
    """Gives 0 and 1 at once."""

    per_group = False

    async def score(self, sample: Sample) -> float:
        return float(sample.index % 2)

    async def score_group(self, samples: Sequence[Sample]) -> list[float | None]:
        return [await self.score(sample) for sample in samples]


async def floor(urls: Sequence[str], case: Case, requests: int) -> float:
    """CPU seconds of posting so many requests and reading their answers, `IN_FLIGHT` at a time."""
    slots, prompt = asyncio.Semaphore(IN_FLIGHT), np.arange(PROMPT, dtype=np.int32)
    body = json.dumps(GenerateRequest("r0", prompt, case.tokens, want_routes=True).payload(), default=list).encode()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> None:
            async with slots, session.post(f"{urls[number % len(urls)]}/generate", data=body) as response:
                await response.read()

        started = time.process_time()
        await asyncio.gather(*map(one, range(requests)))
        return time.process_time() - started


async def clients(urls: Sequence[str], case: Case, requests: int) -> float:
    """CPU seconds of the same requests through the pool: answers are parsed and compared with what was asked."""
    pool, prompt = make_pool(urls, case), np.arange(PROMPT, dtype=np.int32)

    async def one(number: int) -> None:
        await pool.generate(
            GenerateRequest(
                f"r{number}", prompt, case.tokens, want_routes=True, ignore_eos=True, session_id=f"g{number // GROUP}"
            )
        )

    started = time.process_time()
    await asyncio.gather(*map(one, range(requests)))
    spent = time.process_time() - started
    await pool.close()
    return spent


async def service(urls: Sequence[str], case: Case, requests: int, directory: Path) -> tuple[float, float, float]:
    """CPU seconds of a whole step of the rollout service, of its assembly into shards, and wall seconds of the step."""
    config = make_config(directory, case, requests, len(urls))
    tokenizer, pool = load_tokenizer(directory), make_pool(urls, case)
    source = PromptSource(config.data.prompts, config.data, tokenizer, config.seed)
    manager = RolloutService(config, pool, source, tokenizer, FakeScorer(), case.facts, EngineLimits())
    wall, started = time.perf_counter(), time.process_time()
    batch = await manager.take(0)
    spent, wall = time.process_time() - started, time.perf_counter() - wall
    started = time.process_time()
    assemble(batch.groups, config, 0)
    assembled = time.process_time() - started
    await manager.close()
    await pool.close()
    return spent, assembled, wall


def make_pool(urls: Sequence[str], case: Case) -> EnginePool:
    """Clients of the fleet."""
    return EnginePool([EngineClient(url, f"engine{i}", model=case.facts) for i, url in enumerate(urls)], IN_FLIGHT)


def make_config(directory: Path, case: Case, requests: int, engines: int) -> RunConfig:
    """A step of so many responses."""
    path = directory / "prompts.jsonl"
    lines = (json.dumps({"prompt": f"{i:0{PROMPT}d}", "label": "1"}) for i in range(requests // GROUP))
    path.write_text("\n".join(lines))
    rollout = {
        "groups_per_step": requests // GROUP, "group_size": GROUP, "max_response_tokens": case.tokens,
        "concurrency": max(1, IN_FLIGHT // engines),
    }  # fmt: skip
    return build({
        "model": {"path": str(directory)}, "data": {"prompts": [str(path)]}, "rollout": rollout,
        "cluster": {"device": "cpu"}, "train": {"quadratic_tokens": 24576, "max_tokens_per_micro_batch": 16384},
    })  # fmt: skip


def measure(case: Case, engines: int, requests: int, directory: Path) -> dict[str, float]:
    """Microseconds of CPU, and tokens a second of one core."""
    ours, theirs = multiprocessing.Pipe()
    fleet = multiprocessing.get_context("fork").Process(
        target=fake_fleet, args=(theirs, engines, case.answer()), daemon=True
    )
    fleet.start()
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ours.recv()]
        asyncio.run(service(urls, case, 2 * GROUP, directory))  # imports
        bare = asyncio.run(floor(urls, case, requests))
        parsed = asyncio.run(clients(urls, case, requests))
        whole, assembled, wall = asyncio.run(service(urls, case, requests, directory))
    finally:
        fleet.terminate()
        fleet.join()
    tokens = requests * case.tokens
    return {
        "requests": requests,
        "http_us": 1e6 * bare / requests,
        "client_us": 1e6 * parsed / requests,
        "service_us": 1e6 * whole / requests,
        "assemble_us": 1e6 * assembled / requests,
        "service_us_per_token": 1e6 * whole / tokens,
        "tokens_per_core_second": tokens / (whole + assembled),
        "wall_s": wall,
        "ratio": whole / bare,
    }


def main() -> None:
    """Measure every case and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--requests", type=int, default=50_000, help="fewer for long responses: see --tokens")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="generated at most in a case")
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft < hard else (soft, hard))
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tokenizer(directory)
        for case in args.cases.split(","):
            count = min(args.requests, args.tokens // CASES[case].tokens) // GROUP * GROUP
            figures[case] = measure(CASES[case], args.engines, count, directory)
    table = Table(title=f"{args.engines} fake engines, {IN_FLIGHT} requests in flight; us of CPU a request")
    columns = ("requests", "http_us", "client_us", "service_us", "assemble_us", "tokens_per_core_second", "ratio")
    for column in ("case", *columns):
        table.add_column(column, justify="right")
    for case, found in figures.items():
        table.add_row(
            case, *(f"{found[column]:,.2f}" if column == "ratio" else f"{found[column]:,.0f}" for column in columns)
        )
    Console().print(table)
    print(json.dumps(figures))


def make_tokenizer(directory: Path) -> None:
    """The tests' byte tokenizer, and a config.json that nobody reads."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.fixtures import tiny_models

    tiny_models.make_tokenizer(directory)
    (directory / "config.json").write_text("{}")


if __name__ == "__main__":
    main()
