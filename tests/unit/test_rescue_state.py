"""What a run that ends early says of its steps."""

from __future__ import annotations

import pytest

from mslime.run.stop import RescueState


@pytest.mark.parametrize(("state", "said"), [
    (RescueState(4, 4), "Stopping: step 4 is already saved. Press Ctrl-C again to stop at once."),
    (RescueState(0, 0), "Stopping: there is nothing to save yet. Press Ctrl-C again to stop at once."),
    (RescueState(6, 4), "Stopping after saving step 6. Press Ctrl-C again to stop without saving."),
    (RescueState(4, 4, training=True), "Stopping after saving step 7. Press Ctrl-C again to stop without saving."),
])  # fmt: skip
def test_a_signal_is_answered_with_the_step_that_will_be_saved(state: RescueState, said: str) -> None:
    assert state.stopping(step=7) == said


@pytest.mark.parametrize(("state", "said"), [
    (RescueState(4, 4), "nothing was saved: why"), (RescueState(5, 4), "step 5 is not saved: why"),
    (RescueState(7, 4), "steps 5 to 7 are not saved: why"),
])  # fmt: skip
def test_every_step_that_is_lost_is_named(state: RescueState, said: str) -> None:
    assert state.lost("why") == said


def test_weights_inside_a_step_are_never_saved() -> None:
    inside = RescueState(6, 4, training=True)
    assert inside.hinders_saving(7, stopped=True) == "step 7 did not finish in time"
    assert inside.hinders_saving(7, stopped=False) == "the trainer failed within step 7"
    assert RescueState(6, 4, save_failed=True).hinders_saving(7, stopped=False) == "saving failed"
    assert not RescueState(6, 4).hinders_saving(7, stopped=True)
