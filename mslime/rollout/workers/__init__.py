"""User functions and classes in worker processes, which can be killed and replaced."""
