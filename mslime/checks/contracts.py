"""Calls a user's functions on small synthetic input and checks them against docs/extending.md.

`mslime check --try` calls each function that the settings name. In your own test, call the one that you need:

    from mslime.checks.contracts import check_loss

    def test_my_loss():
        check_loss("my_project.losses:mine")

Each returns its findings, one line each, and raises UserError if the function breaks its contract. They cannot check
whether the function does what you want.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text
from torch import Tensor

from mslime.algorithms.advantages import (
    GroupRewards,
    TurnAdvantages,
    TurnRewards,
    function_advantages,
    group_rewards,
)
from mslime.algorithms.losses import LossOutput, PolicyLossInputs, policy_loss
from mslime.algorithms.statistics import LossStatistics, finalise
from mslime.algorithms.token_batch import Reduce
from mslime.checks.user_functions import check_environment, run_functions, try_reward_functions
from mslime.config.algorithm import AlgorithmConfig
from mslime.config.data import DataConfig
from mslime.config.errors import ConfigError
from mslime.config.reward import RewardConfig, RewardPartConfig, ScoringConfig
from mslime.config.schema import RunConfig
from mslime.config.train import TrainConfig
from mslime.data.sample import Group
from mslime.data.source import Prompt, UserSource, open_prompts
from mslime.data.tokenizer import Tokenizer, load_tokenizer
from mslime.observe.hooks import StepRecord, call_step_hook
from mslime.observe.names import METRICS
from mslime.rollout.filters import load_filter, load_sample_hook
from mslime.rollout.function_contract import check_workflow
from mslime.rollout.group_tracker import new_group

LENGTHS = (7, 1, 12, 5)
"""Tokens of the synthetic sequences."""
BARRIER_S = 10.0
"""Seconds that one of two simulated ranks waits for the other."""
CLOSE = 1e-9
"""Largest relative difference between layouts, in float64."""


@dataclass(frozen=True)
class TrialResult:
    """Result of trying one function.

    Attributes:
        findings: one line each.
        error: broken rule; None if there is none.
    """

    setting: str
    function: str
    findings: tuple[str, ...]
    error: Exception | None = None


# The loss, the correction


def check_loss(function: str, algorithm: AlgorithmConfig | None = None) -> list[str]:
    """Try a policy loss, with the other settings of `algorithm`."""
    return _check_algorithm(_with(algorithm, loss=function), "algorithm.loss", function)


def check_correction(function: str, algorithm: AlgorithmConfig | None = None) -> list[str]:
    """Try an off-policy correction under the loss of `algorithm`."""
    base = algorithm or AlgorithmConfig()
    correction = {"function": function, "policy": base.correction.policy, "reference": base.correction.reference}
    return _check_algorithm(_with(algorithm, correction=correction), "algorithm.correction.function", function)


def _with(algorithm: AlgorithmConfig | None, **changes: Any) -> AlgorithmConfig:
    given = {} if algorithm is None else algorithm.given()
    return AlgorithmConfig(**{**given, **changes})


def _check_algorithm(algorithm: AlgorithmConfig, setting: str, function: str) -> list[str]:
    """Try one step as a whole, repeated, in micro-batches of one sequence, and on two context-parallel ranks."""

    def broken(rule: str, hint: str) -> ConfigError:
        return ConfigError(setting, function, rule, hint)

    inputs = _made_up_tokens()
    everything = torch.ones(len(inputs.mask), dtype=torch.bool)
    loss, gradient, metrics = _whole(inputs, algorithm, [everything])
    if not (np.isfinite(loss) and gradient.isfinite().all()):
        raise broken(
            "returns a loss or a gradient that is not finite", "check for log(0), 0 / 0 and exp of large numbers"
        )
    if not gradient.any():
        raise broken("has gradient 0 for every token", "compute the loss from batch.log_probs without .detach()")
    if not _same(_whole(inputs, algorithm, [everything]), (loss, gradient), 0.0):
        raise broken("returns different losses for the same tokens", "remove random numbers and state")
    apart = [inputs.sequence_index == sequence for sequence in range(inputs.num_sequences)]
    if not _same(_whole(inputs, algorithm, apart), (loss, gradient), CLOSE):
        raise broken("depends on which sequences share a micro-batch", "use only sums over a token's own sequence")
    if not _same(_on_two_ranks(inputs, algorithm, broken), (loss, gradient), CLOSE):
        raise broken(
            "depends on which rank holds which tokens of a sequence",
            "sum over sequences with batch.sequences.sum and batch.mean, which include all ranks",
        )
    padding = replace(inputs, mask=torch.zeros_like(everything), weights=0 * inputs.weights)
    empty, empty_gradient, _ = _whole(padding, algorithm, [everything])
    if empty != 0 or empty_gradient.any():
        raise broken("returns a loss if no token is trained, as in micro-batches of padding",
                     "do not divide by a sum over the mask, which may be 0")  # fmt: skip
    listed = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith("user/"))
    return [
        f"{len(inputs.mask)} tokens of {inputs.num_sequences} sequences: loss {loss:.4g}, "
        f"largest gradient {float(gradient.abs().max()):.4g}, all finite, the same when called again",
        "the same in micro-batches of one sequence, and on two context-parallel ranks; 0 if no token is trained",
        *([f"metrics: {listed}"] if listed else []),
    ]


def _made_up_tokens() -> PolicyLossInputs:
    """Tokens of several sequences and weight versions in float64, some not trained."""
    random = torch.Generator().manual_seed(0)
    n = sum(LENGTHS)

    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))

    def near(values: Tensor, spread: float) -> Tensor:
        """Nearby log-probs; those of sequence 1 are equal, so no bound removes them from the loss."""
        apart = spread * (sequence != 1) * torch.randn(n, generator=random, dtype=torch.float64)
        return (values + apart).clamp(max=-1e-3)

    position = torch.cat([torch.arange(length) for length in LENGTHS])
    old = near(torch.full((n,), -1.5, dtype=torch.float64), 0.7)
    mask = (position != 2) | (sequence == 1)
    per_sequence = torch.tensor([0.8, -1.1, 0.0, 1.7], dtype=torch.float64)
    return PolicyLossInputs(
        log_probs=near(old, 0.2),
        behaviour_log_probs=near(old, 0.1),
        advantages=per_sequence[sequence],
        mask=mask,
        weights=mask / mask.sum().double(),
        sequence_index=sequence,
        num_sequences=len(LENGTHS),
        old_log_probs=old,
        segment_index=2 * sequence + (position > 3),
        num_segments=2 * len(LENGTHS),
        ages=(position <= 3).long(),
        positions=position,
    )


def _part(inputs: PolicyLossInputs, chosen: Tensor, log_probs: Tensor) -> PolicyLossInputs:
    """The tokens `chosen` [n] bool, with log-probs that carry a gradient."""
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    columns = {name: value[chosen] for name, value in values.items() if isinstance(value, Tensor)}
    return replace(inputs, **columns | {"log_probs": log_probs[chosen]})


def _whole(
    inputs: PolicyLossInputs, algorithm: AlgorithmConfig, micro_batches: list[Tensor]
) -> tuple[float, Tensor, Mapping[str, float]]:
    """(loss, its gradient [n], metrics) of a step in these micro-batches."""
    leaf = inputs.log_probs.clone().requires_grad_()
    return _added_up([policy_loss(_part(inputs, chosen, leaf), algorithm) for chosen in micro_batches], leaf)


def _added_up(outputs: list[LossOutput], leaf: Tensor) -> tuple[float, Tensor, Mapping[str, float]]:
    statistics = LossStatistics.zeros()
    for output in outputs:
        statistics = statistics.merge(output.statistics)
    loss = torch.stack([output.loss for output in outputs]).sum()
    if loss.requires_grad:
        loss.backward()
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return loss.item(), gradient.detach(), finalise(statistics)


def _on_two_ranks(
    inputs: PolicyLossInputs, algorithm: AlgorithmConfig, broken: Callable[[str, str], ConfigError]
) -> tuple[float, Tensor, Mapping[str, float]]:
    """`_whole` with every sequence split over two ranks, each in a thread."""
    leaf, barrier = inputs.log_probs.clone().requires_grad_(), threading.Barrier(2, timeout=BARRIER_S)
    held: dict[int, Tensor] = {}

    def of_rank(rank: int) -> Reduce:
        def reduce(values: Tensor) -> Tensor:
            held[rank] = values.clone()
            barrier.wait()
            total = held[0] + held[1]
            barrier.wait()
            return total

        return reduce

    def work(rank: int) -> LossOutput:
        chosen = torch.arange(len(inputs.mask)) % 2 == rank
        try:
            return policy_loss(_part(inputs, chosen, leaf), algorithm, of_rank(rank))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        try:
            return _added_up(list(pool.map(work, range(2))), leaf)
        except threading.BrokenBarrierError as error:
            raise broken(
                "calls the sums over sequences a different number of times on each rank: a real run would hang",
                "call batch.sequences.sum and batch.mean outside of branches that depend on the tokens",
            ) from error


def _same(found: tuple[float, Tensor, Mapping[str, float]], wanted: tuple[float, Tensor], relative: float) -> bool:
    loss, gradient = wanted
    size = max(abs(loss), float(gradient.abs().max()))
    return bool(abs(found[0] - loss) <= relative * size and ((found[1] - gradient).abs() <= relative * size).all())


# The advantage, the filter


def check_advantage(function: str, group_size: int = 8) -> list[str]:
    """Try an advantage on groups of mixed, of equal and of other rewards."""
    mixed = [float(i % 2) for i in range(group_size)]
    rewards = [*mixed, *([1.0] * group_size), *([0.0] * group_size), *(0.1 * i - 0.3 for i in range(group_size))]
    groups = np.repeat(np.arange(4), group_size)
    grouped = _with_turns(group_rewards(rewards, groups, np.arange(len(rewards))))
    before = grouped.rewards.copy()
    found, repeated = (_of_first_turns(grouped, function) for _ in range(2))
    if not np.array_equal(grouped.rewards, before):
        raise ConfigError("algorithm.advantage", function, "changes its input rewards",
                          "copy them before changing them")  # fmt: skip
    if not np.array_equal(found, repeated):
        raise ConfigError("algorithm.advantage", function, "returns different advantages for the same rewards",
                          "remove random numbers and state")  # fmt: skip
    by_group = found.reshape(4, group_size)
    return [
        f"4 groups of {group_size}: {found.min():.4g} to {found.max():.4g}, all finite, the same when called again",
        f"rewards {_listed(mixed)}: advantages {_listed(by_group[0].tolist())}",
        f"rewards all 1: advantages {_listed(by_group[1].tolist())}",
    ]


def _with_turns(grouped: GroupRewards) -> GroupRewards:
    """The same rollouts with two turns each, whose steps have a tenth of the rollout's reward."""
    rollouts = np.arange(len(grouped.rewards))
    turns = TurnRewards(np.repeat(rollouts, 2), np.tile([0, 1], len(rollouts)), np.repeat(grouped.rewards / 10, 2))
    return replace(grouped, turns=turns)


