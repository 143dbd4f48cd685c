"""Rollout functions and environments over packages of others: OpenEnv, NeMo Gym, verifiers."""
