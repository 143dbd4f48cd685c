"""The tracker holds every group in one place and every token in the ledger once, whatever the order of events."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.config.errors import ConfigError
from mslime.config.loader import build
from mslime.config.schema import RunConfig
from mslime.data.sample import Group, Sample, SampleStatus, check_invariants
from mslime.data.source import Prompt
from mslime.rollout.group_tracker import SubmitGate, trainable
from mslime.rollout.step_metrics import batch_metrics
from tests.fixtures.one_tracker import OneTracker
from tests.fixtures.supports import supports_of
from tests.unit.rollout_fakes import run_config


def config_of(**rollout: Any) -> RunConfig:
    return build({
        "model": {"path": "m"}, "data": {"prompts": ["p.jsonl"]},
        "rollout": {"groups_per_step": 2, "group_size": 2, "over_sampling": 2.0, **rollout},
    })  # fmt: skip


ENDS = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.ABORTED, SampleStatus.COMPLETED)


@dataclass
class Life:
    """A run's tracker, with a count of tokens beside them that knows no ledger."""

    config: RunConfig
    tracker: OneTracker
    generated: int = 0
    trained: dict[int, int] = field(default_factory=dict[int, int])
    step: int = 0
    taken: list[Group] = field(default_factory=list[Group])

    def begin(self, _: int) -> None:
        if self.tracker.room() and self.tracker.resume() is None:
            n = self.tracker.next_group_id
            self.tracker.begin(Prompt([1, 2], str(n), {}, f"p:{n}"))

    def grow(self, n: int) -> None:
        for sample in (s for g in self.tracker.running.values() for s in g.samples):
            if not sample.status.finished:
                sample.extend(
                    [7] * n, log_probs=[-1.0] * n, engine="e",
                    versions=[(self.tracker.version, 0, n)] if n else [],
                )  # fmt: skip
                sample.status = ENDS[(n // (1 + sample.index)) % len(ENDS)]
                self.generated += n
                self.tracker.generated(sample, n)

    def end(self, n: int) -> None:
        for group in list(self.tracker.running.values()):
            if not group.finished:
                (self.tracker.interrupted if n % 2 else self.tracker.put_back)(group)
                continue
            for sample in group.samples:
                sample.reward = float((n + sample.index * group.group_id) % 3)
                if n % 9 == sample.index:
                    sample.status = SampleStatus.FAILED
            self.tracker.complete(group)

    def fail(self, n: int) -> None:
        for group in list(self.tracker.running.values())[: n % 3]:
            if not self.tracker.count_failure(group, "told to fail"):
                self.tracker.put_back(group)

    def take(self, _: int) -> None:
        if len(self.tracker.accepted) >= self.config.rollout.groups_per_step and not self.taken:
            self.taken, _metrics = self.tracker.take(self.step)
            for group in self.taken:
                assert group.group_id not in self.trained, "a group was trained twice"
                self.trained[group.group_id] = trainable([group])

    def give_back(self, n: int) -> None:
        if self.taken:
            for group in self.taken:
                del self.trained[group.group_id]
            self.tracker.give_back(self.taken[: n % 3])
            self.taken = []

    def publish(self, _: int) -> None:
        if self.taken:
            self.taken, self.step = [], self.step + 1
            self.tracker.published(self.step)

    def restore(self, n: int) -> None:
        """A new process: what was taken and not trained comes back."""
        header, columns = (
            self.tracker.outline() if n % 4 == 0 and not self.taken else self.tracker.state_dict(self.step)
        )
        self.tracker = OneTracker(self.config)
        self.tracker.load_state_dict(json.loads(json.dumps(header)), columns)
        self.tracker.open_gate()
        for group in self.taken:
            del self.trained[group.group_id]
        self.taken = []

    def check(self) -> None:
        tracker, held = self.tracker, self.tracker.held()
        ids = [g.group_id for g in [*held, *self.taken]]
        assert len(ids) == len(set(ids)), "a group is in two places"
        assert not set(ids) & (set(self.trained) - {g.group_id for g in self.taken}), "a trained group is held"
        assert tracker.ledger.generated == self.generated
        assert tracker.ledger.pending == trainable(held)
        assert tracker.ledger.trained == sum(self.trained.values())
        for sample in (s for g in held for s in g.samples):
            check_invariants(sample)


OFTEN = ("begin", "begin", "grow", "grow", "end", "take", "publish")
SELDOM = ("fail", "give_back", "restore")
SETTINGS = st.fixed_dictionaries({
    "max_staleness": st.integers(0, 2),
    "on_stale": st.sampled_from(["keep", "mask", "reroll", "drop"]),
    "partial": st.booleans(),
    "mask_truncated": st.booleans(),
    "dynamic_filter": st.sampled_from(["none", "zero_variance"]),
})  # fmt: skip


def live(rollout: dict[str, Any], seed: int) -> Life:
    """GroupTracker after 150 events, checked after each."""
    config, chance = config_of(**rollout), random.Random(seed)
    life = Life(config, OneTracker(config))
    for _ in range(150):
        name = chance.choice(SELDOM if chance.random() < 0.15 else OFTEN)
        getattr(life, name)(chance.randrange(60))
        life.check()
    return life


@settings(max_examples=60, deadline=None)
@given(SETTINGS, st.integers(0, 2**32))
@pytest.mark.slow
def test_every_token_is_in_the_ledger_once_through_any_order_of_events(rollout: dict[str, Any], seed: int) -> None:
    live(rollout, seed)


def test_the_orders_of_events_that_are_tried_do_all_that_can_be_done() -> None:
    done: set[str] = set()
    steps = 0
    for seed in range(12):
        stale = ("mask", "reroll", "drop", "mask")[seed % 4]
        life = live({"on_stale": stale, "partial": seed % 3 > 0, "mask_truncated": seed % 2 > 0,
                     "dynamic_filter": "zero_variance"}, seed)  # fmt: skip
        steps += life.step
        done |= {*life.tracker.counters.total, *life.tracker.ledger.dropped, *life.tracker.ledger.masked}
    assert done >= {
        "recycled", "filtered_groups", "failed_groups", "truncated_groups", "stale_groups", "reward", "zero_variance",
        "failed", "aborted", "stale", "truncated", "lost",
    }, sorted(done)  # fmt: skip
    assert steps > 5, "steps were trained"


def test_a_group_that_no_step_trains_on_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mslime.rollout.group_tracker")
    reasons = set[str]()
    for seed in range(12):
        caplog.clear()
        stale = ("mask", "reroll", "drop")[seed % 3]
        life = live({"on_stale": stale, "mask_truncated": seed % 2 > 0, "dynamic_filter": "zero_variance"}, seed)
        lines = [r.getMessage() for r in caplog.records if r.name == "mslime.rollout.group_tracker"]
        dropped = [json.loads(line.partition("group dropped: ")[2]) for line in lines]
        places = [*(row["group"] for row in dropped), *(g.group_id for g in life.tracker.held()), *life.trained]
        assert sorted(places) == list(range(life.tracker.next_group_id)), "each in one place"
        assert all(row["source"] == f"p:{row['group']}" for row in dropped)
        assert all(row["cause"] for row in dropped if row["reason"] == "failed")
        reasons |= {row["reason"] for row in dropped}
    assert reasons >= {"reward", "zero_variance", "failed", "stale", "truncated"}


def test_the_oldest_tokens_are_continued_first(tmp_path: Path) -> None:
    tracker = OneTracker(run_config(tmp_path, max_staleness=3))
    groups = [tracker.begin(Prompt([1], "", {}, "p:1")) for _ in range(3)]
    for group, version in zip(groups, (None, 4, 2), strict=True):
        if version is not None:
            group.samples[0].extend([5], log_probs=[-1.0], versions=[(version, 0, 1)], engine="e")
            tracker.generated(group.samples[0], 1)
        tracker.put_back(group)
    assert [g.group_id for g in iter(tracker.resume, None)] == [2, 1, 0]


def test_groups_are_continued_without_looking_at_each_for_every_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All groups rest at a weight update, and all engines wait until they are continued."""
    looked = list[int]()
    oldest = Group.oldest_version.fget
    assert oldest is not None
    monkeypatch.setattr(Group, "oldest_version", property(lambda g: looked.append(g.group_id) or oldest(g)))
    tracker = OneTracker(run_config(tmp_path))
    for group in [tracker.begin(Prompt([1], "", {}, "p:1")) for _ in range(100)]:
        tracker.put_back(group)
    assert len(list(iter(tracker.resume, None))) == 100 and len(looked) == 100 and not tracker._urgency


def test_a_filter_that_fails_leaves_the_group_running(tmp_path: Path) -> None:
    tracker = OneTracker(run_config(tmp_path, dynamic_filter="tests.unit.user_rewards:confused"))
    group = tracker.begin(Prompt([1], "", {}, "p:1"))
    for sample in group.samples:
        sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    with pytest.raises(ConfigError, match="dynamic_filter"):
        tracker.complete(group)
    assert list(tracker.running.values()) == [group]


def test_groups_and_ledger_that_disagree_are_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    tracker = OneTracker(config)
    group = tracker.begin(Prompt([1], "", {}, "p:1"))
    group.samples[0].extend([5], log_probs=[-1.0], versions=[(0, 0, 1)], engine="e")
    with pytest.raises(ValueError, match="0 tokens are pending in the tracker, 1 are held"):
        OneTracker(config).load_state_dict(*tracker.state_dict())


# ------------------------------------------------------------------------------------------------------------- the gate


def room_of(gate: SubmitGate, accepted: int, running: int, version: int) -> int:
    """Groups that may be begun beside those that are accepted or running."""
    return max(0, gate.limit(version) - accepted - running)


@pytest.mark.parametrize(
    ("staleness", "spare", "version", "accepted", "running", "room"),
    [
        (0, 0, 0, 0, 0, 8),
        (0, 0, 0, 3, 5, 0),
        (0, 4, 0, 0, 8, 4),
        (0, 0, 2, 16, 0, 8),
        (1, 0, 0, 8, 0, 8),
        (1, 0, 0, 8, 8, 0),
        (3, 0, 5, 40, 10, 22),
        (0, 0, 0, 12, 0, 0),
        (0, 1, 0, 0, 0, 9),
    ],
)
def test_room_is_what_the_formula_says(staleness, spare, version, accepted, running, room):
    assert room_of(SubmitGate(8, staleness, spare), accepted, running, version) == room


@pytest.mark.parametrize(
    ("rollout", "spare"),
    [
        ({"over_sampling": 1.5}, 4),
        ({"over_sampling": 1.5, "max_staleness": 1}, 0),
        ({"over_sampling": 1.5, "max_staleness": 2, "dynamic_filter": "zero_variance"}, 4),
        ({"over_sampling": 1.2}, 1),
    ],
)
def test_spare_groups_are_begun_only_where_a_group_can_be_refused_or_left_for_later(tmp_path, rollout, spare):
    assert run_config(tmp_path, groups_per_step=8, **rollout).rollout.spare_groups == spare


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 2**32))
def test_without_stragglers_nothing_trained_is_older_than_the_bound(per_step: int, staleness: int, seed: int):
    """Groups end in the order in which they began; the trainer takes as late as it likes. No age test is needed."""
    gate, chance = SubmitGate(per_step, staleness), random.Random(seed)
    version, running, accepted, taken = 0, [], [], 0
    for _ in range(300):
        running += [version] * room_of(gate, taken + len(accepted), len(running), version)
        for _ in range(chance.randint(0, len(running))):
            accepted.append(running.pop(0))
        if len(accepted) >= per_step and chance.random() < 0.5:
            ages = [version - begun for begun in accepted[:per_step]]
            assert min(ages) >= 0 and max(ages) <= staleness
            accepted, taken, version = accepted[per_step:], taken + per_step, version + 1
    assert version > 10, "the gate always leaves enough room for the next step"


# ------------------------------------------------------------------------------------------------ the numbers of a step


def sample(index: int, reward: float, tokens: int, rollout_id: int | None = None) -> Sample:
    made = Sample.from_prompt(0, index, [1, 2])
    made.extend([3] * tokens, log_probs=[-1.0] * tokens, versions=[(1, 0, tokens)], engine="e")
    made.reward, made.rollout_id = reward, rollout_id
    return made


def test_a_rollout_of_several_samples_has_one_vote_in_the_reward_and_each_of_them_in_the_lengths() -> None:
    fan_out = [sample(i, 1.0, 4, rollout_id=9) for i in range(3)]
    alone = sample(9, 0.0, 12)  # its index is not the rollout id of the others
    metrics = batch_metrics([Group(0, [*fan_out, alone])], 2)
    assert metrics["reward/mean"] == metrics["reward/std"] == 0.5
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["rollout/responses"] == 4 and metrics["rollout/response_len_mean"] == pytest.approx(6.0)
    assert metrics["staleness/mean"] == 1.0 and metrics["reward/zero_variance_groups"] == 0


def test_rollouts_of_different_groups_are_different() -> None:
    groups = [Group(g, [sample(0, float(g), 1)]) for g in range(2)]
    for group in groups:
        group.samples[0].group_id = group.group_id
    assert batch_metrics(groups, 1)["reward/mean"] == 0.5


def test_sizes_of_supports_count_tokens_that_have_one() -> None:
    drawn = Sample.from_prompt(0, 0, [1, 2])
    drawn.extend([3, 4], log_probs=[-1.0, -1.0], versions=[(0, 0, 2)], supports=supports_of([[3, 5, 6], [4]]))
    free = sample(1, 0.0, 4)
    drawn.reward = 1.0
    metrics = batch_metrics([Group(0, [drawn, free])], 0)
    assert (metrics["rollout/support_tokens"], metrics["rollout/support_mean"]) == (2, 2)
    assert metrics["rollout/support_max"] == 3
    drawn.mask_span(2, 3)
    assert batch_metrics([Group(0, [drawn, free])], 0)["rollout/support_max"] == 1, "of tokens that are trained"
    assert not any(name.startswith("rollout/support") for name in batch_metrics([Group(0, [free])], 0))