def _of_first_turns(grouped: GroupRewards, function: str) -> NDArray[np.float64]:
    """[R] the function's advantage of each rollout, or of its first turn."""
    found = function_advantages(grouped, function)
    return np.asarray(found.values[::2], np.float64) if isinstance(found, TurnAdvantages) else found


def _listed(numbers: list[float]) -> str:
    shown = ", ".join(f"{number:.3g}" for number in numbers[:4])
    return f"{shown}{', ...' if len(numbers) > 4 else ''}"


def check_filter(function: str, prompt: Prompt | None = None, group_size: int = 8) -> list[str]:
    """Try a filter on groups of mixed and of equal rewards to a prompt."""
    prompt = prompt or Prompt([1, 2, 3], "1", {}, "made_up:1")
    _, keep = load_filter(function)
    assert keep is not None, "a function"
    kinds = {
        "mixed rewards": [float(i % 2) for i in range(group_size)],
        "all 1": [1.0] * group_size,
        "all 0": [0.0] * group_size,
    }
    kept = {name: keep(_group(prompt, rewards)) for name, rewards in kinds.items()}
    if not any(kept.values()):
        raise ConfigError("rollout.dynamic_filter", function, f"drops all of: {', '.join(kept)}",
                          "keep some groups: a step waits until enough groups are kept")  # fmt: skip
    return [f"{name}: {'kept' if verdict else 'dropped'}" for name, verdict in kept.items()]


