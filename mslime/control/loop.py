"""The loop. One for synchronous, one-step-ahead and asynchronous training: `rollout.max_staleness` is the difference.

A step takes finished groups from the rollout service, trains on them, and publishes new weights; the service decides
what is generated meanwhile and what is too old to train on. What each line does is in the rooms; the order is here.
"""

from __future__ import annotations

from mslime.control.session import Session


def train_rl(session: Session) -> None:
    """Reinforcement learning from `session.first_step` to `train.num_steps`."""
    config = session.config
    with session.rescuing():
        session.publish_weights(version=session.first_step)
        if config.observe.eval_at_start and session.first_step == 0:
            session.evaluate(step=0)
        for step in range(session.first_step, config.train.num_steps):
            with session.step(step) as record:
                batch = session.take(step)
                record.update(batch.metrics)
                record.update(session.train(batch.shards))
                record.update(session.publish_weights(version=step + 1))
                if due(config.observe.eval_every, step, config.train.num_steps):
                    record.update(session.evaluate(step=step + 1))
            if due(config.checkpoint.save_every, step, config.train.num_steps):
                session.save(next_step=step + 1)
    session.finish()


def train_sft(session: Session) -> None:
    """Supervised training on prompt and label, on the same trainer; no engine is started."""
    config = session.config
    for step in range(session.first_step, config.train.num_steps):
        with session.step(step) as record:
            record.update(session.train(session.supervised_batch(step)))
        if due(config.checkpoint.save_every, step, config.train.num_steps):
            session.save(next_step=step + 1)
    session.finish()


def due(every: int, step: int, num_steps: int) -> bool:
    """Whether something done every so many steps (0: only at the end) is due after `step` (0-based)."""
    return step + 1 == num_steps or (every > 0 and (step + 1) % every == 0)
