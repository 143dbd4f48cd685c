"""What a run from a quantised checkpoint must be like: its engines hold the weights as the checkpoint stores them."""

from __future__ import annotations

from collections.abc import Mapping

from mslime.config.errors import CheckpointError, ConfigError
from mslime.config.hf_config import language_model
from mslime.config.schema import RunConfig
from mslime.convert.encoding import Fp8Blocks, encoded_weights
from mslime.convert.hf import HFCheckpoint

TRANSPORTS = ("broadcast", "shm")
"""That carry tensors of several dtypes in one bucket."""


def check_quantised(config: RunConfig, checkpoint: HFCheckpoint, hf_config: Mapping[str, object]) -> None:
    """Nothing for plain checkpoints, and for servers that run already: these are sent plain weights.

    Raises:
        CheckpointError: weights are quantised in a way that is not sent.
        ConfigError: a setting does not fit engines that hold quantised weights.
    """
    if config.sglang.urls:
        return
    encoded = encoded_weights(checkpoint, hf_config)
    if encoded is None:
        return
    plain = f"write a plain copy with `mslime convert bf16 {config.model.path} OUT` and train from it"
    if config.weights.transport not in TRANSPORTS:
        raise ConfigError(
            "weights.transport", config.weights.transport,
            f"{config.model.path} is quantised ({encoded.method}), and weights of few bits travel with their scales by "
            f"{' or '.join(TRANSPORTS)} only", f"set weights.transport: {TRANSPORTS[0]}, or {plain}",
        )  # fmt: skip
    if config.lora.on:
        raise ConfigError(
            "lora.rank", config.lora.rank,
            f"{config.model.path} is quantised ({encoded.method}), and adapters are trained beside plain weights only",
            plain,
        )  # fmt: skip
    if config.colocated:
        raise ConfigError(
            "cluster.placement", "colocated",
            f"{config.model.path} is quantised ({encoded.method}), and engines with quantised weights take no turns",
            f"set cluster.placement: separate, or {plain}",
        )  # fmt: skip
    text = language_model(hf_config)
    if config.cluster.device == "cpu" and text.get("kv_lora_rank") is not None:
        raise CheckpointError(
            f"{config.model.path}: quantization_config", encoded.method,
            "on a CPU FP8 is emulated for ordinary attention, and this model has a latent one", plain,
        )  # fmt: skip
    assert isinstance(encoded.encoding, Fp8Blocks)
    _check_blocks(config, text, encoded.encoding.block)


def _check_blocks(config: RunConfig, text: Mapping[str, object], block: tuple[int, int]) -> None:
    """SGLang gives each GPU whole blocks of an expert."""
    width, tp = text.get("moe_intermediate_size"), config.sglang.tp_size
    tp //= int(str(config.sglang.extra.get("ep_size") or 1))
    if isinstance(width, int) and width % (block[0] * max(tp, 1)):
        raise ConfigError(
            "sglang.tp_size", config.sglang.tp_size,
            f"experts are {width} wide, which {tp} GPUs do not share out in blocks of {block[0]}, as SGLang wants them",
            "choose a smaller sglang.tp_size, sglang.ep_size as large as it, or a plain checkpoint",
        )  # fmt: skip
