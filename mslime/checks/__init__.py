"""`mslime check`: everything that can be known about a run before a GPU is claimed.

Reads the configuration, the checkpoint's config.json, index and tokenizer, and the first rows of every data file;
starts no engine and no process group.
"""
