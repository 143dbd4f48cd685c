"""The loop. One for synchronous, one-step-ahead and asynchronous training: `rollout.max_staleness` is the difference.

A step takes finished groups from the rollout service, trains on them, and publishes new weights. The service decides
what to generate meanwhile, and which groups are too old to train on. This file defines the order of these calls only.
"""

from __future__ import annotations

from mslime.run.training_run import TrainingRun


def train_rl(session: TrainingRun) -> None:
    """Reinforcement learning from `session.first_step` to `train.num_steps`."""
    config = session.config
    with session.rescuing():
        session.publish_weights(version=session.first_step)
        if _evaluation_due(session):
            session.evaluate(step=session.first_step)
        for step in range(session.first_step, config.train.num_steps):
            with session.step(step) as record:
                batch = session.take(step)
                record.update(batch.metrics)
                record.update(session.train(batch.shards, batch.watched))
                record.update(session.evaluated())  # of the weights before this publish
                record.update(session.publish_weights(version=step + 1))
                if config.observe.evaluation_due(step, config.train.num_steps):
                    record.update(session.evaluate(step=step + 1))
            _keep(session, step)
        session.finish()


def train_sft(session: TrainingRun) -> None:
    """Supervised training on the same trainer; no engine is started."""
    config = session.config
    with session.rescuing():
        if _evaluation_due(session):
            session.held_out_loss(step=session.first_step)
        for step in range(session.first_step, config.train.num_steps):
            with session.step(step) as record:
                record.update(session.train(session.rows.batch()))
                record.update(session.rows.source.metrics())
                if config.observe.evaluation_due(step, config.train.num_steps):
                    record.update(session.held_out_loss(step=step + 1))
            _keep(session, step)
        session.finish()


def _keep(session: TrainingRun, step: int) -> None:
    """Write a due checkpoint and Hugging Face checkpoint after a step."""
    config = session.config
    if config.checkpoint.save_due(step, config.train.num_steps):
        session.save(next_step=step + 1)
    if config.checkpoint.export_due(step):
        session.export_hf(config.run_dir / f"hf_step_{step + 1}")


def _evaluation_due(session: TrainingRun) -> bool:
    """Whether to evaluate the weights that the session begins with: those of a new run, or of a session that was
    stopped before it had their scores."""
    observe, done = session.config.observe, session.first_step
    due = observe.evaluation_due(done - 1, session.config.train.num_steps) if done else observe.eval_at_start
    return due and not session.has_scores(done)
