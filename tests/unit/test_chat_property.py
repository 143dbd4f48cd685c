"""Whatever a client does: what the model saw is what is trained, and each sampled token is trained at most once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mslime.rollout.agents.session import ReplyTurn
from tests.unit.test_chat_session import CALL, MORE, QUESTION, SYSTEM, TOOLS, Chat, echo, result

REPLIES = st.sampled_from(
    [f"<think>hm</think>{CALL}", "<think>a</think>x", "x", "<think>never closed", f"{CALL}\n{CALL}", "y<|im_end|>stray"]
)
EDITS = st.sampled_from([{}, {}, {}, {"reasoning_content": "drop"}, {"content": "edited"}, {"content": ""}])
STEPS = st.lists(
    st.tuples(
        st.integers(0, 5),  # how many requests back the conversation was
        EDITS,
        st.sampled_from(["result", "query", "same", "fresh", "foreign", "no tools", "leave"]),
        st.booleans(),  # received
    ),
    min_size=1,
    max_size=8,
)


async def converse(chat: Chat, steps: list[tuple[int, dict[str, Any], str, bool]]) -> list[tuple[list[Any], ReplyTurn]]:
    """Ask as the steps say; the conversations, each with its last turn."""
    asked: list[tuple[list[dict[str, Any]], ReplyTurn]] = []
    for back, edit, kind, received in steps:
        messages, tools = [SYSTEM, QUESTION], [] if kind == "no tools" else TOOLS
        if asked and kind != "fresh":
            before, turn = asked[max(0, len(asked) - 1 - back)]
            answers = [result(turn, str(i), i) for i in range(len(turn.reply.calls))]
            messages = [*before, echo(turn, **edit), *(answers or [MORE])]
            if kind == "query":
                messages.append(MORE)
            if kind == "foreign":
                messages += [{"role": "assistant", "content": "I say"}, MORE]
            if kind == "same":
                messages = before
        if kind == "leave":
            await leave(chat, messages)
        else:
            asked.append((messages, await chat.ask(*messages, tools=tools, delivered=received)))
    return asked


async def leave(chat: Chat, messages: list[dict[str, Any]]) -> None:
    """Ask, and be gone before the reply."""
    chat.engine.gate.clear()
    waiting = chat.engine.waiting
    task = asyncio.create_task(chat.ask(*messages))
    await chat.engine_waits(waiting + 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    chat.engine.gate.set()


def check(chat: Chat) -> None:
    chat.engine.check()
    sampled = Counter(tuple(seen + said) for _, seen, said in chat.engine.saw)
    for turn in chat.session.forest.turns:
        tokens = turn.sample.tokens[: turn.end].tolist()
        assert sampled[tuple(tokens)], "a turn's tokens are not what the model saw and said"
        for above in turn.path():
            assert tokens[: above.end] == above.sample.tokens[: above.end].tolist(), "its conversation is another one"
        trained = turn.sample.loss_mask[turn.start : turn.end]
        assert trained.all() if turn.known else not trained.any()
    owned = Counter((id(t.sample), t.start) for t in chat.session.forest.turns)
    assert not owned or max(owned.values()) == 1
    known = sum(t.end - t.start for t in chat.session.forest.turns if t.known)
    assert sum(int(s.loss_mask.sum()) for s in chat.engine.samples) == known, "trained once, and nothing else is"


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    thinking=st.sampled_from(["template", "keep"]),
    replies=st.lists(REPLIES, min_size=8, max_size=8),
    ending=st.sampled_from(["<|im_end|>", ""]),
    steps=STEPS,
)
@pytest.mark.slow
def test_what_the_model_saw_is_what_is_trained(thinking: Any, replies: list[str], ending: str, steps: Any) -> None:
    async def work() -> None:
        chat = Chat(*replies, thinking=thinking, ending=ending)
        await converse(chat, steps)
        await chat.close()
        check(chat)
        chat.rendering.close()

    asyncio.run(asyncio.wait_for(work(), 60))
