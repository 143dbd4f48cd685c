"""Several managers' trackerss joined say what one manager's would of the same groups, event by event."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from mslime.config.loader import build
from mslime.config.schema import RunConfig
from mslime.data.ledger import Ledger
from mslime.data.sample import Group, SampleStatus
from mslime.data.source import Prompt
from mslime.rollout.group_tracker import (
    GroupTracker,
    JoinedTrackers,
    continued,
    dealt,
    due,
    new_group,
    trainable,
)
from tests.fixtures.columns import InMemory
from tests.fixtures.one_tracker import OneTracker

SIZE = 2


def config_of(**rollout: Any) -> RunConfig:
    return build({
        "model": {"path": "m"}, "data": {"prompts": ["p.jsonl"]},
        "rollout": {"groups_per_step": 3, "group_size": SIZE, "over_sampling": 1.5, **rollout},
    })  # fmt: skip


def generate(tracker: GroupTracker, group: Group, tokens: int, status: SampleStatus, reward: float) -> None:
    """All unfinished samples of a running group grow and end so."""
    for sample in group.samples:
        if not sample.status.finished:
            spans = [(tracker.version, 0, tokens)] if tokens else []
            sample.extend([7] * tokens, log_probs=[-1.0] * tokens, engine="e", versions=spans)
            sample.status, sample.reward = status, reward + sample.index
            tracker.generated(sample, tokens)


def written(state: tuple[dict[str, Any], Any]) -> tuple[dict[str, Any], Any]:
    """As it comes back from a file. The order of groups is of no meaning."""
    return json.loads(json.dumps(state[0])), copy.deepcopy(state[1])


def ids_in(state: Mapping[str, Any]) -> list[list[int]]:
    """Of the accepted groups of a state, of those that rest, and of those that begin anew."""
    ids, accepted = [header["group_id"] for header in state["groups"]], state["accepted"]
    return [sorted(ids[:accepted]), sorted(ids[accepted:]), sorted(h["group_id"] for h in state.get("begun", []))]


class Pair:
    """One manager's tracker and those of several, to which the same happens."""

    def __init__(self, config: RunConfig, managers: int) -> None:
        self.config = config
        self.one, self.step, self.prompts = OneTracker(config), 0, 0
        self._begin_joined(managers)
        self._open()

    def _begin_joined(self, managers: int) -> None:
        self.parts = [GroupTracker(self.config.rollout, self.config.on_stale) for _ in range(managers)]
        self.joined = JoinedTrackers(self.config.rollout, managers)

    def _open(self) -> None:
        self.one.open_gate()
        self._allow()

    def _allow(self) -> None:
        allowed = self.joined.allow([part.ready for part in self.parts], [1] * len(self.parts))
        for part, allowance in zip(self.parts, allowed, strict=True):
            part.allowance = allowance

    def begin(self, chance: int) -> None:
        """A group begins at the first manager that has room, and in the one tracker."""
        assert self.one.room() == sum(p.room() for p in self.parts), "the allowances are what one gate allows"
        part = next((p for p in self._turned(chance) if p.room()), None)
        if part is None:
            return
        if (group := part.resume()) is not None:  # the one tracker may be about to continue another one
            mine = next(g for g in self.one.partial if g.group_id == group.group_id)
            self.one.partial.remove(mine)
            self.one.running[group.group_id] = mine
            self.one.counters.add("recycled", 0)
            return
        prompt = Prompt([1, 2], "x", {}, f"p:{self.prompts}")
        self.one.next_group_id = self.prompts
        self.one.begin(prompt)
        part.add(new_group(self.prompts, prompt, SIZE))
        resumed = part.resume()
        assert resumed is not None and resumed.group_id == self.prompts
        self.prompts += 1
        self.joined.next_group_id = self.prompts

    def end(self, chance: int) -> None:
        """A running group grows and is complete."""
        running = sorted(self.one.running)
        if running:
            self._end(running[chance % len(running)], 1 + chance % 5, chance)

    def _end(self, group_id: int, tokens: int, chance: int) -> None:
        part = next(p for p in self.parts if group_id in p.running)
        for tracker in (self.one, part):
            group = tracker.running[group_id]
            status = SampleStatus.TRUNCATED if chance % 7 == 0 else SampleStatus.COMPLETED
            generate(tracker, group, tokens, status, 0.0)
            if chance % 4 == 1:
                group.samples[-1].status = SampleStatus.FAILED
            tracker.complete(group)

    def take(self, chance: int) -> None:
        """A step, if there are enough groups; it may be given back with the first group blamed."""
        if len(self.one.accepted) < self.config.rollout.groups_per_step:
            return
        (groups, said), (ours, metrics) = self.one.take(self.step), self._take_joined()
        assert [g.group_id for g in groups] == [g.group_id for g in ours]
        assert metrics == {**dict.fromkeys(metrics, 0.0), **said}
        self.check_state(self.step)
        self.check_state(self.step + 1)
        if chance % 3 == 0:
            self._give_back(groups[: min(chance % 2, len(groups))])
            return
        self.step += 1
        self.joined.version = self.step
        for tracker in (self.one, *self.parts):
            tracker.published(self.step)
        self._allow()

    def _take_joined(self) -> tuple[list[Group], dict[str, float]]:
        self.chosen = self.joined.choose([due(g) for g in part.accepted] for part in self.parts)
        groups: list[Group] = []
        metrics = Counter[str]()
        for part, ids in zip(self.parts, self.chosen, strict=True):
            taken, counts = part.take(self.step, ids)
            groups += taken
            metrics.update({name: value for name, value in counts.items() if not name.startswith("ledger/")})
        alive = sum(trainable(part.held()) for part in self.parts)
        booked = self.joined.taken([part.ledger for part in self.parts], alive)
        return sorted(groups, key=lambda g: g.group_id), {**metrics, **booked}

    def _give_back(self, blamed: list[Group]) -> None:
        ids = {g.group_id for g in blamed}
        answers = [part.give_back([g for g in part.taken if g.group_id in ids]) for part in self.parts]
        self.joined.given_back()
        assert self.one.give_back(blamed) == any(answers)

    def resume(self, chance: int) -> None:
        """Everything goes on from the joined state, with another number of managers."""
        state = written(self.joined.state([part.kept(self.step) for part in self.parts]))
        if chance % 4 == 0:
            state = written(self.joined.state([part.begun() for part in self.parts]))
        header, columns = state
        self.one, whole = OneTracker(self.config), continued(header, InMemory(columns), has_teacher=False)
        self.one.load_state_dict(*state)
        self._begin_joined(1 + chance % 4)
        self.joined.continue_from(whole)
        for groups, accepted in ((whole.accepted, True), (whole.resting, False)):
            for group in groups:
                self.parts[group.group_id % len(self.parts)].add(copy.deepcopy(group), accepted)
        for part in self.parts:
            part.version = self.joined.version
        self._open()

    def check(self) -> None:
        """The trackers agree on everything that a metric says."""
        assert self._ledger().state_dict() == self.one.ledger.state_dict()
        held = [g.group_id for part in self.parts for g in part.held()]
        assert sorted(held) == sorted(g.group_id for g in self.one.held())

    def check_state(self, next_step: int) -> None:
        """The files of the two hold the same."""
        pairs = (
            (self.joined.state([part.kept(next_step) for part in self.parts]), self.one.state_dict(next_step)),
            (self.joined.state([part.begun() for part in self.parts]), self.one.outline()),
        )
        for (ours, _), (theirs, _) in pairs:
            assert ours["ledger"] == theirs["ledger"]
            assert +Counter(ours["counters"]) == +Counter(theirs["counters"])
            assert ids_in(ours) == ids_in(theirs)

    def _ledger(self) -> Ledger:
        return self.joined.ledger([part.ledger for part in self.parts])

    def _turned(self, by: int) -> list[GroupTracker]:
        at = by % len(self.parts)
        return [*self.parts[at:], *self.parts[:at]]


