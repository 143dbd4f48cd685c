"""Needs of a run, from config.json and the configuration alone: memory, balance, bytes on the links."""