def _group(prompt: Prompt, rewards: list[float]) -> Group:
    """A complete group with these rewards."""
    group = new_group(0, prompt, len(rewards))
    for sample, reward in zip(group.samples, rewards, strict=True):
        sample.response = "made up"
        sample.extend([1, 2, 3], log_probs=[-1.0, -1.0, -1.0], versions=[(0, 0, 3)], engine="made up")
        sample.reward = reward
    return group


# Prompts, the hook


def check_source(function: str, data: DataConfig, tokenizer: Tokenizer, seed: int = 0, count: int = 16) -> list[str]:
    """Try a source of prompts: its items, and whether it continues at the same place after a resume."""
    first = UserSource(function, data, tokenizer, seed)
    for _ in range(count):
        first.next()
    state = json.loads(json.dumps(first.state_dict()))
    second = UserSource(function, data, tokenizer, seed)
    second.load_state_dict(state)
    if second.state_dict() != state:
        raise ConfigError("data.source", function, "returns another state_dict after load_state_dict",
                          "restore the full state in load_state_dict")  # fmt: skip
    for number in range(count):
        here, there = first.next(), second.next()
        if (here.tokens, here.label, here.metadata) != (there.tokens, there.label, there.metadata):
            raise ConfigError(
                "data.source", function,
                f"draws another prompt after a resume: number {count + number} was {here.text[:60]!r} and became "
                f"{there.text[:60]!r}", "count the position before the yield, and derive each item from seed and "
                "position",
            )  # fmt: skip
    return [
        f"{2 * count} prompts drawn, {first.skipped} skipped as too long; a state of {len(json.dumps(state))} bytes",
        f"after {count} prompts, a second object with the first one's state drew the same {count} prompts",
    ]


