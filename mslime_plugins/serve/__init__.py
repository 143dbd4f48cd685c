"""`mslime serve`: clients of the `tinker` SDK train adapters on one base and sample from them, over HTTP on loopback.

`bodies`, `proto` and `pass_requests` parse and write the SDK's messages; `server` is the HTTP side. `tinker_service`
implements the requests, with `futures`, `sessions` and `states`; `sampling` uses the engines.
"""
