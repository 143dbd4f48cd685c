"""The training step: passes over shards, loss, optimizer, metrics; the trainer and the critic that run them."""