def check_hook(function: str, metrics: Mapping[str, float] | None = None) -> list[str]:
    """Try a hook after a step, in a directory that is removed afterwards. Its side effects are real."""
    made_up = dict.fromkeys((name for name in METRICS if "{" not in name), 1.0) if metrics is None else metrics
    with tempfile.TemporaryDirectory() as directory:
        returned = call_step_hook(function, StepRecord(1, TrainConfig().num_steps, Path(directory), made_up))
        written = sorted(path.name for path in Path(directory).iterdir())
    names = ", ".join(f"{name} {value:.4g}" for name, value in returned.items()) or "nothing"
    return [f"metrics: {names}", *([f"wrote {', '.join(written)}"] if written else [])]


def check_sample_hook(function: str, prompt: Prompt) -> list[str]:
    """Try a hook for samples, on two synthetic responses to a prompt. Its side effects are real."""
    group = _group(prompt, [0.0, 1.0])
    load_sample_hook(function)(group)
    names = ", ".join(f"{name} {value:.4g}" for name, value in group.samples[-1].scores.items()) or "nothing"
    return [f"returned for one of two responses: {names}"]


# All functions of a run


def try_functions(config: RunConfig, prompt: Prompt, tokenizer: Tokenizer) -> list[TrialResult]:
    """Call every function that the settings name.

    Args:
        prompt: one of the run's, for the functions that see prompts.
    """
    algorithm, size, limits = config.algorithm, config.rollout.group_size, config.rollout.environment_limits
    contracts: dict[str, Callable[[str], list[str]]] = {
        "data.source": lambda f: check_source(f, config.data, tokenizer, config.seed),
        "rollout.function": lambda f: _try_rollout(f, prompt),
        "rollout.environment": lambda f: check_environment(
            f, config.rollout.environment_options, prompt, limit_s=limits.call_s, memory_mib=limits.memory_mib
        ),
        "rollout.dynamic_filter": lambda f: check_filter(f, prompt, size),
        "algorithm.advantage": lambda f: check_advantage(f, size),
        "algorithm.loss": lambda f: check_loss(f, algorithm),
        "algorithm.correction.function": lambda f: check_correction(f, algorithm),
        "hooks.step": check_hook,
        "hooks.sample": lambda f: check_sample_hook(f, prompt),
    }
    tried = [_tried(each.setting, each.function, contracts.get(each.setting)) for each in run_functions(config)]
    rewards = config.reward.graders if config.train.task == "rl" else []
    return tried + [
        _tried(
            "reward.function",
            part.function,
            lambda _, part=part: _try_reward(part, config.reward, prompt, tokenizer, size),
        )
        for part in rewards
        if part.function is not None
    ]


