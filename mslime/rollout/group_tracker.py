"""Location of every group of the rollout service, and the fate of every token: for one manager, for several, and in a
state.

A group is in exactly one place: `running` (generated or scored), `partial` (interrupted, to be continued), `accepted`
(complete, waiting for the trainer), or taken (with the trainer until its step is published). The submit gate bounds the
age of groups at their start. Responses that take longer than this bound still contain older tokens: those are kept,
masked, generated again or dropped, according to `rollout.on_stale`. Every token is in the ledger.

Nothing here waits: there is no asyncio, no engine and no clock, so a test can try any order of events.
"""

from __future__ import annotations

import bisect
import copy
import heapq
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mslime.config.rollout import OnStale, RolloutConfig
from mslime.data.ledger import Ledger
from mslime.data.sample import Group, Sample, SampleStatus, check_invariants
from mslime.data.source import Prompt
from mslime.rollout.filters import load_filter
from mslime.rollout.returned import TokenCounter
from mslime.rollout.state import NO_GROUPS, Columns, PackedGroups, StoredColumns, check_stored, unpack_groups
from mslime.rollout.step_metrics import StepCounters

State = tuple[dict[str, Any], Columns]


@dataclass(frozen=True)
class TrackerState:
    """State of a tracker, for checkpoints. An outline has only `begun`, ledger and counters.

    Attributes:
        accepted, resting: groups; running groups are saved as resting.
        counters: totals since the start of the run.
        untrained: whether the groups taken last are among the accepted ones, with the ledger as before they were taken.
        begun: groups as they were before anything was generated; the ledger is without pending tokens then.
    """

    accepted: PackedGroups
    resting: PackedGroups
    ledger: Ledger
    counters: dict[str, int]
    untrained: bool = False
    begun: PackedGroups = NO_GROUPS


def state_of(
    parts: Sequence[TrackerState], ledger: Ledger, counters: Mapping[str, int], version: int, next_group_id: int
) -> State:
    """(JSON-able header, columns) from which a tracker continues: without losing a token, or from outlines.

    Args:
        parts: of all managers. ledger, counters: of the run.
    """
    accepted, _ = PackedGroups.joined([part.accepted for part in parts])
    groups, columns = PackedGroups.joined([*(part.accepted for part in parts), *(part.resting for part in parts)])
    begun, prompts = PackedGroups.joined([part.begun for part in parts])
    header = {
        "accepted": len(accepted), "groups": groups, "version": version, "next_group_id": next_group_id,
        "ledger": ledger.state_dict(), "counters": dict(counters),
    }  # fmt: skip
    return (header | {"begun": begun}, prompts) if begun else (header, columns)


@dataclass(frozen=True)
class Continued:
    """Contents of a file of `state_of`.

    Attributes:
        accepted, resting: groups. counters: totals since the start of the run.
    """

    accepted: list[Group]
    resting: list[Group]
    ledger: Ledger
    counters: dict[str, int]
    version: int
    next_group_id: int


def continued(header: Mapping[str, Any], columns: StoredColumns, *, has_teacher: bool) -> Continued:
    """Read a state back.

    Args:
        has_teacher: a served teacher scores responses, so groups from a run without one are incomplete.

    Raises:
        ValueError: the groups and the ledger do not agree.
    """
    groups = unpack_groups(header["groups"], columns)
    accepted, resting = groups[: header["accepted"]], groups[header["accepted"] :]
    check_stored(groups)
    resting += begun_anew(header.get("begun", []), columns)
    if has_teacher:
        whole = [g for g in accepted if all(sample.teacher_log_probs is not None for sample in g.samples)]
        resting += [group for group in accepted if group not in whole]
        accepted = whole
    ledger = Ledger.from_state(header["ledger"])
    if (alive := trainable([*accepted, *resting])) != ledger.pending:
        raise ValueError(f"{ledger.pending} tokens are pending in the tracker, {alive} are held")
    numbers = (int(header["version"]), int(header["next_group_id"]))
    return Continued(accepted, resting, ledger, dict(header["counters"]), *numbers)


