"""CPU of the rollout service per response and per token, against the bare HTTP exchange of the same responses.

    python benchmarks/manager.py [--engines 256] [--requests 50000] [--managers M]
        [--cases short,qwen3-30b,...] [--profile CASE]

The engines are fake: one process listens on a port per engine and returns a prepared response in SGLang 0.5.23's format
at once. Requests, HTTP, parsing, the pool, groups, their tracker and the assembly are real. CPU seconds are those of
this process alone, the least of `--repeats` passes; still, measure on a quiet machine. The floor is an aiohttp client
that posts the same bodies and reads the responses without parsing them. In the case `masks`, each token comes with the
sampling mask of top-p 0.9, 55 ids on average. Ends with one line of JSON; `ratio` is CPU over the floor. `--profile`
prints where the rollout service spends the time of a case.

With `--managers M`, M manager processes and their front (`rollout.managers`) also take the same step. `speedup` is the
CPU of the one service over that of the busiest of these processes: the speedup if each process has a core of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import cProfile
import gc
import json
import multiprocessing
import os
import pstats
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import ray
from aiohttp import web
from rich.console import Console
from rich.table import Table

from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import GenerateRequest
from mslime.config.loader import build
from mslime.config.model_facts import ModelFacts
from mslime.config.schema import RunConfig
from mslime.data.sample import Sample
from mslime.data.source import PromptSource
from mslime.data.tokenizer import load_tokenizer
from mslime.rollout.generation import EngineLimits
from mslime.rollout.manager import Manager
from mslime.rollout.rewards.scorer import RewardScorer
from mslime.rollout.service import LocalHandle, RolloutService
from mslime.run.assemble import assemble
from mslime.run.ray_calls import RemoteHandle
from mslime.run.ray_cluster import remote_class
from mslime.run.rollout_process import ManagerActor
from mslime.run.started import search_seldom

PROMPT, GROUP, VOCABULARY = 128, 8, 151_936
CUT = {"top_p": 0.9, "top_k": 4096}


@dataclass(frozen=True)
class Case:
    """Workload of one case: `tokens` a response, `layers` MoE layers, `top_k` of `experts` experts, with or without
    sampling masks. `narrow`: one byte per expert on the wire, as from engines that mslime starts.
    """

    tokens: int
    layers: int
    top_k: int
    experts: int
    masks: bool = False
    narrow: bool = True

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model for clients and service."""
        return ModelFacts(
            vocab_size=VOCABULARY, max_positions=1 << 20, num_layers=self.layers, num_experts=self.experts,
            moe_layer_ids=tuple(range(self.layers)), top_k=self.top_k,
        )  # fmt: skip

    def answer(self) -> bytes:
        """Reply of an engine to any prompt."""
        random, n = np.random.default_rng(0), self.tokens
        ids = random.integers(1, 200, n).tolist()
        shape, wire = (PROMPT + n - 1, self.layers, self.top_k), np.uint8 if self.narrow else np.int32
        routes = random.integers(0, self.experts, shape).astype(wire)
        meta = {
            "id": "x" * 20, "finish_reason": {"type": "length", "length": n}, "prompt_tokens": PROMPT,
            "completion_tokens": n, "cached_tokens": 0, "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": n}],
            "output_token_logprobs": [[-float(x), t, None] for x, t in zip(random.random(n) * 3, ids, strict=True)],
            "routed_experts": ("u1:" if self.narrow else "") + base64.b64encode(routes.tobytes()).decode(),
        }  # fmt: skip
        if self.masks:  # few ids for most tokens, many for some
            sizes = np.minimum(1 + random.lognormal(1.9, 2.0, n), CUT["top_k"]).astype(int)
            rows = [random.choice(np.arange(200, VOCABULARY), size, replace=False) for size in sizes]
            meta["output_token_sampling_mask"] = [[t, *row[1:].tolist()] for t, row in zip(ids, rows, strict=True)]
            meta["output_token_sampling_logprobs"] = [-float(x) for x in random.random(n) * 3]
        return orjson.dumps({"text": "x" * n, "output_ids": ids, "meta_info": meta})  # as SGLang serialises it

    def request(self, number: int) -> GenerateRequest:
        """One of the requests."""
        prompt, cut = np.arange(PROMPT, dtype=np.int32), CUT if self.masks else {}
        session = f"g{number // GROUP}"
        return GenerateRequest(
            f"r{number}", prompt, self.tokens, want_routes=True, ignore_eos=True, session_id=session, **cut
        )


