"""`mslime check`: all checks of a run that need no GPU.

Reads the configuration, the checkpoint's config.json, index and tokenizer, and the first rows of every data file;
starts no engine and no process group.
"""
