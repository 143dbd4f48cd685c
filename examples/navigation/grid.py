"""A walk on a grid of 6 x 6: the model reads its position, and writes one of `<` `>` `-` `+`."""

from __future__ import annotations

from mslime.rollout.environments import EnvironmentTask, Step

SIZE = 6
MOVES = {"<": (-1, 0), ">": (1, 0), "-": (0, -1), "+": (0, 1)}
Place = tuple[int, int]


def text_of(place: Place) -> str:
    """Text of a place for the model: `[37]` is x 3, y 7."""
    return f"[{place[0]}{place[1]}]"


def moved(place: Place, move: str) -> Place:
    """The place after one move; walls block it."""
    dx, dy = MOVES[move]
    return min(max(place[0] + dx, 0), SIZE - 1), min(max(place[1] + dy, 0), SIZE - 1)


def distance(a: Place, b: Place) -> int:
    """Moves between two places."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


class Grid:
    """Walk from `start` to `goal`, both in the row's metadata. The reward is 1 for an arrival in time, else 0."""

    def reset(self, task: EnvironmentTask) -> str:
        """Place where the walk begins."""
        self._place, self._goal = tuple(task.metadata["start"]), tuple(task.metadata["goal"])
        self._shortest, self._moves = distance(self._place, self._goal), 0
        return text_of(self._place)

    def step(self, action: str) -> Step:
        """Make one move. Invalid text ends the walk."""
        if action not in MOVES:
            return Step(reward=0.0, done=True)
        self._place, self._moves = moved(self._place, action), self._moves + 1
        if self._place == self._goal:
            return Step(reward=1.0, done=True, metrics={"detour": self._moves - self._shortest})
        return Step(text_of(self._place), reward=0.0)
