"""Rollout functions and environments for other packages: OpenEnv, NeMo Gym, verifiers."""
