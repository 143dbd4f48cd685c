"""Rewards of responses: which grader scores one, in which process, and how several become one number."""
