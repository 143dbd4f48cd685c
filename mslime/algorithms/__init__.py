"""Advantages, off-policy corrections, policy losses and KL estimates: pure tensor maths.

Nothing here calls a collective; what must be summed over ranks is returned, or goes through a callable that is given.
`advantages` needs NumPy only, the other modules torch.
"""
