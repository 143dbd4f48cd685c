"""The served protobuf messages of the SDK (tinker 0.38.0, package `tinker_public`).

Field numbers and types are the wire format; the messages are built at import, so no generated code depends on the
installed protobuf. Other fields are skipped when a message is parsed, as usual in protobuf.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "mslime_serve"
_FIELD = descriptor_pb2.FieldDescriptorProto

# name: (number, type); `*` is repeated, `?` optional, `map T` a map from strings to T, `| group` one of a group.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {
        "dense": (1, "bytes | encoding"),
        "sparse_csr": (2, "SparseCsr | encoding"),
        "dtype": (3, "DType"),
        "shape": (4, "*int64"),
    },
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "Other": {},
    "Chunk": {
        "encoded_text": (1, "EncodedTextChunk | chunk"),
        "image": (2, "Other | chunk"),
        "dmel": (3, "Other | chunk"),
    },
    "Datum": {"model_input": (1, "*Chunk"), "loss_fn_inputs": (2, "map Tensor")},
    "LossConfigValue": {"number": (1, "double | value"), "text": (2, "string | value")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "*Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "map double"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map LossConfigValue"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "DType"),
        "trailing_shape": (4, "*int64"),
    },
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "map BatchedTensor"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "*ArrayRecord"),
        "metrics": (3, "map double"),
    },
    "SampledSequence": {"stop_reason": (1, "StopReason"), "tokens": (2, "bytes"), "logprobs": (3, "?bytes")},
    "SampleResponse": {
        "sequences": (1, "*SampledSequence"),
        "prompt_logprobs": (2, "?bytes"),
        "prompt_cache_hit_tokens": (4, "int32"),
    },
}
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
STOP, LENGTH = 0, 1
FLOAT32, INT64 = 1, 2
_SCALARS = {
    "bytes": _FIELD.TYPE_BYTES,
    "string": _FIELD.TYPE_STRING,
    "double": _FIELD.TYPE_DOUBLE,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "bool": _FIELD.TYPE_BOOL,
}


def _typed(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _FIELD.TYPE_ENUM if kind in _ENUMS else _FIELD.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{kind}"


def _add_map(message: Any, field: Any, kind: str) -> None:
    entry = message.nested_type.add(name=f"{field.name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    key = entry.field.add(name="key", number=1, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_STRING)
    assert key.number == 1
    _typed(entry.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL), kind)
    field.label, field.type = _FIELD.LABEL_REPEATED, _FIELD.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


def _add_message(file: Any, name: str, fields: dict[str, tuple[int, str]]) -> None:
    message = file.message_type.add(name=name)
    groups: list[str] = []
    maybe: list[Any] = []
    for field_name, (number, spelled) in fields.items():
        kind, _, group = (part.strip() for part in spelled.partition("|"))
        field = message.field.add(name=field_name, number=number, label=_FIELD.LABEL_OPTIONAL)
        if kind.startswith("map "):
            _add_map(message, field, kind.removeprefix("map "))
            continue
        _typed(field, kind.lstrip("*?"))
        if kind.startswith("*"):
            field.label = _FIELD.LABEL_REPEATED
        if kind.startswith("?"):
            maybe.append(field)
        if group:
            if group not in groups:
                groups.append(group)
            field.oneof_index = groups.index(group)
    for field in maybe:  # optional groups of one, which must come last
        field.proto3_optional = True
        field.oneof_index = len(groups)
        groups.append(f"_{field.name}")
    for group in groups:
        message.oneof_decl.add(name=group)


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="mslime_serve.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        _add_message(file, name, fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _build()
ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = _CLASSES["SampleResponse"]
