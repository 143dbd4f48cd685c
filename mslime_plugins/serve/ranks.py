"""The trainer ranks behind a server: one Ray actor each, around the adapters of all clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from mslime.config.errors import ConfigError, TrainerError, UserError
from mslime.config.lora import LORA_GROUPS
from mslime.config.resolved import PolicySpec, policy_spec
from mslime.config.schema import RunConfig
from mslime.config.serve import AdamParams, LossChoice
from mslime.data.client_batch import ClientShard, Datum, by_datum, client_shards
from mslime.logs import phase
from mslime.run.assemble import chunks_per_group
from mslime.run.cluster import Cluster
from mslime.run.ranks import BaseActor, RankGroup, fetched
from mslime.threads import in_thread
from mslime_plugins.serve.backend import AdapterAsk, PassAsk, PassResult

if TYPE_CHECKING:
    from mslime.backends.megatron.step.base import Base
    from mslime.backends.megatron.step.client_steps import RankPassResult as RankPassed

T = TypeVar("T")
_log = logging.getLogger(__name__)
MLP_GROUPS = ("mlp", "shared_experts", "experts")


def targets_of(config: RunConfig, ask: AdapterAsk) -> tuple[str, ...]:
    """`lora.targets` without what a client does not want trained. Raises ConfigError for names of single layers, which
    cannot be told apart so."""
    wanted = {"attention": ask.attention, **dict.fromkeys(MLP_GROUPS, ask.mlp)}
    if not (ask.attention and ask.mlp) and (named := [t for t in config.lora.targets if t not in LORA_GROUPS]):
        raise ConfigError("lora_config", "train_attn, train_mlp", f"this server adapts {', '.join(named)} by name",
                          "train attention and MLP layers together")  # fmt: skip
    return tuple(target for target in config.lora.targets if wanted.get(target, True))


def adapter_spec(config: RunConfig, ask: AdapterAsk) -> PolicySpec:
    """How a client's adapter is trained: as a run of it alone would be."""
    chosen = {"rank": ask.rank, "targets": targets_of(config, ask), "init": None}
    return replace(policy_spec(config), lora=config.lora.model_copy(update=chosen), seed=ask.seed)


@dataclass(frozen=True)
class Refused:
    """A mistake that every rank found alike: all of them are as they were, or say what they are now."""

    error: UserError


class ServingActor(BaseActor):
    """One rank. Its verbs return `Refused` where all ranks refuse; whatever is raised ends the server."""

    def hold(self, base: Base) -> None:
        """See `BaseActor.hold`."""
        from mslime.backends.megatron.step.client_steps import ClientTrainers

        self._trainers = ClientTrainers(base)

    def create(self, name: str, ask: AdapterAsk) -> Any:
        """Make an adapter, and what writes it."""

        def work() -> None:
            self._trainers.create(name, adapter_spec(self._config, ask))
            with self._trainers.placed(name) as trainer:
                trainer.weight_sender(None, stacked=False)  # clients may give what is saved to other engines

        return self._told(f"creating {name}", work)

    def free(self, name: str) -> Any:
        """Forget an adapter."""
        return self._told(f"freeing {name}", lambda: self._trainers.free(name))

    def pass_over(self, name: str, part: Any, backward: bool) -> Any:
        """See `ClientTrainers.pass_over`."""
        (shard,) = fetched([part])
        return self._told(f"{name}: a pass", lambda: self._trainers.pass_over(name, shard, backward=backward))

    def add_together(self, asked: Sequence[tuple[str, Any]]) -> Any:
        """See `ClientTrainers.add_together`, of (name, part); `Refused` stands for a name's error."""
        names, parts = [name for name, _ in asked], fetched([part for _, part in asked])

        def work() -> dict[str, Any]:
            found = self._trainers.add_together(dict(zip(names, parts, strict=True)))
            return {name: Refused(one) if isinstance(one, UserError) else one for name, one in found.items()}

        return self._told(f"one pass of {', '.join(names)}", work)

    def adam_step(self, name: str, params: AdamParams) -> Any:
        """See `ClientTrainers.adam_step`."""
        return self._told(f"{name}: a step", lambda: self._trainers.adam_step(name, params))

    def save(self, name: str, directory: str) -> Any:
        """Write a state."""
        return self._told(f"saving {directory}", lambda: self._trainers.save(name, Path(directory), {}))

    def load(self, name: str, directory: str, optimizer: bool) -> Any:
        """Read one."""
        work = self._trainers.load_state
        return self._told(f"loading {directory}", lambda: work(name, Path(directory), optimizer=optimizer))

    def write_adapter(self, name: str, directory: str) -> Any:
        """Write the factors for engines."""

        def work() -> None:
            with self._trainers.placed(name) as trainer:
                trainer.write_adapter(Path(directory), verify=False)

        return self._told(f"writing {directory}", work)

    @staticmethod
    def _told(what: str, work: Callable[[], T]) -> T | Refused:
        try:
            with phase(_log, what):
                return work()
        except UserError as error:  # raised alike on all ranks: the next call finds them together
            return Refused(error)


