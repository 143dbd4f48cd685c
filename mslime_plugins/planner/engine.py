"""Memory of an SGLang engine: weights of one GPU, and the tokens that fit into the cache beside them.

SGLang's `mem_fraction_static` is the share of the GPU for weights and cache together (`arg_groups/memory_hook.py`), so
the cache is the rest of it after the weights. Memory outside is for activations, CUDA graphs and the bucket of a weight
update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from mslime.config.engines import SGLangConfig
from mslime.convert.encoding import Encoded
from mslime.convert.flops import ModelSizes
from mslime.convert.safetensors_files import SAFETENSORS_DTYPES
from mslime.convert.table import Rule, RuleTable
from mslime.convert.tensor_layouts import FusedQKV
from mslime.weights.weight_plan import DTYPE_BYTES
from mslime_plugins.planner.parameters import model_parameters

MIB = 2**20
_VOCABULARY = 64
RUNTIME_BYTES = 4 * 2**30
"""Memory of an engine beside weights, cache and the bucket of a weight update: context, activations, graphs."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of an engine.

    Attributes:
        weights: of the model.
        cache: of keys and values.
        state: of linear-attention layers, for the running requests.
        runtime: memory outside `mem_fraction_static`.
        bucket: buckets that a weight update holds at once; within `runtime`.
        token_bytes: of one token in the cache.
        state_bytes: of one request in the linear-attention layers.
        tokens: that fit into the cache of the engine.
        adapters: all adapter versions that it serves at once.
    """

    weights: int
    cache: int
    state: int
    runtime: int
    bucket: int
    token_bytes: int
    state_bytes: int
    tokens: int
    adapters: int = 0


@dataclass(frozen=True)
class ServedWeights:
    """The weights of a model as engines hold them.

    Attributes:
        table: its rules.
        dtype: of plain weights, of keys and values, and of states, as torch names it.
        encoded: weights that are quantised; None: none are.
    """

    table: RuleTable
    dtype: str
    encoded: Encoded | None = None

    @property
    def label(self) -> str:
        """Description for people."""
        return self.dtype if self.encoded is None else f"{self.encoded.method}; the rest in {self.dtype}"

    @property
    def sent(self) -> int:
        """Bytes of a sync; plain weights are sent in 16 bits."""
        return 2 * model_parameters(self.table) if self.encoded is None else self.on_a_gpu(1)

    def on_a_gpu(self, tp: int) -> int:
        """Bytes on one GPU of an engine of `tp`. Scales are split like their weight."""
        return sum(
            -(-_held(rule, tp) * stored // max(1, elements))
            for rule, (stored, elements) in zip(self.table.rules, self._sizes, strict=True)
        )

    @cached_property
    def _sizes(self) -> tuple[tuple[int, int], ...]:
        """Bytes and elements of each rule's tensors."""
        return tuple(self._size(rule) for rule in self.table.rules)

    def _size(self, rule: Rule) -> tuple[int, int]:
        dtype = rule.dtype or self.dtype
        elements = rule.parameters * math.prod(rule.kind.full_shape)
        stored = elements * DTYPE_BYTES[dtype]
        for bound in rule.expand() if self.encoded is not None else ():
            for name, shape in zip(bound.hf_names, bound.hf_shapes, strict=True):
                if self.encoded is not None and name in self.encoded.names:
                    plans = self.encoded.encoding.plans(name, SAFETENSORS_DTYPES[dtype], shape)
                    stored += sum(plan.nbytes for plan in plans) - math.prod(shape) * DTYPE_BYTES[dtype]
        return stored, elements


