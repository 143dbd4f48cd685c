"""Settings of a teacher that SGLang serves for on-policy distillation, and the rules about teachers.

The other way is `model.teacher_path`: the trainer's own ranks hold the teacher. docs/algorithms.md says which to take.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from mslime.config.engines import SGLANG_RESERVED, SGLangConfig
from mslime.config.errors import ConfigError

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig

TEACHER_RESERVED: dict[str, str] = SGLANG_RESERVED | {
    "model_path": "use teacher.path",
    "tokenizer_path": "it is that of teacher.path",
    "enable_return_routed_experts": "a teacher's routes are not used",
}


class TeacherConfig(SGLangConfig):
    """SGLang servers that score finished responses for `algorithm.opd_coef`; any model with the student's tokenizer."""

    section: ClassVar[str] = "teacher"
    reserved: ClassVar[dict[str, str]] = TEACHER_RESERVED

    path: Path | None = Field(
        default=None, description="Hugging Face checkpoint of the teacher, for servers that mslime launches."
    )
    urls: list[str] = Field(
        default_factory=list, description="Attach to these running servers of the teacher instead of launching."
    )
    concurrency: int = Field(default=64, ge=1, description="Responses that are being scored at once, per server.")

    @property
    def serves(self) -> bool:
        """Whether SGLang serves the teacher."""
        return bool(self.urls) or self.path is not None

    @property
    def launched(self) -> int:
        """Servers that mslime launches."""
        return self.num_engines if self.path is not None else 0


def check_teacher(config: RunConfig) -> None:
    """A teacher is there exactly when it is distilled, in one place, and scores what the student's policy is.

    Raises:
        ConfigError: the first of these that does not hold.
    """
    served, held, coefficient = config.teacher, config.model.teacher_path, config.algorithm.opd_coef
    if served.urls and served.path is not None:
        raise ConfigError(
            "teacher.path",
            str(served.path),
            f"the teacher is served already, at {served.urls[0]}",
            "remove teacher.path to attach to teacher.urls, or teacher.urls to launch servers",
        )
    if served.serves and held is not None:
        raise ConfigError(
            "model.teacher_path",
            str(held),
            "SGLang serves the teacher already (teacher.urls or teacher.path)",
            "keep one: servers for any model with the student's tokenizer, model.teacher_path for a small one",
        )
    if (coefficient > 0) != (served.serves or held is not None):
        field = "teacher.urls" if served.urls else "teacher.path" if served.path else "model.teacher_path"
        value = served.urls or served.path or held
        raise ConfigError(
            field,
            value if value is None or isinstance(value, list) else str(value),
            f"a teacher goes together with algorithm.opd_coef, which is {coefficient}",
            "set both or neither; the teacher is one of teacher.urls, teacher.path and model.teacher_path",
        )
    if served.serves:
        _check_served(config)


def _check_served(config: RunConfig) -> None:
    served, temperature = config.teacher, config.rollout.temperature
    if temperature != 1.0:
        raise ConfigError(
            "rollout.temperature",
            temperature,
            "SGLang 0.5.23 scores the tokens of a prompt at temperature 1 whatever it is asked for, so the teacher's "
            "log-probs would not be comparable with the policy's",
            "set it to 1.0, or let the trainer hold the teacher (model.teacher_path), which scores at any temperature",
        )
    shared = sorted({u.rstrip("/") for u in served.urls} & {u.rstrip("/") for u in config.sglang.urls})
    if shared:
        raise ConfigError(
            "teacher.urls",
            shared[0],
            "this server is one of sglang.urls: it gets the student's weights after every step",
            "give the teacher servers of its own",
        )
    device, per_node = config.cluster.device, config.cluster.gpus_per_node
    if device == "cuda" and served.launched and served.tp_size > per_node:
        raise ConfigError(
            "teacher.tp_size",
            served.tp_size,
            f"a server that mslime launches lives on one machine, which has {per_node} GPUs",
            "lower it, or start the servers over several machines yourself and name them in teacher.urls",
        )
