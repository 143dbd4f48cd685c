"""The loop. One for synchronous, one-step-ahead and asynchronous training: `rollout.max_staleness` is the difference.

A step takes finished groups from the rollout service, trains on them, and publishes new weights; the service decides
what is generated meanwhile and what is too old to train on. What each line does is in its package; the order is here.
"""

from __future__ import annotations

from mslime.run.training_run import TrainingRun


def train_rl(session: TrainingRun) -> None:
    """Reinforcement learning from `session.first_step` to `train.num_steps`."""
    config = session.config
    with session.rescuing():
        session.publish_weights(version=session.first_step)
        if _evaluation_owed(session):
            session.evaluate(step=session.first_step)
        for step in range(session.first_step, config.train.num_steps):
            with session.step(step) as record:
                batch = session.take(step)
                record.update(batch.metrics)
                record.update(session.train(batch.shards, batch.watched))
                record.update(session.evaluated())  # of the weights that are now replaced
                record.update(session.publish_weights(version=step + 1))
                if config.observe.evaluation_due(step, config.train.num_steps):
                    record.update(session.evaluate(step=step + 1))
            _keep(session, step)
        session.finish()


def train_sft(session: TrainingRun) -> None:
    """Supervised training on the same trainer; no engine is started."""
    config = session.config
    with session.rescuing():
        if _evaluation_owed(session):
            session.held_out_loss(step=session.first_step)
        for step in range(session.first_step, config.train.num_steps):
            with session.step(step) as record:
                record.update(session.train(session.supervised_batch()))
                record.update(session.rows_metrics())
                if config.observe.evaluation_due(step, config.train.num_steps):
                    record.update(session.held_out_loss(step=step + 1))
            _keep(session, step)
        session.finish()


def _keep(session: TrainingRun, step: int) -> None:
    """What is written after a step: a checkpoint, and a Hugging Face checkpoint beside the run."""
    config = session.config
    if config.checkpoint.save_due(step, config.train.num_steps):
        session.save(next_step=step + 1)
    if config.checkpoint.export_due(step):
        session.export_hf(config.run_dir / f"hf_step_{step + 1}")


def _evaluation_owed(session: TrainingRun) -> bool:
    """Whether the weights that the session begins with are to be evaluated: those of a new run, or those that an
    earlier session was stopped with before their scores were there."""
    observe, done = session.config.observe, session.first_step
    due = observe.evaluation_due(done - 1, session.config.train.num_steps) if done else observe.eval_at_start
    return due and not session.has_scores(done)