CASES = {
    "short": Case(16, 4, 2, 16),
    "qwen3-30b": Case(1024, 48, 8, 128),
    "int32": Case(1024, 48, 8, 128, narrow=False),
    "masks": Case(1024, 48, 8, 128, masks=True),
    "deepseek-v3": Case(1024, 61, 8, 256),
}


@dataclass(frozen=True)
class Load:
    """Load of a measurement: number of requests, and number of concurrent requests."""

    case: Case
    requests: int
    in_flight: int


def fake_fleet(pipe: Connection, engines: int, answer: bytes) -> None:
    """Serve `answer` to every request until the process is ended. The ports are sent through the pipe."""

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


class FakeScorer(RewardScorer):
    """Gives 0 and 1 at once."""

    per_group = False

    def __init__(self) -> None:
        """No graders."""

    async def score(self, sample: Sample) -> float:
        return float(sample.index % 2)

    async def score_group(self, samples: Sequence[Sample]) -> list[float | None]:
        return [await self.score(sample) for sample in samples]


async def floor(urls: Sequence[str], load: Load) -> float:
    """CPU seconds of a bare client that posts the requests and reads the replies."""
    slots, body = asyncio.Semaphore(load.in_flight), json.dumps(load.case.request(0).payload()).encode()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> None:
            async with slots, session.post(f"{urls[number % len(urls)]}/generate", data=body) as response:
                await response.read()

        started = time.process_time()
        await asyncio.gather(*map(one, range(load.requests)))
        return time.process_time() - started


async def clients(urls: Sequence[str], load: Load) -> float:
    """CPU seconds of the same requests through the pool, which parses and validates replies."""
    pool = make_pool(urls, load)

    async def one(number: int) -> None:
        await pool.generate(load.case.request(number))

    started = time.process_time()
    await asyncio.gather(*map(one, range(load.requests)))
    spent = time.process_time() - started
    await pool.close()
    return spent


async def one_manager(
    urls: Sequence[str], load: Load, directory: Path, profile: cProfile.Profile | None = None
) -> tuple[float, float, float]:
    """(CPU seconds of a rollout service's step, CPU seconds of its assembly into shards, wall seconds of the step)."""
    config = make_config(directory, load, len(urls))
    tokenizer, pool = load_tokenizer(directory), make_pool(urls, load)
    source = PromptSource(config.data.prompts, config.data, tokenizer, config.seed)
    manager = Manager(config, pool, tokenizer, FakeScorer(), load.case.facts, EngineLimits())
    service = RolloutService(
        config.rollout, config.deadlines.rollout_step_s, [LocalHandle(manager)], source, load.case.facts.max_positions
    )
    if not gc.get_freeze_count():
        search_seldom()  # as in a run
    wall, started = time.perf_counter(), time.process_time()
    with profile or nullcontext():
        batch = await service.take(0)
    spent, wall = time.process_time() - started, time.perf_counter() - wall
    started = time.process_time()
    assemble(batch.groups, config, 0)
    assembled = time.process_time() - started
    await service.close()
    await pool.close()
    return spent, assembled, wall


class BenchedManager(ManagerActor):
    """A manager over fake engines."""

    def __init__(self) -> None:
        """Skip the setup of a real run."""

    async def begin(self, urls: Sequence[str], load: Load, directory: Path) -> None:
        """Start a new manager with these engines."""
        config, tokenizer = make_config(directory, load, len(urls)), load_tokenizer(directory)
        self._pool = make_pool(urls, load)
        manager = Manager(config, self._pool, tokenizer, FakeScorer(), load.case.facts, EngineLimits())
        self.objects = {"rollout": manager}
        if not gc.get_freeze_count():
            search_seldom()

    async def end(self) -> None:
        """Close the connections."""
        await self._pool.close()

    async def spent(self) -> float:
        """CPU seconds of this process."""
        return time.process_time()