def begun_anew(headers: Sequence[Mapping[str, Any]], columns: StoredColumns) -> list[Group]:
    """The groups of `PackedGroups.begun`, made again."""
    groups: list[Group] = []
    for h in headers:
        tokens, chat = columns.cut("prompts", h["prompt"]).tolist(), h.get("chat") or {}
        prompt = Prompt(
            tokens, h["label"], dict(h["metadata"]), h["source"], "", chat.get("messages"), chat.get("tools")
        )
        groups.append(new_group(int(h["group_id"]), prompt, int(h["size"])))
        groups[-1].failures = int(h["failures"])
    return groups


def trainable(groups: Sequence[Group]) -> int:
    """Tokens of `groups` that may enter the loss."""
    return sum(s.trainable_tokens for g in groups for s in g.samples)


def sound(groups: Sequence[Group], ledger: Ledger) -> list[Group]:
    """Groups that can be saved. A group that breaks an invariant would be refused at every resume, and one with
    values that are not JSON cannot be written. Such groups are recorded as dropped."""
    kept: list[Group] = []
    for group in groups:
        try:
            for sample in group.samples:
                check_invariants(sample)
                json.dumps([sample.label, sample.metadata])
            kept.append(group)
        except (AssertionError, TypeError, ValueError) as error:
            print(f"group {group.group_id} of {group.source} is left out of the checkpoint: {error}", flush=True)
            ledger.drop(trainable([group]), "failed")
    return kept


_log = logging.getLogger(__name__)
COUNTED = ("aborted", "recycled", "filtered_groups", "failed_groups", "failed_rollouts")


@dataclass(frozen=True)
class SubmitGate:
    """Limit of groups in flight. Pure arithmetic.

    With `max_staleness` = s, weights of version v may generate groups for the steps v .. v + s, so groups are submitted
    while `accepted + running < (v + 1 + s) * groups_per_step`. Spare groups make up for groups that a filter
    rejects or, with s = 0, that finish late. If nothing is rejected and s > 0 there are no spares: the last of them
    would belong to step v + s + 1, too old by construction. Counts and versions start when the gate opens.

    Attributes:
        groups_per_step: groups that one training step takes.
        max_staleness: versions that a group may be behind when it is trained.
        spare: groups in flight beyond the steps' demand.
    """

    groups_per_step: int
    max_staleness: int
    spare: int = 0

    @classmethod
    def of(cls, rollout: RolloutConfig) -> SubmitGate:
        """The gate of a run."""
        return cls(rollout.groups_per_step, rollout.max_staleness, rollout.spare_groups)

    def limit(self, version: int) -> int:
        """Groups that may be accepted or running with weights of `version`, counted since the gate opened."""
        return (version + 1 + self.max_staleness) * self.groups_per_step + self.spare


@dataclass(frozen=True)
class _TakenGroups:
    """Groups of a step that the trainer holds until it has trained on them.

    Attributes:
        tokens: number of tokens recorded as trained.
        mark: state of the ledger before that.
    """

    step: int
    groups: list[Group]
    tokens: int
    mark: dict[str, int]


def new_group(group_id: int, prompt: Prompt, size: int) -> Group:
    """`size` rollouts of one prompt, each a fresh sample."""
    samples = [Sample.from_prompt(group_id, i, prompt.tokens, prompt.label) for i in range(size)]
    for sample in samples:
        sample.metadata = copy.deepcopy(prompt.metadata)
    tokens = np.asarray(prompt.tokens, np.int32)
    return Group(
        group_id, samples, prompt.where, metadata=prompt.metadata, prompt=tokens, size=size,
        messages=prompt.messages, tools=prompt.tools,
    )  # fmt: skip


