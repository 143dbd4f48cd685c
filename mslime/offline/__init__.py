"""Offline conversion of whole checkpoints on disk, without a run.

Each of `to_hf`, `to_megatron`, `requantise` is one conversion (a `jobs.ConversionJob`), `inspect` lists and compares
checkpoints. The rules of the model families, which every run needs, are in `mslime.convert`.
"""
