"""Account of every generated token.

A generated token is pending until it is trained, masked or dropped; it is exactly one of these at any time. `settle`
compares the totals with a count of the tokens still held. A lost or doubly counted token is detected in the step in
which it happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ledger:
    """Token counts since the beginning of the run.

    Attributes:
        generated: sampled by an engine.
        trained: sent to the trainer inside the loss.
        masked: kept in a sequence but out of the loss, by reason.
        dropped: discarded, by reason (`stale`, `zero_variance`, `reward`, `aborted`, ...).
    """

    generated: int = 0
    trained: int = 0
    masked: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])
    _mark: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def pending(self) -> int:
        """Pending tokens: in flight, waiting to be continued, or accepted but not yet trained."""
        return self.generated - self.trained - self.masked.total() - self.dropped.total()

    def generate(self, tokens: int) -> None:
        """Count `tokens` new tokens from an engine."""
        assert tokens >= 0
        self.generated += tokens

    def train(self, tokens: int) -> None:
        """Move `tokens` pending tokens to trained."""
        self._spend(tokens)
        self.trained += tokens

    def mask(self, tokens: int, reason: str = "stale") -> None:
        """Move `tokens` pending tokens out of the loss; they stay in their sequence."""
        self._spend(tokens)
        self.masked[reason] += tokens

    def drop(self, tokens: int, reason: str) -> None:
        """Discard `tokens` pending tokens."""
        self._spend(tokens)
        self.dropped[reason] += tokens

    def settle(self, alive: int) -> dict[str, int]:
        """Close a step and return its changes.

        Args:
            alive: trainable tokens counted in all samples still held; must equal `pending`.

        Returns:
            `{generated,trained,masked,dropped}_tokens` since the last settlement, `pending_tokens` now, and the masked
            and dropped tokens by reason as `masked/<reason>_tokens` and `dropped/<reason>_tokens`.
        """
        assert alive == self.pending, f"{self.pending} tokens are pending in the books, {alive} are really held"
        now = self._totals()
        step = {key: value - self._mark.get(key, 0) for key, value in now.items()}
        opening = self._mark.get("pending_tokens", 0)
        spent = step["trained_tokens"] + step["masked_tokens"] + step["dropped_tokens"]
        assert opening + step["generated_tokens"] == spent + now["pending_tokens"], (opening, step, now)
        self._mark = now
        return {**step, "pending_tokens": now["pending_tokens"]}

    def marked(self) -> dict[str, int]:
        """The totals at the last settlement, for `before_training`."""
        return dict(self._mark)

    def copy(self) -> Ledger:
        """An independent copy."""
        return Ledger.from_state(self.state_dict())

    def before_training(self, tokens: int, mark: Mapping[str, int]) -> Ledger:
        """Ledger as it was before `tokens` were sent to the trainer, with the last settlement at `mark`."""
        books = self.copy()
        books.trained -= tokens
        books._mark = dict(mark)
        return books

    @classmethod
    def joined(cls, parts: Iterable[Ledger], mark: Mapping[str, int]) -> Ledger:
        """Sum of several ledgers, with the last settlement at `mark`."""
        total = cls(_mark=dict(mark))
        for part in parts:
            total.generated += part.generated
            total.trained += part.trained
            total.masked.update(part.masked)
            total.dropped.update(part.dropped)
        return total

    def without_pending(self) -> Ledger:
        """Ledger without pending tokens, which belong to other ledgers."""
        books = self.copy()
        books.generated -= self.pending
        return books

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values."""
        return {
            "generated": self.generated,
            "trained": self.trained,
            "masked": dict(self.masked),
            "dropped": dict(self.dropped),
            "mark": dict(self._mark),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """Ledger from the values of `state_dict`."""
        counters = Counter[str](state["masked"]), Counter[str](state["dropped"])
        books = cls(state["generated"], state["trained"], *counters, dict(state["mark"]))
        numbers = [books.generated, books.trained, *(n for c in counters for n in c.values()), *books._mark.values()]
        if any(type(n) is not int or n < 0 for n in numbers) or books.pending < 0:
            raise ValueError(f"no ledger: {dict(state)}")
        return books

    def _spend(self, tokens: int) -> None:
        assert 0 <= tokens <= self.pending, f"{tokens} tokens to settle, but {self.pending} are pending"

    def _totals(self) -> dict[str, int]:
        return {
            "generated_tokens": self.generated,
            "trained_tokens": self.trained,
            "masked_tokens": self.masked.total(),
            "dropped_tokens": self.dropped.total(),
            "pending_tokens": self.pending,
            **{f"masked/{reason}_tokens": n for reason, n in self.masked.items()},
            **{f"dropped/{reason}_tokens": n for reason, n in self.dropped.items()},
        }