async def joined(urls: Sequence[str], load: Load, directory: Path, actors: Sequence[Any]) -> tuple[float, float, float]:
    """CPU seconds of a step with several managers: the busiest manager, the front, and the front's assembly."""
    config, every = make_config(directory, load, len(urls)), len(actors)
    shares = [Load(load.case, load.requests, load.in_flight // every)] * every
    begun = [
        a.begin.remote(urls[i::every], share, directory)
        for i, (a, share) in enumerate(zip(actors, shares, strict=True))
    ]
    await asyncio.gather(*begun)
    ports = [
        RemoteHandle[Manager](actor, "rollout", f"manager {index}", "?", config.deadlines)
        for index, actor in enumerate(actors)
    ]
    source = PromptSource(config.data.prompts, config.data, load_tokenizer(directory), config.seed)
    front = RolloutService(
        config.rollout, config.deadlines.rollout_step_s, ports, source, load.case.facts.max_positions
    )
    before, started = await asyncio.gather(*(a.spent.remote() for a in actors)), time.process_time()
    batch = await front.take(0)
    front_s = time.process_time() - started
    after = await asyncio.gather(*(a.spent.remote() for a in actors))
    started = time.process_time()
    assemble(batch.groups, config, 0)
    assembled = time.process_time() - started
    await front.close()
    await asyncio.gather(*(a.end.remote() for a in actors))
    return max(b - a for a, b in zip(before, after, strict=True)), front_s, assembled


def measure_joined(
    urls: Sequence[str], load: Load, directory: Path, repeats: int, managers: int, alone_s: float
) -> dict[str, float]:
    """CPU of managers and front per response, and the speed-up over `alone_s`, one service's CPU with its assembly."""
    made = remote_class(BenchedManager).options(num_cpus=0, max_concurrency=64)
    actors = [made.remote() for _ in range(managers)]
    asyncio.run(joined(urls, Load(load.case, 2 * GROUP, load.in_flight), directory, actors))  # warm-up: imports
    passes = [asyncio.run(joined(urls, load, directory, actors)) for _ in range(repeats)]
    busiest, front, assembled = (min(values) for values in zip(*passes, strict=True))
    for actor in actors:
        ray.kill(actor)
    return {
        "managers": managers,
        "busiest_manager_us": 1e6 * busiest / load.requests,
        "front_us": 1e6 * front / load.requests,
        "front_assemble_us": 1e6 * assembled / load.requests,
        "speedup": alone_s / max(busiest, front + assembled),
    }


def make_pool(urls: Sequence[str], load: Load) -> EnginePool:
    """Clients of the fleet."""
    clients = [EngineClient(url, f"engine{i}", model=load.case.facts) for i, url in enumerate(urls)]
    return EnginePool(clients, max(1, load.in_flight // len(urls)))


def make_config(directory: Path, load: Load, engines: int) -> RunConfig:
    """Configuration with a step of `load` responses."""
    requests, cut = load.requests, CUT if load.case.masks else {}
    path = directory / "prompts.jsonl"
    lines = (json.dumps({"prompt": f"{i:0{PROMPT}d}", "label": "1"}) for i in range(requests // GROUP))
    path.write_text("\n".join(lines))
    rollout = {
        "groups_per_step": requests // GROUP, "group_size": GROUP, "max_response_tokens": load.case.tokens,
        "concurrency": max(1, load.in_flight // engines), **cut,
    }  # fmt: skip
    return build({
        "model": {"path": str(directory)}, "data": {"prompts": [str(path)]}, "rollout": rollout,
        "cluster": {"device": "cpu"}, "train": {"quadratic_tokens": 24576, "max_tokens_per_micro_batch": 16384},
    })  # fmt: skip


@contextmanager
def fleet(engines: int, case: Case) -> Iterator[list[str]]:
    """Run fake engines inside the block; yields their URLs."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=fake_fleet, args=(theirs, engines, case.answer()), daemon=True
    )
    process.start()
    try:
        yield [f"http://127.0.0.1:{port}" for port in ours.recv()]
    finally:
        process.kill()  # Ray, if it runs, would report a SIGTERM
        process.join()


def measure(load: Load, engines: int, repeats: int, directory: Path, managers: int) -> dict[str, float]:
    """Microseconds of CPU, and tokens a second of one core."""
    warm = Load(load.case, 2 * GROUP, load.in_flight)
    with fleet(engines, load.case) as urls:
        asyncio.run(one_manager(urls, warm, directory))  # warm-up: imports
        bare = min(asyncio.run(floor(urls, load)) for _ in range(repeats))
        parsed = min(asyncio.run(clients(urls, load)) for _ in range(repeats))
        passes = [asyncio.run(one_manager(urls, load, directory)) for _ in range(repeats)]
        whole, assembled, wall = (min(values) for values in zip(*passes, strict=True))
        several: dict[str, float] = {}
        if managers > 1:
            several = measure_joined(urls, load, directory, repeats, managers, whole + assembled)
    requests, tokens = load.requests, load.requests * load.case.tokens
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
        **several,
    }


def show_profile(load: Load, engines: int, directory: Path) -> None:
    """Print a profile of the rollout service."""
    profile = cProfile.Profile()
    with fleet(engines, load.case) as urls:
        asyncio.run(one_manager(urls, Load(load.case, 2 * GROUP, load.in_flight), directory))
        asyncio.run(one_manager(urls, load, directory, profile))
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def main() -> None:
    """Measure every case and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--requests", type=int, default=50_000, help="fewer for long responses: see --tokens")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="maximum number of generated tokens per case")
    parser.add_argument("--in-flight", type=int, default=4000, help="concurrent requests to the engines")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--managers", type=int, default=1, help="also measure this many managers")
    parser.add_argument("--profile", choices=CASES)
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft < hard else (soft, hard))
    loads = {
        name: Load(case, min(args.requests, args.tokens // case.tokens) // GROUP * GROUP, args.in_flight)
        for name, case in CASES.items()
    }
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tokenizer(directory)
        if args.profile:
            show_profile(loads[args.profile], args.engines, directory)
            return
        cases = args.cases.split(",")
        if args.managers > 1:
            start_ray()
        figures: dict[str, Any] = {
            case: measure(loads[case], args.engines, args.repeats, directory, args.managers) for case in cases
        }
    show(figures, f"{args.engines} fake engines, {args.in_flight} requests in flight; us of CPU a request")
    print(json.dumps(figures))


def show(figures: dict[str, Any], title: str) -> None:
    """A table of the figures, one line a case; with several managers, a second one."""
    alone = ("requests", "http_us", "client_us", "service_us", "assemble_us", "tokens_per_core_second", "ratio")
    several = ("managers", "busiest_manager_us", "front_us", "front_assemble_us", "speedup")
    for columns in (alone, several):
        if all(column in found for found in figures.values() for column in columns):
            show_columns(figures, title, columns)


def show_columns(figures: dict[str, Any], title: str, columns: Sequence[str]) -> None:
    """One table."""
    table = Table(title=title)
    for column in ("case", *columns):
        table.add_column(column, justify="right")
    for case, found in figures.items():
        form = {column: ",.2f" if column in ("ratio", "speedup") else ",.0f" for column in columns}
        table.add_row(case, *(format(found[column], form[column]) for column in columns))
    Console().print(table)


def start_ray() -> None:
    """Start Ray on this machine; workers get this process's import path."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *(p for p in sys.path if p)])
    ray.init(
        "local", include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}}
    )  # fmt: skip


def make_tokenizer(directory: Path) -> None:
    """Write the tests' byte tokenizer and a placeholder config.json."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.fixtures import tiny_models

    tiny_models.make_tokenizer(directory)
    (directory / "config.json").write_text("{}")


if __name__ == "__main__":
    main()
