"""`mslime serve`: clients of the `tinker` SDK train adapters on one base and sample from them, over HTTP on loopback.

`wire` is what the SDK sends and reads; `service` what a request means, with `futures`, `sessions` and `states` under
it; `backend` what it asks of trainers and engines, and `ranks` and `engines` those that there are.
"""
