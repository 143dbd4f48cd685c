"""Environments of Atropos (atroposlib 0.4.0), which generate by themselves and submit finished groups to a trainer.

mslime acts as both servers of an environment: the model server for its requests, and the trainer that receives its
groups. So it can match each group, token by token, with the model server's records, and trains only recorded tokens.
"""
