"""Tests of Triton kernels without a GPU, in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels`.

In a process of their own, because the variable must be set before triton is first imported, and holds for all of it.
"""
