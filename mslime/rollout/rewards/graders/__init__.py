"""Graders: what a response must hold to be right, one module a question. None knows the rollout or a configuration."""