@pytest.mark.parametrize("on_stale", ["keep", "mask", "reroll", "drop"])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_joined_trackers_are_those_of_one_manager(staleness: int, on_stale: str) -> None:
    steps = resumes = 0
    for seed in range(12):
        chance = random.Random(seed)
        pair = Pair(config_of(max_staleness=staleness, on_stale=on_stale), managers=1 + seed % 4)
        for _ in range(120):
            name = chance.choice(["begin"] * 6 + ["end"] * 4 + ["take"] * 2 + ["resume"] * (resumes < 30))
            getattr(pair, name)(chance.randrange(60))
            resumes += name == "resume"
            pair.check()
        steps += pair.step
    assert steps > 12 and resumes > 12


@pytest.mark.parametrize(("groups", "unfinished", "engines", "given"), [
    (8, [0, 0], [4, 4], [4, 4]), (8, [0, 0], [4, 2], [5, 3]), (8, [4, 0], [4, 4], [2, 6]), (8, [-6, 0], [4, 4], [7, 1]),
    (5, [0, 0, 0], [2, 0, 2], [3, 0, 2]), (0, [1, 1], [1, 1], [0, 0]),
])  # fmt: skip
def test_new_groups_go_where_the_fewest_wait_for_each_engine(
    groups: int, unfinished: list[int], engines: list[int], given: list[int]
) -> None:
    assert dealt(groups, unfinished, engines) == given


def test_managers_without_engines_are_allowed_groups_whose_requests_tell_of_it() -> None:
    joined = JoinedTrackers(config_of(max_staleness=1).rollout, 2)
    assert sum(joined.allow([0, 0], [0, 0])) == 6