class GroupTracker(TokenCounter):
    """Tracks every group and every token of a run's rollouts.

    Args:
        on_stale: `rollout.on_stale`, resolved.
        counted: names of further counters; their counts per step become metrics.

    Attributes:
        version: weight version that the engines serve and the trainer holds.
        running, partial, accepted: see the module. The last of `partial` is the most urgent.
        ledger: the fate of every generated token.
        counters: counts of events of groups and responses.
        allowance: groups that may be taken, accepted or running since the gate opened (`JoinedTrackers.allow`).
        on_discard: called with (group, number) of every discarded rollout.
    """

    def __init__(self, rollout: RolloutConfig, on_stale: OnStale, counted: tuple[str, ...] = ()) -> None:
        self._rollout, self._on_stale = rollout, on_stale
        self._filter_name, self._keep = load_filter(rollout.dynamic_filter)
        self._counted = (*COUNTED, *(("truncated_groups",) if rollout.mask_truncated else ()))
        self._counted += counted
        self.version = self.allowance = 0
        self.running, self.partial, self.accepted = dict[int, Group](), list[Group](), list[Group]()
        self.ledger, self.counters = Ledger(), StepCounters()
        self.on_discard: Callable[[int, int], None] = lambda group, number: None
        self._urgency = dict[int, tuple[int, int, int]]()  # of groups when they were interrupted
        self._taken_count = 0
        self._taken: _TakenGroups | None = None

    # ------------------------------------------------------------------------------------------- begun and ended

    def room(self) -> int:
        """Groups that may be begun or continued now."""
        return max(0, self.allowance - self.ready - len(self.running))

    @property
    def ready(self) -> int:
        """Groups accepted now, or taken since the gate opened."""
        return self._taken_count + len(self.accepted)

    def add(self, group: Group, accepted: bool = False) -> None:
        """Add a group with its own prompt, id and tokens. It rests until the gate has room, or waits for the trainer if
        `accepted`."""
        self.ledger.generate(trainable([group]))
        if accepted:
            self.accepted.append(group)
        else:
            self._rest(group)

    def resume(self) -> Group | None:
        """Move the most urgent interrupted group that may still be trained to `running` and return it; None if there is
        none."""
        while self.partial:
            group = self.partial.pop()
            del self._urgency[group.group_id]
            if self._on_stale in ("keep", "mask") or self._refresh(group):
                unfinished = sum(not s.status.finished and s.response_length > 0 for s in group.samples)
                self.counters.add("recycled", unfinished)
                return self._run(group)
        return None

    def generated(self, sample: Sample, tokens: int) -> None:
        self.ledger.generate(tokens)
        self.counters.add("aborted", sample.status is SampleStatus.ABORTED)

    def dropped(self, tokens: int, reason: str) -> None:
        self.ledger.drop(tokens, reason)

    def masked(self, tokens: int, reason: str) -> None:
        self.ledger.mask(tokens, reason)

    def put_back(self, group: Group) -> None:
        """A running group rests unchanged until it is continued."""
        self._rest(self.running.pop(group.group_id))

    def interrupted(self, group: Group) -> None:
        """A running group is interrupted and rests; without partial rollouts it restarts from its prompt."""
        if not self._rollout.partial:
            self.restart(group, group.numbers, "aborted")
        self.put_back(group)

    def complete(self, group: Group) -> None:
        """A running group is generated and scored: accept it or drop it.

        Raises:
            UserError: the dynamic filter failed; the group still counts as running.
        """
        failed = [s for s in group.samples if s.status is SampleStatus.FAILED]
        for sample in failed:
            self.ledger.drop(sample.trainable_tokens, "reward")
            group.samples.remove(sample)
        self.counters.add("reward_errors", sum(bool(s.error) for s in [*failed, *group.samples]))
        if len(group.numbers) < min(2, self._rollout.group_size):
            del self.running[group.group_id]
            self._drop(group, "reward")
            return
        kept = self._keep is None or self._keep(group)
        del self.running[group.group_id]
        if kept:
            if self._finished_in_time(group) and self.passes_age_test(group):
                self.accepted.append(group)
        else:
            self.counters.add("filtered_groups")
            self._drop(group, self._filter_name)

    def count_failure(self, group: Group, reason: str) -> bool:
        """Count a failure that the group itself caused. At the second one, drop the group and return True, so a run and
        its resumes do not fail at the same group repeatedly."""
        group.failures += 1
        if group.failures < 2:
            return False
        self.running.pop(group.group_id, None)
        self._drop(group, "failed", reason)
        self.counters.add("failed_groups")
        return True

    def _run(self, group: Group) -> Group:
        assert group.group_id not in self.running, f"group {group.group_id} is running already"
        self.running[group.group_id] = group
        return group

    def _rest(self, group: Group) -> None:
        assert all(g.group_id != group.group_id for g in self.partial), f"group {group.group_id} is already here"
        self._urgency[group.group_id] = _urgency(group)
        bisect.insort(self.partial, group, key=lambda g: self._urgency[g.group_id])

    def _finished_in_time(self, group: Group) -> bool:
        """Mask truncated responses if `rollout.mask_truncated` is set; returns whether any tokens are left to train."""
        if self._rollout.mask_truncated:
            cut = [s for s in group.samples if s.status is SampleStatus.TRUNCATED]
            self.ledger.mask(sum(s.mask_all() for s in cut), "truncated")
            if len(cut) == len(group.samples):
                self.counters.add("truncated_groups")
                self._log_dropped(group, "truncated")
                return False
        return True

    def restart(self, group: Group, numbers: Sequence[int], reason: str) -> None:
        """Drop the generated tokens of rollouts, which begin again from their prompt."""
        for number in numbers:
            self.ledger.drop(group.restart_rollout(number), reason)
            self.on_discard(group.group_id, number)

    def _drop(self, group: Group, reason: str, cause: str = "") -> None:
        self.ledger.drop(tokens := trainable([group]), reason)
        self._log_dropped(group, reason, tokens, cause)
        for number in group.numbers:
            self.on_discard(group.group_id, number)

    def _log_dropped(self, group: Group, reason: str, tokens: int = 0, cause: str = "") -> None:
        """Log one line of JSON about a group that no step trains on.

        Args:
            reason: as in `ledger/dropped/{reason}_tokens`, or `truncated` or `stale` if all its tokens are masked.
            tokens: number of dropped tokens of the group.
            cause: of its second failure.
        """
        rewards = [sample.reward for sample in group.samples]
        fields = {"group": group.group_id, "source": group.source, "reason": reason, "cause": cause, "tokens": tokens,
                  "version": self.version, "oldest_version": group.oldest_version, "rewards": rewards}  # fmt: skip
        _log.info("group dropped: %s", json.dumps({k: v for k, v in fields.items() if v not in ("", None)}))

    # ---------------------------------------------------------------------------------------------- the age test

    def published(self, version: int) -> None:
        """The engines serve weights of `version`: groups taken for an older step count as trained, and accepted groups
        pass the age test again."""
        self.version = version
        if self._taken is not None and self._taken.step < version:
            self._taken = None
        self.accepted = [g for g in self.accepted if self.passes_age_test(g)]

    def passes_age_test(self, group: Group) -> bool:
        """Mask, restart or drop tokens of a complete group that are too old; returns whether it is accepted then. A
        restarted group rests."""
        oldest = group.oldest_version
        if self._on_stale != "keep" and oldest is not None and oldest < self._oldest_allowed():
            if self._on_stale != "mask":
                if self._refresh(group):
                    self._rest(group)
                return False
            self.ledger.mask(sum(s.mask_before(self._oldest_allowed()) for s in group.samples))
        if trainable([group]):
            return True
        self.counters.add("stale_groups")  # nothing is left to train; its tokens are in the ledger as masked
        self._log_dropped(group, "stale")
        return False

    def _oldest_allowed(self) -> int:
        return self.version - self._rollout.max_staleness

    def _refresh(self, group: Group) -> bool:
        """Generate the stale rollouts of a group again, or drop the group; returns whether it must still be
        generated."""
        limit = self._oldest_allowed()
        stale = {s.number: None for s in group.samples if (v := s.oldest_version) is not None and v < limit}
        if stale and self._on_stale == "drop":
            self._drop(group, "stale")
            self.counters.add("stale_groups")
            return False
        self.restart(group, list(stale), "stale")
        return True

    # ------------------------------------------------------------------------------------------------- the trainer

    @property
    def taken(self) -> list[Group]:
        """Groups that the trainer holds and has not trained on yet."""
        return [] if self._taken is None else self._taken.groups

    def held(self) -> list[Group]:
        """All groups except taken ones."""
        return [*self.accepted, *self.partial, *self.running.values()]

    def take(self, step: int, ids: Collection[int] | None = None) -> tuple[list[Group], dict[str, float]]:
        """Hand a step's groups to the trainer, those with the oldest tokens first, and close the step's counts.

        Args:
            ids: selects accepted groups; None for the first `groups_per_step`.

        Returns:
            The groups in order of their ids; `ledger/*` and the step's counts of `rollout/*` and `reward/errors`.
        """
        self.accepted.sort(key=due)
        chosen = {g.group_id for g in self.accepted[: self._rollout.groups_per_step]} if ids is None else set(ids)
        groups = sorted((g for g in self.accepted if g.group_id in chosen), key=lambda g: g.group_id)
        for sample in (s for g in groups for s in g.samples):
            check_invariants(sample)
        self.accepted = [g for g in self.accepted if g.group_id not in chosen]
        self._taken_count += len(groups)
        self._taken = _TakenGroups(step, groups, trainable(groups), self.ledger.marked())
        self.ledger.train(self._taken.tokens)
        moved = self.ledger.settle(trainable(self.held()))
        metrics = {f"ledger/{name}": float(value) for name, value in moved.items()}
        metrics |= {f"rollout/{name}": float(self.counters.since_mark(name)) for name in self._counted}
        metrics["reward/errors"] = float(self.counters.since_mark("reward_errors"))
        self.counters.mark()
        return groups, metrics

    def give_back(self, blamed: Sequence[Group] = ()) -> bool:
        """Undo the last `take`: its groups are accepted again and wait for the next one.

        Args:
            blamed: groups that cannot be trained. A blamed group that failed before is dropped.

        Returns:
            Whether all blamed groups were dropped, so another `take` can proceed without them.
        """
        taken, self._taken = self._taken, None
        assert taken is not None, "nothing was taken"
        self.ledger = self.ledger.before_training(taken.tokens, taken.mark)
        self._taken_count -= len(taken.groups)
        dropped = [g for g in blamed if self.count_failure(g, "cannot be trained")]
        self.accepted = [*(g for g in taken.groups if g not in dropped), *self.accepted]
        return bool(blamed) and len(dropped) == len(blamed)

    # ---------------------------------------------------------------------------------------------------- state

    def kept(self, next_step: int | None = None) -> TrackerState:
        """State for a checkpoint.

        Args:
            next_step: first step of a resumed run; its groups are included even if they are taken already.
        """
        taken = self._taken
        ledger, accepted, untrained = self.ledger.copy(), self.accepted, False
        if taken is not None and next_step is not None and taken.step >= next_step:
            ledger = ledger.before_training(taken.tokens, taken.mark)
            accepted, untrained = [*taken.groups, *accepted], True
        accepted = sound(accepted, ledger)
        resting = sound([*self.partial, *self.running.values()], ledger)
        packed = (PackedGroups.of(accepted), PackedGroups.of(resting))
        return TrackerState(*packed, ledger, dict(self.counters.total), untrained)

    def begun(self) -> TrackerState:
        """Outline for a checkpoint."""
        ledger = self.ledger.copy()
        ledger.drop(ledger.pending, "lost")
        groups = PackedGroups.begun(sorted(self.held(), key=lambda g: g.group_id))
        return TrackerState(NO_GROUPS, NO_GROUPS, ledger, dict(self.counters.total), begun=groups)


