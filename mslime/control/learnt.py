"""What a run has learnt, and what of it is saved: counted in steps, and told when the run ends early."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Learnt:
    """Steps of a run.

    Attributes:
        trained: done, also before this session.
        saved: that the newest checkpoint holds.
        training: inside a step of the trainer, whose weights are neither of one step nor of the next.
        save_failed: the last checkpoint could not be written.
    """

    trained: int
    saved: int
    training: bool = False
    save_failed: bool = False

    def stopping(self, step: int) -> str:
        """The answer to the first signal, in `step`."""
        if (step if self.training else self.trained) > self.saved:
            return f"stopping: saving step {step if self.training else self.trained}; again to stop without saving"
        return f"stopping: {self.nothing_to_save()}; again to stop at once"

    def nothing_to_save(self) -> str:
        """Why a run that ends saves nothing."""
        return f"step {self.saved} is saved already" if self.saved else "there is nothing to save yet"

    def lost(self, why: str) -> str:
        """Which steps are not saved."""
        if self.trained <= self.saved:
            return f"nothing was saved: {why}"
        first = self.saved + 1
        which = f"step {first} is" if self.trained == first else f"steps {first} to {self.trained} are"
        return f"{which} not saved: {why}"

    def hinders_saving(self, step: int, stopped: bool) -> str:
        """Why the trainer's weights cannot be saved, where something is to be saved; empty: they can.

        Args:
            stopped: the run ends by a signal, which waited for `step`.
        """
        if self.training:
            return f"step {step} did not end in time" if stopped else f"the trainer failed within step {step}"
        return "saving failed" if self.save_failed else ""