class RankTrainer:
    """`backend.Trainer` on all ranks of a server.

    Args:
        fatal: told of what no call comes back from.
    """

    def __init__(
        self, config: RunConfig, cluster: Cluster, log_dir: Path, fatal: Callable[[BaseException], None]
    ) -> None:
        self._config, self._fatal = config, fatal
        self._ranks = RankGroup("trainer", ServingActor, config, cluster.trainer_options, log_dir)

    def start(self, on_wait: Callable[[], None] | None = None) -> None:
        """Build the base on all ranks."""
        self._ranks.start(on_wait)

    def stop(self) -> None:
        """Kill every rank."""
        self._ranks.stop()

    async def create(self, name: str, ask: AdapterAsk) -> None:
        """See `backend.Trainer`, as for all that follow."""
        targets_of(self._config, ask)
        deadline = self._config.deadlines.trainer_start_s
        await self._all("create an adapter", deadline, lambda a, _: a.create.remote(name, ask))

    async def free(self, name: str) -> None:
        await self._all("free an adapter", self._config.deadlines.train_step_s, lambda a, _: a.free.remote(name))

    async def pass_over(self, name: str, data: Sequence[Datum], loss: LossChoice, *, backward: bool) -> PassResult:
        config, layout = self._config, self._config.layout
        shards = await asyncio.to_thread(self._shards, data, loss)
        parts = [ray.put(shard) for shard in shards]

        def work(actor: Any, rank: int) -> ray.ObjectRef:
            return actor.pass_over.remote(name, parts[layout.dp_rank(rank)], backward)

        found = await self._all("forward_backward", config.deadlines.train_step_s, work)
        return self._passed(shards, found, len(data))

    async def add_together(self, asks: Sequence[PassAsk]) -> list[PassResult | UserError]:
        layout, what = self._config.layout, "forward_backward"
        shards = [await asyncio.to_thread(self._shards_or_error, ask) for ask in asks]
        parts = {
            ask.name: [ray.put(shard) for shard in own]
            for ask, own in zip(asks, shards, strict=True)
            if not isinstance(own, UserError)
        }

        def work(actor: Any, rank: int) -> ray.ObjectRef:
            return actor.add_together.remote([(name, part[layout.dp_rank(rank)]) for name, part in parts.items()])

        found = await self._all(what, self._config.deadlines.train_step_s * len(asks), work) if parts else []
        outcomes: list[PassResult | UserError] = []
        for ask, own in zip(asks, shards, strict=True):
            if isinstance(own, UserError):
                outcomes.append(own)
                continue
            told = [of_rank[ask.name] for of_rank in found]
            refused = self._refused(what, told)
            outcomes.append(refused or self._passed(own, told, len(ask.data)))
        return outcomes

    def _passed(self, shards: Sequence[ClientShard], found: Sequence[RankPassed], data: int) -> PassResult:
        """What all ranks found of so many data."""
        of_rank = {self._config.layout.dp_rank(rank): each.log_probs for rank, each in enumerate(found)}
        return PassResult(found[0].loss, by_datum([(shards[rank], column) for rank, column in of_rank.items()], data))

    def _shards_or_error(self, ask: PassAsk) -> list[ClientShard] | UserError:
        try:
            return self._shards(ask.data, ask.loss)
        except UserError as error:
            return error

    def _shards(self, data: Sequence[Datum], loss: LossChoice) -> list[ClientShard]:
        config = self._config
        train, quadratic = config.train, config.train.quadratic_tokens
        return client_shards(
            data, loss, config.layout, train.max_tokens_per_micro_batch, packed=train.packed,
            multiple_of=chunks_per_group(config.layout),
            quadratic_tokens=quadratic if isinstance(quadratic, float) else None,
        )  # fmt: skip

    async def adam_step(self, name: str, params: AdamParams) -> dict[str, float]:
        deadline = self._config.deadlines.train_step_s
        return (await self._all("optim_step", deadline, lambda a, _: a.adam_step.remote(name, params)))[0]

    async def save(self, name: str, directory: Path) -> None:
        await self._files("save", lambda a, _: a.save.remote(name, str(directory.absolute())))

    async def load(self, name: str, directory: Path, *, optimizer: bool) -> None:
        await self._files("load", lambda a, _: a.load.remote(name, str(directory.absolute()), optimizer))

    async def write_adapter(self, name: str, directory: Path) -> None:
        await self._files("write an adapter", lambda a, _: a.write_adapter.remote(name, str(directory.absolute())))

    async def _files(self, what: str, work: Callable[[Any, int], ray.ObjectRef]) -> None:
        await self._all(what, self._config.deadlines.checkpoint_s, work)

    async def _all(self, what: str, deadline_s: float, work: Callable[[Any, int], ray.ObjectRef]) -> list[Any]:
        """What every rank gave. Raises what all of them refused with; anything else is the end of the server."""
        try:
            asked: Future[list[Any]] = in_thread(self._ranks.all, what, deadline_s, work)
            found = await asyncio.wrap_future(asked)
        except UserError as error:
            self._fatal(error)
            raise
        if (refused := self._refused(what, found)) is not None:
            raise refused
        return found

    def _refused(self, what: str, found: Sequence[Any]) -> UserError | None:
        """What all ranks refused with. Raises, for the end of the server, where some of them did."""
        refused = [each for each in found if isinstance(each, Refused)]
        if not refused:
            return None
        if len(refused) == len(found):
            return refused[0].error
        error = TrainerError(what, f"{len(refused)} of {len(found)} ranks", str(refused[0].error), "read their logs")
        self._fatal(error)
        raise error
