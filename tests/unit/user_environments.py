"""Environments as users write them, and as they go wrong."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from mslime.rollout.environments import EnvironmentTask, Step


class Counting:
    """Counts up to the label; an action is a number that is added. Its notes say what was called, and by whom."""

    def __init__(self, notes: str | None = None, goal: int = 3) -> None:
        self._notes, self._goal = notes, goal
        self._note("made")

    def reset(self, task: EnvironmentTask) -> str:
        self._sum, self._index = 0, task.index
        self._note("reset")
        return f"Count to {self._goal}."

    def step(self, action: str) -> tuple[str, float, bool]:
        self._note(f"step {action}")
        self._sum += int(action)
        return f"At {self._sum}.", 1.0, self._sum >= self._goal

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        if self._notes is not None:
            with open(self._notes, "a") as file:
                file.write(f"{what} {os.getpid()} {threading.get_ident()}\n")


class AsyncCounting:
    """The same, async and with nothing to close."""

    async def reset(self, task: EnvironmentTask) -> list[dict[str, str]]:
        self._sum = 0
        return [{"role": "user", "content": "Count to 3."}]

    async def step(self, action: str) -> Step:
        await asyncio.sleep(0)
        self._sum += int(action)
        done = self._sum >= 3
        return Step(f"At {self._sum}.", None, done, 7.0 if done else None, {"sum": self._sum})


class Breaks(Counting):
    """Does with an action what it is told to, when it is told to `in` the method of that name."""

    held: bytearray

    def __init__(self, method: str = "step", **options: Any) -> None:
        self._method = method
        super().__init__(**options)
        self._break("made", "")

    def reset(self, task: EnvironmentTask) -> Any:
        self._break("reset", task.text)
        return super().reset(task)

    def step(self, action: str) -> Any:
        if self._method == "step" and not action.isdigit():
            return self._do(action)
        return super().step(action)

    def close(self) -> None:
        super().close()
        self._break("close", "raise")

    def _break(self, method: str, how: str) -> None:
        if self._method == method:
            self._do(how)

    def _do(self, how: str) -> Any:
        match how:
            case "hang":
                time.sleep(600)
            case "spin":
                while True:
                    pass
            case "hold":  # the interpreter's lock, as a long call into C does
                sum(iter(int, 1))
            case "raise":
                raise ValueError("the group_gate is stuck")
            case "exit":
                os._exit(7)
            case "exit once":
                mark = Path(str(self._notes) + ".once")
                if not mark.exists():
                    mark.touch()
                    os._exit(7)
                return "", 1.0, True
            case "memory":
                self.held = bytearray(2**32)
            case "stop":
                next(iter(()))
            case "number":
                return "", "one", True
            case "nan":
                return "", float("nan"), True
            case "pair":
                return "", 1.0
            case "object":
                return object()
            case "role":
                return Step([{"role": "assistant", "content": "I did it"}])
        return "", 0.0, False


class NoStep:
    """Lacks a method."""

    def reset(self, task: EnvironmentTask) -> str:
        return ""


class OldReset:
    """Takes what Gymnasium's environments take."""

    def reset(self) -> str:
        return ""

    def step(self, action: str) -> Step:
        return Step()


def made_by_a_function() -> Counting:
    """No class."""
    return Counting()


class Plays(Breaks):
    """Two turns, each worth 1, unless the rollout `at` (group, index) has `trouble` in its second one."""

    def __init__(self, trouble: str = "", at: tuple[int, int] = (1, 0), turns: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self._trouble, self._at, self._turns = trouble, tuple(at), turns

    def reset(self, task: EnvironmentTask) -> str:
        self._who, self._taken = (task.group_id, task.index), 0
        self._note(f"reset {self._who}")
        return "GO" if self._trouble != "long" else "GO" * 500

    def step(self, action: str) -> Any:
        self._taken += 1
        if self._taken == 2 and self._who == self._at and self._trouble not in ("", "long", "slow"):
            return self._do(self._trouble)
        if self._trouble == "slow":
            time.sleep(0.05)
        return "OK", 1.0, self._taken == self._turns

    def close(self) -> None:
        self._note(f"close {self._who}")


class Scored(Plays):
    """Leaves the reward to the run."""

    def step(self, action: str) -> Step:
        observation, _, done = super().step(action)
        return Step(observation, None, done, metrics={"taken": self._taken})
