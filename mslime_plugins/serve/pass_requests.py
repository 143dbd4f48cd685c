"""Parse requests for forward and backward passes into data for the trainer, and write their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from mslime.backends.sglang.generating import GenerateResult
from mslime.config.serve import CLIENT_LOSSES, LOSS_SETTINGS, ClientLoss, LossChoice
from mslime.data.client_batch import Datum, PassResult
from mslime_plugins.serve import proto
from mslime_plugins.serve.client_errors import ServeError

COLUMNS = {"cross_entropy": ("weights",)}
"""Inputs of a loss beside targets; all other losses: `OF_POLICY`."""
OF_POLICY = ("logprobs", "advantages")
_DTYPES = {proto.FLOAT32: np.dtype("<f4"), proto.INT64: np.dtype("<i8")}
_ATTRIBUTES = {"weights": "weights", "logprobs": "log_probs", "advantages": "advantages"}


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model: token ids below `vocab_size`, sequences of at most `positions` tokens."""

    vocab_size: int
    positions: int


@dataclass(frozen=True)
class PassRequest:
    """A client's forward pass, or forward and backward.

    Attributes:
        loss_asked: name of the requested loss; `loss` may be a substitute for it.
    """

    model_id: str
    seq_id: int
    data: list[Datum]
    loss: LossChoice
    backward: bool
    loss_asked: str

    @property
    def notes(self) -> dict[str, float]:
        """Metrics in every pass that inform the client of a substituted loss."""
        same = self.loss_asked == self.loss.name
        return {} if same else {f"{self.loss_asked}_served_as_{self.loss.name}:mean": 1.0}


def read_header(raw: bytes) -> Any:
    """Parse the message of a request. Raises ServeError."""
    message = proto.ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise ServeError("body", f"{len(raw)} bytes", f"is not a ForwardBackwardRequest: {error}",
                         "send a request of the tinker SDK 0.38.0") from None  # fmt: skip
    return message


def read_pass(message: Any, limits: ModelLimits, stable_reinforce: ClientLoss | None = None) -> PassRequest:
    """Parse a request. Raises ServeError for the first mistake.

    Args:
        stable_reinforce: the substitute for the loss of that name; None: it is rejected.
    """
    loss = _loss(message, stable_reinforce)
    if not message.data:
        raise ServeError("data", "none", "must not be empty", "send at least one datum")
    data = [_datum(datum, f"data[{i}]", loss.name, limits) for i, datum in enumerate(message.data)]
    return PassRequest(message.model_id, message.seq_id, data, loss, not message.forward_only, str(message.loss_fn))


def _loss(message: Any, stable_reinforce: ClientLoss | None) -> LossChoice:
    name = str(message.loss_fn)
    if name == "stable_reinforce" and stable_reinforce is not None:
        name = stable_reinforce
    if name not in CLIENT_LOSSES:
        hint = "use one of them, or forward_backward_custom"
        if name == "stable_reinforce":
            hint += "; if the client cannot choose, start the server with --serve.stable_reinforce and one of them"
        raise ServeError("loss_fn", name, f"is not supported; {', '.join(CLIENT_LOSSES)} are", hint)
    given = {key: value.number if value.WhichOneof("value") == "number" else value.text
             for key, value in message.loss_fn_config_v2.items()}  # fmt: skip
    given = {**dict(message.loss_fn_config), **given}
    settings = dict(LOSS_SETTINGS[name])
    for key, value in given.items():
        if key not in settings:
            takes = f"it takes {', '.join(settings)}" if settings else "it takes none"
            raise ServeError(f"loss_fn_config.{key}", value, f"{name} has no such setting", takes)
        if not isinstance(value, float) or not np.isfinite(value) or value < 0:
            raise ServeError(f"loss_fn_config.{key}", value, "must be a number >= 0", "correct it")
        settings[key] = value
    low, high = settings.get("clip_low_threshold", 0.8), settings.get("clip_high_threshold", 1.2)
    if low > high:
        raise ServeError("loss_fn_config.clip_low_threshold", low, f"must not exceed clip_high_threshold, {high}",
                         "they are bounds of the ratio itself, such as 0.8 and 1.2")  # fmt: skip
    return LossChoice(cast("ClientLoss", name), low, high, settings.get("beta", 0.05))


