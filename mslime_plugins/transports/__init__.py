"""Transports on other packages: Mooncake's transfer engine and checkpoint-engine."""

from mslime.config.transports import TransportTraits

MOONCAKE = TransportTraits(
    "mslime_plugins.transports.mooncake:MooncakeTransport",
    "from a sender's memory by Mooncake's transfer engine (the extra mooncake)",
    settings=("mooncake_over",),
    needs_plugin=True,
    gpu_bucket=True,
    keeps_gpu_bucket=True,
    way="adapters",
)
CHECKPOINT_ENGINE = TransportTraits(
    "mslime_plugins.transports.checkpoint_engine:CheckpointEngineTransport",
    "for engines on the trainer's GPUs, from rank to rank of the trainer and then within each GPU (the extra "
    "checkpoint-engine)",
    needs_plugin=True,
    on_engines_gpus=True,
    host_copies=1,
    pinned_copies=1,
)