def due(group: Group) -> tuple[int, int]:
    """Sort key of accepted groups: the order in which they are trained."""
    return group.oldest_version or 0, group.group_id


def _urgency(group: Group) -> tuple[int, int, int]:
    """Sort key of interrupted groups: higher for older tokens, which have the least time left; without tokens
    lowest."""
    oldest = group.oldest_version
    return (0 if oldest is None else 1, -(oldest or 0), -group.group_id)


# The trackers of several managers as one.
#
# Each manager tracks its own groups. This part has the state that exists once per run: the division of the gate, the
# choice of a step's groups, the ledger since the start of the run. It is pure arithmetic over the managers' reports,
# like `GroupTracker`, so a test can compare the two event by event.

Due = tuple[int, int]
"""(training order as in `due`, group id) of an accepted group."""


def dealt(groups: int, unfinished: Sequence[int], engines: Sequence[int]) -> list[int]:
    """Divide `groups` new groups among managers: each next one goes to the manager with the fewest unfinished groups
    per living engine. A manager without engines gets none.

    Args:
        unfinished: groups given to each manager and not finished; below 0 if it holds finished groups that were never
            given to it. engines: living engines of each.
    """
    assert any(engines), "no manager has a living engine"
    queue = [
        (held / alive, index) for index, (held, alive) in enumerate(zip(unfinished, engines, strict=True)) if alive
    ]
    heapq.heapify(queue)
    given = [0] * len(engines)
    for _ in range(groups):
        load, index = queue[0]
        given[index] += 1
        heapq.heapreplace(queue, (load + 1 / engines[index], index))
    return given