def engine_memory(
    engine: SGLangConfig, served: ServedWeights, widths: ModelSizes, num_layers: int, bucket: int, gpu_bytes: int,
    taken: int = 0, adapters: int = 0,
) -> EngineMemory:  # fmt: skip
    """Memory of one GPU of an engine of `engine.tp_size`.

    Args:
        bucket: bytes that a weight update holds at once.
        gpu_bytes: of one GPU.
        adapters: bytes of the served adapters (`adapter_bytes`).
        taken: bytes in use by an offloaded trainer at the engine's start: SGLang takes a share of the free memory.
    """
    tp, width = engine.tp_size, DTYPE_BYTES[served.dtype]
    weights = served.on_a_gpu(tp)
    static = int(static_fraction(engine, gpu_bytes) * (gpu_bytes - taken))
    token_bytes = cache_bytes_per_token(engine, widths, num_layers, width)
    state_bytes = _state_bytes(widths, tp, width)
    left = max(static - weights - adapters, 0)
    # Hybrid models share the rest between states and cache (SGLang's mamba_full_memory_ratio, default 0.9).
    ratio = float(str(engine.extra.get("mamba_full_memory_ratio") or 0.9)) if state_bytes else 0.0
    cache = int(left / (1 + ratio))
    tokens = min(cache // token_bytes, engine.max_total_tokens or cache // token_bytes)
    return EngineMemory(
        weights, tokens * token_bytes, left - cache if state_bytes else 0, gpu_bytes - taken - static, bucket,
        token_bytes, state_bytes, tokens, adapters,
    )  # fmt: skip


def adapter_bytes(factors: RuleTable, alive: int, tp: int, dtype: str) -> int:
    """Bytes on one GPU of an engine's reserved adapters. A factor is whole on each GPU if its weight is not split along
    it (SGLang's LoRAMemoryPool).

    Args:
        factors: rules of A and B.
        alive: how many versions it serves at once.
    """
    elements = (
        rule.parameters * math.prod(rule.kind.full_shape) // (1 if rule.kind.tp_axis is None else tp)
        for rule in factors.rules
    )
    return alive * sum(elements) * DTYPE_BYTES[dtype]


def _held(rule: Rule, tp: int) -> int:
    """Elements of a rule's tensors on one GPU of an engine; experts are distributed whole or split, with the same
    result."""
    if rule.megatron.startswith("mtp.") or not rule.exported:
        return 0
    number = rule.parameters
    if rule.experts:
        return -(-number * math.prod(rule.kind.full_shape) // tp)
    kind = rule.kind
    if rule.megatron.split(".")[0] in ("embedding", "output_layer"):
        rows, *features = kind.full_shape
        return engine_vocabulary(rows, tp) // tp * math.prod(features)
    if isinstance(kind, FusedQKV):
        # Key-value heads are repeated if there are fewer than ranks (sglang QKVParallelLinear).
        rows = (kind.heads / tp + 2 * max(1, kind.groups // tp)) * kind.head_dim
        return number * int(rows) * (kind.hidden or 1)
    return number * math.prod(kind.full_shape) // (1 if kind.tp_axis is None else tp)


def static_fraction(engine: SGLangConfig, gpu_bytes: int) -> float:
    """`sglang.mem_fraction_static`, or SGLang 0.5.23's own choice (`handle_gpu_memory_settings`).

    Its reserve in MiB: 512 + 1.5 a prefill token + tp/8 x 1024 + 2 a request of the largest decode graph, at least 10
    GiB on GPUs above 60 GiB. Graph reserves of prefill are not included.
    """
    if engine.mem_fraction_static is not None:
        return engine.mem_fraction_static
    prefill, tp = int(str(engine.extra.get("chunked_prefill_size") or 8192)), engine.tp_size
    reserve = 512 + 1.5 * max(prefill, 2048) + tp / 8 * 1024 + 2 * (256 if tp < 4 else 512)
    if gpu_bytes > 60 * 1024 * MIB:
        reserve = max(reserve, 10 * 1024)
    return max(0.0, round((gpu_bytes - reserve * MIB) / gpu_bytes, 3))


def cache_bytes_per_token(engine: SGLangConfig, w: ModelSizes, num_layers: int, width: int) -> int:
    """Keys and values of one token on one GPU.

    Grouped-query attention: 2 x head_dim for each key-value head that the GPU holds, at least one. Multi-latent
    attention: the compressed vector and the rotary key, on every GPU (SGLang's MLATokenToKVPool). Sliding-window layers
    are counted like full ones.
    """
    if "fp8" in str(engine.extra.get("kv_cache_dtype", "auto")):
        width = 1
    layers = num_layers - len(w.linear_layers)
    if w.latent:
        return layers * (w.key_value_rank + w.rope_dim) * width
    return layers * max(1, w.groups // engine.tp_size) * (w.head_dim + w.value_dim) * width


def _state_bytes(w: ModelSizes, tp: int, width: int) -> int:
    """Convolution window of three tokens and float32 state of a request in the gated delta-net layers."""
    if not w.linear_layers:
        return 0
    convolution = 3 * (2 * w.linear_keys + w.linear_values) * width
    recurrent = w.linear_values * w.linear_key_dim * 4
    return len(w.linear_layers) * (convolution + recurrent) // tp


def engine_vocabulary(rows: int, tp: int) -> int:
    """Rows that an engine of `tp` ranks holds of a vocabulary, zeros included.

    A multiple of 64, or of 64 x TP if TP does not divide that (sglang's VocabParallelEmbedding).
    """
    padded = -(-rows // _VOCABULARY) * _VOCABULARY
    return padded if padded % tp == 0 else -(-rows // (_VOCABULARY * tp)) * _VOCABULARY * tp
