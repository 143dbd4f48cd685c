"""Offline conversion: whole checkpoints, read and written on disk, without a run.

Each of `to_hf`, `to_megatron`, `requantise` is one conversion (a `jobs.ConversionJob`), `inspect` looks at
checkpoints and compares them. The rules of the model families, which every run needs, are in `mslime.convert`.
"""
