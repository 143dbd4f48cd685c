"""`mslime doctor`: looks at one machine, part by part, before a run is asked of it.

A check measures or reads, and says of what it found: ok, warn, fail, or that it cannot see it; with what to do. What
may break a process (CUDA, kernels, collectives) runs in processes of its own, with a deadline. Nothing of the machine
is changed; the files that are written go away again.
"""
