"""Rewards of responses: graders, their processes, and their combination to one number."""
