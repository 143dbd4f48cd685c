"""`mslime doctor`: checks one host, part by part, before a run.

A check measures or reads, and returns ok, warn, fail or `cannot see`, with advice. Work that may crash (CUDA, kernels,
collectives) runs in separate processes with a deadline. Checks change no settings and remove their files.
"""
