"""Several adapters on one base; each has its own trainer and takes its turn in the model.

An adapter's trainer has its own modules, gradient buffers, optimizer, schedule, step count, loss and recorded routes.
Only the frozen base is shared. While a trainer works, only its modules are in the model. So its results equal those of
a separate run bit for bit, regardless of the other adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter

from mslime.backends.megatron.step.base_model import Base
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import ConfigError
from mslime.config.resolved import PolicySpec

SHARED = (
    "checkpoint", "layout", "megatron", "device", "replay", "teacher", "fp8", "asked_engine_dtype", "weights.senders",
    "train.logit_bytes",
)  # fmt: skip
"""Fields of a spec that belong to the base."""


class AdapterTrainers:
    """One rank's trainers of adapters, by name. All ranks call the same methods in the same order.

    Args:
        base: model of this rank, without adapters.
    """

    def __init__(self, base: Base) -> None:
        self.base = base
        self._trainers: dict[str, MegatronTrainer] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters, oldest first."""
        return tuple(self._trainers)

    def create(self, name: str, spec: PolicySpec) -> None:
        """Create an adapter and its trainer. A collective.

        Args:
            spec: the same as for a run of this adapter alone.

        Raises:
            ConfigError: the name is taken, or `spec` is not of an adapter on this base. The base stays unchanged.
            CheckpointError: the adapter to start from is of another model, rank, scale or targets.
        """
        if name in self._trainers:
            raise ConfigError("adapters.name", name, "another adapter has it", "give each adapter another name")
        self._check(name, spec)
        trainer = MegatronTrainer.on(self.base, spec)
        trainer.take_out()
        self._trainers[name] = trainer

    def free(self, name: str) -> None:
        """Delete an adapter and free its memory."""
        self._of(name)
        del self._trainers[name]

    @contextmanager
    def placed(self, name: str) -> Iterator[MegatronTrainer]:
        """Context manager: the adapter's trainer with its modules in the model, usable like a single run's trainer.

        Raises:
            ConfigError: the adapter does not exist.
        """
        trainer = self._of(name)
        trainer.put_in()
        try:
            yield trainer
        finally:
            trainer.take_out()

    def of(self, names: Iterable[str]) -> dict[str, MegatronTrainer]:
        """Trainers of these adapters for a shared pass (`joint_step`); none of the adapters is in the model.

        Raises:
            ConfigError: an adapter does not exist.
        """
        return {name: self._of(name) for name in names}

    def _of(self, name: str) -> MegatronTrainer:
        if name not in self._trainers:
            raise ConfigError(
                "adapters.name", name, f"there are {', '.join(self._trainers) or 'none'}", "name one of them"
            )
        return self._trainers[name]

    def _check(self, name: str, spec: PolicySpec) -> None:
        if not spec.lora.on:
            raise ConfigError(f"adapters.{name}.lora.rank", 0, "must be above 0", "set it, 8 or 16 are usual")
        for field in SHARED:
            own, shared = attrgetter(field)(spec), attrgetter(field)(self.base.spec)
            if own != shared:
                raise ConfigError(
                    f"adapters.{name}: {field}", str(own), f"all adapters share the base's, {shared}", "remove it"
                )
        if spec.reference not in (None, spec.checkpoint, self.base.spec.reference):
            raise ConfigError(
                f"adapters.{name}: model.reference_path", str(spec.reference), "the base holds no such weights",
                "use the base, or one reference for all adapters",
            )  # fmt: skip
