"""Groups that were interrupted: their tokens wait here, with everything known about them, to be continued."""

from __future__ import annotations

from collections.abc import Iterator

from mslime.data.sample import Group


class PartialBuffer:
    """Interrupted groups, the one with the oldest tokens first: it has the least time left."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def put(self, group: Group) -> None:
        """Keep `group` until it can be continued."""
        assert all(g.group_id != group.group_id for g in self._groups), f"group {group.group_id} is already here"
        self._groups.append(group)

    def pop(self) -> Group | None:
        """The group to continue next; None when there is none."""
        if not self._groups:
            return None
        first = min(self._groups, key=_urgency)
        self._groups.remove(first)
        return first


def _urgency(group: Group) -> tuple[bool, int, int]:
    oldest = group.oldest_version
    return (oldest is None, oldest or 0, group.group_id)
