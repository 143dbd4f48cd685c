"""Mistakes of clients, with the HTTP status and the category for the SDK."""

from __future__ import annotations

from typing import Literal

from mslime.config.errors import EngineError, TrainerError, UserError

Category = Literal["user", "server", "unknown"]
BAD, UNKNOWN_KEY, UNKNOWN, GONE, BUSY = 400, 401, 404, 410, 429


class ServeError(UserError):
    """An invalid request of a client.

    Attributes:
        status: of the HTTP answer, if the request itself is rejected.
    """

    def __init__(self, field: str, value: object, rule: str, hint: str, status: int = BAD) -> None:
        super().__init__(field, value, rule, hint)
        self.status = status

    def __reduce__(self) -> tuple[type, tuple[str, object, str, str, int]]:  # type: ignore[override]
        return (type(self), (self.field, self.value, self.rule, self.hint, self.status))


def category_of(error: Exception) -> Category:
    """The category of an error: a client's mistake, or a server's fault."""
    own = not isinstance(error, UserError) or isinstance(error, EngineError | TrainerError)
    return "server" if own else "user"