class JoinedTrackers:
    """The trackers of several managers as one.

    Attributes:
        version: weight version that all engines serve.
        base_version: when the gate was opened; None before.
        next_group_id: number of groups begun so far.
        allowances: groups that each manager may take, accept and run since the gate opened.
    """

    def __init__(self, rollout: RolloutConfig, managers: int) -> None:
        self._gate, self._groups_per_step = SubmitGate.of(rollout), rollout.groups_per_step
        self.base_version: int | None = None
        self._settled = Ledger()  # tokens whose fate was known before the managers began
        self._counted = Counter[str]()  # counts from before that
        self._mark, self._mark_before = dict[str, int](), dict[str, int]()  # of the last two steps
        self.version = self.next_group_id = 0
        self.allowances = [0] * managers

    # ------------------------------------------------------------------------------------------------------ the gate

    def allow(self, ready: Sequence[int], engines: Sequence[int]) -> list[int]:
        """Divide the increase of the gate's limit among managers; returns `allowances`. The first call opens
        the gate.

        Args:
            ready: of each manager: groups accepted now, or taken since the gate opened.
            engines: number of living engines of each.
        """
        if self.base_version is None:
            self.base_version = self.version
        more = self._gate.limit(self.version - self.base_version) - sum(self.allowances)
        unfinished = [allowed - done for allowed, done in zip(self.allowances, ready, strict=True)]
        # without engines, requests fail with that error
        given = dealt(more, unfinished, engines if any(engines) else [1] * len(engines))
        self.allowances = [allowed + new for allowed, new in zip(self.allowances, given, strict=True)]
        return self.allowances

    # -------------------------------------------------------------------------------------------------------- a step

    def choose(self, accepted: Iterable[Iterable[Due]]) -> list[set[int]]:
        """Choose the ids that a step takes from each manager: as in `GroupTracker.take`, the oldest tokens first, over
        all managers."""
        every = sorted((due, manager) for manager, of_one in enumerate(accepted) for due in of_one)
        chosen = [set[int]() for _ in self.allowances]
        for (_, group_id), manager in every[: self._groups_per_step]:
            chosen[manager].add(group_id)
        return chosen

    def taken(self, ledgers: Sequence[Ledger], alive: int) -> dict[str, float]:
        """Close a step's counts; returns `ledger/*`.

        Args:
            ledgers: of all managers, after they have handed over the step's groups.
            alive: trainable tokens in all groups that they still hold.
        """
        ledger = self.ledger(ledgers)
        moved = ledger.settle(alive)
        self._mark_before, self._mark = self._mark, ledger.marked()
        return {f"ledger/{name}": float(value) for name, value in moved.items()}

    def given_back(self) -> None:
        """Undo `taken`, after the managers have taken back their groups."""
        self._mark = self._mark_before

    def ledger(self, ledgers: Sequence[Ledger]) -> Ledger:
        """The fate of every token of the run, from the ledgers of all managers."""
        return Ledger.joined([self._settled, *ledgers], self._mark)

    # -------------------------------------------------------------------------------------------------------- state

    def continue_from(self, saved: Continued) -> None:
        """Start from a saved state; its groups go to the managers separately."""
        self._settled, self._mark = saved.ledger.without_pending(), saved.ledger.marked()
        self._counted = Counter(saved.counters)
        self.version, self.next_group_id = saved.version, saved.next_group_id

    def state(self, parts: Sequence[TrackerState]) -> State:
        """Contents of a state file, from the states or the outlines of all managers."""
        ledger, counters = self.ledger([part.ledger for part in parts]), Counter(self._counted)
        for part in parts:
            counters.update(part.counters)
        if any(part.untrained for part in parts):
            ledger = ledger.before_training(0, self._mark_before)
        return state_of(parts, ledger, counters, self.version, self.next_group_id)
