"""Environments of Atropos (atroposlib 0.4.0), which generate by themselves and hand finished groups to a trainer.

mslime is both of their neighbours: the model server that they ask, and the trainer that they hand groups to. So each
group can be recognised, token by token, in what the model server recorded; that is trained, and nothing else.
"""
