"""What a run from a quantised checkpoint must be like: its engines hold the weights as the checkpoint stores them."""

from __future__ import annotations

from collections.abc import Mapping

from mslime.config.engines import SGLangConfig
from mslime.config.errors import CheckpointError, ConfigError
from mslime.config.model_facts import language_model
from mslime.config.schema import RunConfig
from mslime.config.transports import AUTO, transport_names
from mslime.convert.encoding import Encoded, Encoding, Fp8Blocks, Int4Groups, encoded_weights
from mslime.convert.hf import HFCheckpoint


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
    if config.weights.transport not in transport_names():  # one of a user's own may carry no bucket of several dtypes
        raise ConfigError(
            "weights.transport", config.weights.transport,
            f"{config.model.path} is quantised ({encoded.method}), and weights of few bits travel with their scales by "
            f"{' or '.join(transport_names())} only", f"set weights.transport: {AUTO}, or {plain}",
        )  # fmt: skip
    if config.syncs_adapters:
        raise ConfigError(
            "lora.sync", config.lora.sync,
            f"{config.model.path} is quantised ({encoded.method}), and engines that hold such weights serve no "
            "adapters beside them",
            f"set lora.sync: merged, which quantises the weights with the adapter in them, or {plain}",
        )  # fmt: skip
    text = language_model(hf_config)
    if config.cluster.device == "cpu" and text.get("kv_lora_rank") is not None:
        raise CheckpointError(
            f"{config.model.path}: quantization_config", encoded.method,
            "on a CPU quantised layers are emulated for ordinary attention, and this model has a latent one", plain,
        )  # fmt: skip
    _check_shares(config.sglang, text, encoded)


def _check_shares(engine: SGLangConfig, text: Mapping[str, object], encoded: Encoded) -> None:
    """SGLang gives each GPU whole blocks, or groups, of an expert."""
    width, tp = text.get("moe_intermediate_size"), engine.tp_size
    tp //= int(str(engine.extra.get("ep_size") or 1))
    unit, size = _unit(encoded.encoding)
    if isinstance(width, int) and width % (size * max(tp, 1)):
        raise ConfigError(
            "sglang.tp_size", engine.tp_size,
            f"experts are {width} wide, which {tp} GPUs do not share out in {unit} of {size}, as SGLang wants them",
            "choose a smaller sglang.tp_size, sglang.ep_size as large as it, or a plain checkpoint",
        )  # fmt: skip


def _unit(encoding: Encoding) -> tuple[str, int]:
    """What shares a scale, and how many of an expert's units it takes."""
    match encoding:
        case Fp8Blocks():
            return "blocks", encoding.block[0]
        case Int4Groups():
            return "groups", encoding.group
        case _:
            raise AssertionError(encoding)
