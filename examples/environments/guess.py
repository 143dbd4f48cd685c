"""An environment: the model guesses a number, and reads whether to go higher or lower."""

import random

from mslime.rollout.environments import EnvironmentTask, Step


class Guess:
    """Guess a number from 1 to `largest`. The number depends on the prompt, not on the rollout."""

    def __init__(self, largest: int = 100) -> None:
        self._largest = largest

    def reset(self, task: EnvironmentTask) -> str:
        """Return the text that the model reads after the prompt."""
        self._number = random.Random(task.group_id).randint(1, self._largest)
        self._guesses = 0
        return f"A number from 1 to {self._largest}?\n"

    def step(self, action: str) -> Step:
        """Accept any text: a model may write anything."""
        self._guesses += 1
        try:
            guess = int(action)
        except ValueError:
            return Step("That is not a number.\n", reward=-0.1)
        if guess == self._number:
            return Step(reward=1.0, done=True, metrics={"guesses": self._guesses})
        return Step("Higher.\n" if guess < self._number else "Lower.\n", reward=0.0)

    def close(self) -> None:
        """Always called; leave it out if there is nothing to do."""
