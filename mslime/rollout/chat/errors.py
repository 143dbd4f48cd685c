"""What is wrong with a request to the model of a rollout. A server writes it in the shape of the client's dialect."""

from __future__ import annotations

from mslime.config.errors import UserError
from mslime.rollout.workflow import NoRoomError


class ChatError(UserError):
    """A request that cannot be answered as it stands. Sent again, it would fail again."""


class ContextFull(ChatError, NoRoomError):
    """The messages leave no room for a reply. What was recorded before stays.

    Attributes:
        tokens, most: of the messages, and that they may have; clients read them in the words of their API.
    """

    tokens = most = 0

    @classmethod
    def of(cls, value: str, rule: str, tokens: int, most: int) -> ContextFull:
        """An error with its numbers."""
        error = cls("messages", value, rule, "send fewer messages, or shorter ones")
        error.tokens, error.most = tokens, most
        return error


class LimitReached(ChatError, NoRoomError):
    """The rollout has had its share of turns, sequences, tokens or time; `field` is the setting."""


class SessionOver(ChatError):
    """The rollout has ended, and takes no more turns."""
