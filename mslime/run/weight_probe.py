"""Probe after a weight sync: compares the engines' log-probs of a fixed text with the trainer's.

Each engine adds a few tokens to the text, and the trainer scores all of it. While the engines generate, it scores the
tokens of the previous probe; if the engines add the same ones again, no second pass is needed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mslime.config.errors import sync_error
from mslime.config.model_facts import ModelFacts
from mslime.data.probe import SAME_ROUTES, ProbeDifferences, ProbeScores, routes_of
from mslime.run.ranks import Span
from mslime.run.rollout_process import RolloutProcess
from mslime.run.run_rollouts import RunRollouts
from mslime.run.sharing import SeparateGpus
from mslime.run.trainers import TrainerGroup

HINT = (
    "weights.verify: always compares the parameters, too; if they are equal, the engine has another fault: see "
    "docs/weight_sync.md, section Probe. weights.probe_tolerance sets the limit, weights.verify: first omits the probe"
)

Score: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int16] | None]
"""The trainer's result for a text: [T] log-probs, [T, MoE layers, top-k] experts."""
Scores: TypeAlias = dict[bytes, Score]
"""Keys are the bytes of a text's token ids."""


@dataclass(frozen=True)
class ProbeResult:
    """Result of a successful probe.

    Attributes:
        worst: the largest difference in log-probs, and the smallest share of equal routes, among the engines.
        seconds: for which the engines waited.
        spans: when each rank was busy with it.
    """

    worst: ProbeDifferences
    seconds: float
    spans: Mapping[str, Span]

    def metrics(self) -> dict[str, float]:
        """Named as in `metrics.jsonl`."""
        return {
            "weights/probe_seconds": self.seconds,
            "weights/probe_log_probs": self.worst.log_probs,
            "weights/probe_routes": self.worst.routes,
        }


class WeightProbe:
    """Probes trainer and engines; the engines are paused before and after.

    Args:
        tolerance: nats, see `data.probe.ProbeDifferences`.
        memory: schedules the use of shared GPUs.
        follows: whether the trainer's routers can be given the engines' routes (`train.replay: r3`).
    """

    def __init__(
        self, rollouts: RolloutProcess, trainers: TrainerGroup, tolerance: float, memory: SeparateGpus,
        model: ModelFacts, *, follows: bool,
    ) -> None:  # fmt: skip
        self._rollouts, self._trainers, self._tolerance, self._memory = rollouts, trainers, tolerance, memory
        self._model, self._follows = model, follows
        self._expected: list[NDArray[np.int32]] = []  # texts with the engines' tokens of the previous probe

    def ask(self, version: int) -> ProbeResult | None:
        """Probe after the engines were stamped with this version; None if no engine has an answer.

        Raises:
            WeightSyncError: engines differ by more than rounding error; it names all of them.
            EngineError: all engines refuse. EngineDied: none is left. TrainerError: a rank is gone.
        """
        begin = time.monotonic()
        self._memory.enter("generate")
        known, spans = Scores(), dict[str, Span]()
        if self._memory.shared or not self._expected:
            found = self._rollouts.service.call(RunRollouts.probe, version)
        else:  # meanwhile the trainer scores the previous probe's tokens: after a small change most are the same
            with ThreadPoolExecutor(1) as beside:
                scoring = beside.submit(copy_context().run, self._trainers.probe, self._expected)  # in its turn
                found = self._rollouts.service.call(RunRollouts.probe, version)  # if it raises, ranks are waited for
                scored, spans = scoring.result()
            known = _by_text(self._expected, scored)
        if not found:
            return None
        self._memory.enter("send")
        texts = {each.tokens.tobytes(): each for each in found.values()}  # most engines add the same tokens
        if missing := [each.tokens for key, each in texts.items() if key not in known]:
            scored, spans = self._trainers.probe(missing)
            known |= _by_text(missing, scored)
        self._expected = [each.tokens for each in texts.values()]
        expected = {key: ProbeScores(each.tokens, each.given, *known[key]) for key, each in texts.items()}
        apart = {url: ProbeDifferences.between(each, expected[each.tokens.tobytes()]) for url, each in found.items()}
        wrong = {url: each for url, each in apart.items() if each.too_large(self._tolerance)}
        if self._follows:  # their log-probs may differ because rounding chose other experts for some tokens
            doubtful = {url: found[url] for url, each in wrong.items() if SAME_ROUTES <= each.routes < 1}
            apart |= self._by_their_routes(doubtful, apart)
            wrong = {url: each for url, each in apart.items() if each.too_large(self._tolerance)}
        if wrong:
            self._refuse(version, wrong)
        worst = ProbeDifferences(
            max(each.log_probs for each in apart.values()), min(each.routes for each in apart.values())
        )
        return ProbeResult(worst, time.monotonic() - begin, spans)

    def _by_their_routes(
        self, doubtful: Mapping[str, ProbeScores], apart: Mapping[str, ProbeDifferences]
    ) -> dict[str, ProbeDifferences]:
        """Differences to the trainer's results when its routers follow each engine's routes.

        One different expert at an early token affects all later tokens, and so the median.
        """
        found = {url: each for url, each in doubtful.items() if each.may_be_followed(self._model.num_experts)}
        if not found:
            return {}
        routes = routes_of(list(found.values()), self._model.moe_layer_ids, self._model.num_experts)
        scored, _ = self._trainers.probe([each.tokens for each in found.values()], routes)
        return {
            url: replace(
                apart[url], log_probs=ProbeDifferences.between(each, replace(each, log_probs=log_probs)).log_probs
            )
            for (url, each), (log_probs, _) in zip(found.items(), scored, strict=True)
        }

    def _refuse(self, version: int, wrong: Mapping[str, ProbeDifferences]) -> NoReturn:
        differences = "; ".join(
            f"{url}: log-probs off by {each.log_probs:.3g} nats, same experts in {each.routes:.1%}"
            for url, each in wrong.items()
        )
        rule = (
            f"an engine scores a fixed text differently from the trainer's weights of version {version}. The limits "
            f"are a median of {self._tolerance:g} nats, and {1 - SAME_ROUTES:.0%} other experts"
        )
        raise sync_error("probe", differences, rule, HINT)


def _by_text(texts: Sequence[NDArray[np.int32]], scored: Sequence[Score]) -> Scores:
    return {tokens.tobytes(): score for tokens, score in zip(texts, scored, strict=True)}