def _try_reward(
    part: RewardPartConfig, reward: RewardConfig, prompt: Prompt, tokenizer: Tokenizer, size: int
) -> list[str]:
    alone = ScoringConfig(
        kind="custom", function=part.function, per=part.per, timeout_s=part.timeout_s, on_error=reward.on_error
    )
    return try_reward_functions(alone, "reward", [prompt], tokenizer, size)


def _tried(setting: str, function: str, contract: Callable[[str], list[str]] | None) -> TrialResult:
    if contract is None:
        return TrialResult(setting, function, ("not tried here: docs/extending.md shows how to test it",))
    try:
        return TrialResult(setting, function, tuple(contract(function)))
    except Exception as error:  # an arbitrary error must not stop the other functions
        return TrialResult(setting, function, (), error)


def _try_rollout(function: str, prompt: Prompt) -> list[str]:
    messages = prompt.messages or prompt.text or "A prompt"
    sample = check_workflow(function, prompt=messages, label=prompt.label, metadata=prompt.metadata, tools=prompt.tools)
    tokens = f"{sample.response_length} tokens, {sample.trainable_tokens} of them trained"
    return [f"one response of {tokens}, by an engine that interrupted it once"]


def try_run(config: RunConfig) -> list[TrialResult]:
    """`try_functions` with the first prompt of a run. Raises UserError if there is none."""
    tokenizer = load_tokenizer(config.model.tokenizer)
    if config.train.task == "sft":
        return try_functions(config, Prompt([1], None, {}, ""), tokenizer)
    return try_functions(config, open_prompts(config.data, config.seed, tokenizer).next(), tokenizer)


def as_table(tried: list[TrialResult]) -> Table:
    """Results as a table for a terminal."""
    table = Table(title="Your functions, called on synthetic input", title_justify="left", title_style="bold")
    for head in ("setting", "function", "found"):
        table.add_column(head, overflow="fold")
    for one in tried:
        found = "\n".join(one.findings) if one.error is None else f"FAILED: {one.error}"
        table.add_row(one.setting, one.function, Text(found, style="" if one.error is None else "red"))
    return table


def failed(tried: list[TrialResult]) -> ConfigError | None:
    """One error for all functions that broke a rule; None if none did."""
    broken = [one for one in tried if one.error is not None]
    if not broken:
        return None
    names = ", ".join(one.function for one in broken)
    return ConfigError(
        broken[0].setting, names, f"{len(broken)} of {len(tried)} functions violate their contract",
        "see the table above, and docs/extending.md",
    )  # fmt: skip
