"""Advantages, off-policy corrections, policy losses and KL estimates: pure tensor maths.

No module calls a collective directly: sums over ranks are returned, or go through a given callable. `advantages` needs
NumPy only, the other modules torch.
"""