def _datum(message: Any, where: str, loss: str, limits: ModelLimits) -> Datum:
    tokens = _tokens(message.model_input, where)
    if not len(tokens):
        raise ServeError(f"{where}.model_input", "no token", "must not be empty", "remove the datum")
    if len(tokens) + 1 > limits.positions:
        raise ServeError(
            f"{where}.model_input", f"{len(tokens)} tokens", f"the limit is {limits.positions - 1} tokens, because "
            "one more is predicted", "shorten or remove the datum",
        )  # fmt: skip
    _check_ids(tokens, f"{where}.model_input", limits)
    wanted = COLUMNS.get(loss, OF_POLICY)
    given = {str(name): tensor for name, tensor in message.loss_fn_inputs.items()}
    for name in given:
        if name not in ("target_tokens", *wanted):
            raise ServeError(f"{where}.loss_fn_inputs.{name}", "given", f"{loss} takes target_tokens, "
                             f"{', '.join(wanted)} and nothing else", "remove it")  # fmt: skip
    targets = _column(given, "target_tokens", where, len(tokens), loss)
    _check_ids(targets, f"{where}.loss_fn_inputs.target_tokens", limits)
    zeros = np.zeros(len(tokens), np.float32)
    columns = {"weights": zeros, "advantages": zeros, "log_probs": zeros}
    for name in wanted:
        columns[_ATTRIBUTES[name]] = _numbers(_column(given, name, where, len(tokens), loss), name, where)
    return Datum(tokens.astype(np.int32), targets.astype(np.int32), **columns)


def _tokens(chunks: Sequence[Any], where: str) -> NDArray[np.int32]:
    found = [np.empty(0, "<i4")]
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise ServeError(f"{where}.model_input", chunk.WhichOneof("chunk"), "only text is supported",
                             "send chunks of tokens")  # fmt: skip
        raw = chunk.encoded_text.tokens
        if len(raw) % 4:
            raise ServeError(f"{where}.model_input", f"{len(raw)} bytes", "tokens are int32", "send whole numbers")
        found.append(np.frombuffer(raw, "<i4"))
    return np.concatenate(found)


def _check_ids(ids: NDArray[np.integer[Any]], where: str, limits: ModelLimits) -> None:
    wrong = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if len(wrong):
        raise ServeError(where, int(wrong[0]), f"the model has token ids 0 to {limits.vocab_size - 1}",
                         "use the tokenizer from get_tokenizer")  # fmt: skip


def _column(given: Mapping[str, Any], name: str, where: str, length: int, loss: str) -> NDArray[Any]:
    """[length] of a datum's input. Raises ServeError if it is missing or has another shape."""
    field = f"{where}.loss_fn_inputs.{name}"
    if name not in given:
        raise ServeError(field, None, f"{loss} requires it", f"send one number for each of the {length} input tokens")
    tensor = given[name]
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise ServeError(field, list(tensor.shape), "several targets for a position are not supported",
                         "send one target and one weight for each position")  # fmt: skip
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or len(tensor.dense) % dtype.itemsize or (name == "target_tokens" and dtype.kind != "i"):
        raise ServeError(field, f"dtype {tensor.dtype}", "targets are int64, everything else is float32 or int64",
                         "let the SDK convert it")  # fmt: skip
    column = np.frombuffer(tensor.dense, dtype)
    if len(column) != length:
        raise ServeError(field, f"{len(column)} numbers", f"the input has {length} tokens",
                         "send one for each: row t predicts the token after token t")  # fmt: skip
    return column


def _numbers(column: NDArray[Any], name: str, where: str) -> NDArray[np.float32]:
    values = column.astype(np.float32)
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ServeError(f"{where}.loss_fn_inputs.{name}[{at}]", float(values[at]), "must be finite", "correct it")
    return values


def passed_bytes(found: PassResult, notes: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput: the loss, and `logprobs` of every datum; `notes` are further metrics."""
    message = proto.ForwardBackwardOutput(loss_fn_output_type="TorchLossReturn")
    record = message.loss_fn_outputs.add()
    record.num_datums = len(found.log_probs)
    field = record.fields["logprobs"]
    field.dtype = proto.FLOAT32
    parts = [column.astype("<f4", copy=False).tobytes() for column in found.log_probs]
    field.data = b"".join(parts)
    field.offsets = np.cumsum([0, *(len(part) for part in parts)]).astype("<i8").tobytes()
    for name, value in {"loss:sum": found.loss, **notes}.items():
        message.metrics[name] = value
    return message.SerializeToString()


def sampled_bytes(found: Sequence[GenerateResult]) -> bytes:
    """A SampleResponse: all continuations of a prompt; the first has the prompt's scores."""
    message = proto.SampleResponse(prompt_cache_hit_tokens=found[0].cached_tokens)
    for each in found:
        message.sequences.add(
            stop_reason=proto.STOP if each.finish == "stop" else proto.LENGTH,
            tokens=each.output_ids.astype("<i4", copy=False).tobytes(),
            logprobs=each.log_probs.astype("<f4", copy=False).tobytes(),
        )
    if (scores := found[0].scores) is not None:
        message.prompt_logprobs = scores.astype("<f4", copy=False).tobytes()
    return message.SerializeToString()
