"""Settings of the machines: device, number of nodes, Ray cluster, and environment of the run's processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, field_validator

from mslime.config.base import Device, OffloadTo, Placement, Section, Task
from mslime.config.errors import ConfigError

_OWN_VARIABLES: dict[str, str] = {
    "CUDA_VISIBLE_DEVICES": "Ray assigns GPUs to processes",
    "PYTHONPATH": "workers use the driver's import path",
    "CUDA_DEVICE_MAX_CONNECTIONS": "megatron-core and SGLang need different values, and set them",
    "OMP_NUM_THREADS": "use cluster.trainer_threads",
    "MKL_NUM_THREADS": "use cluster.trainer_threads",
    "RANK": "mslime sets the rank",
    "WORLD_SIZE": "mslime sets the number of ranks",
    "MASTER_ADDR": "mslime sets the address of the rendezvous",
    "MASTER_PORT": "mslime sets the address of the rendezvous",
}
RAY_START = "`ray start --head` on one machine and `ray start --address=THAT_MACHINE:6379` on the others"


class ClusterConfig(Section):
    """Machines and Ray: devices, placement of trainer and engines, environment of the processes."""

    device: Device = Field(default="auto", description="auto: cuda if a GPU is visible, else cpu.")
    trainer_ranks: int | None = Field(
        default=None, ge=1, le=65536, description="Trainer processes; default TP x PP x CP."
    )
    placement: Placement = Field(
        default="separate",
        description="separate: engines have their own GPUs. colocated: engines and trainer take turns on the same GPUs "
        "(docs/colocated.md).",
    )
    offload_to: OffloadTo = Field(
        default="auto",
        description="colocated: place of weights and optimizer during generation. memory: pinned host memory. disk: "
        "files. auto: memory on a GPU, disk on a CPU.",
    )
    offload_directory: Path | None = Field(
        default=None,
        description="colocated, disk: a directory on a fast local disk of each trainer host, for files that are "
        "deleted with their process. null: the run's.",
    )
    gpus_per_node: int = Field(default=8, ge=1, description="GPUs of one machine, for placement.")
    gpu_memory_gb: float = Field(
        default=80, gt=0, description="Nominal memory of one GPU (80, 141), for `mslime plan`."
    )
    host_memory_gb: float | None = Field(
        default=None,
        gt=0,
        description="Memory of one host. plan, check and train reject a run for which `mslime plan` estimates more "
        "than 90% of it; null: no check.",
    )
    gpu_network_gbits: float = Field(
        default=400,
        gt=0,
        description="Network bandwidth of one GPU, in Gb/s, for the lower bound on sync time in `mslime plan`.",
    )
    gpu_nvlink_gb_per_s: float = Field(
        default=450,
        gt=0,
        description="Bandwidth between GPUs of one host, in GB/s, for the lower bound on sync time in `mslime plan`.",
    )
    gpu_host_gb_per_s: float = Field(
        default=25,
        gt=0,
        description="Bandwidth between a GPU and its host, in GB/s, while all GPUs of the host copy, for `mslime "
        "plan`. Default: half of PCIe 5.0.",
    )
    directory_gb_per_s: float = Field(
        default=10,
        gt=0,
        description="Bandwidth of a shared directory, in GB/s for all hosts together, for `mslime plan`. The default "
        "is an assumption.",
    )
    ray_address: str | None = Field(
        default_factory=lambda: os.environ.get("RAY_ADDRESS") or None,
        description="Address of a Ray cluster (HOST:6379, or auto on one of its hosts). Default: RAY_ADDRESS, else the "
        "run starts Ray on this host.",
    )
    join_s: float = Field(
        default=0,
        le=1e9,
        ge=0,
        description="Seconds to wait for more hosts to join the Ray cluster; 0: reject a cluster that is too small at "
        "once.",
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="Consecutive restarts after a lost trainer rank or rollout service; engines keep running, and a "
        "new checkpoint resets the count. With 0, placement colocated or several adapters, the run ends.",
    )
    env: dict[str, Annotated[str, Field(coerce_numbers_to_str=True)]] = Field(
        default_factory=dict,
        description="Environment variables of all processes of the run, for example NCCL_DEBUG. No secrets: the run's "
        "config.yaml shows them.",
    )
    trainer_threads: int = Field(default=1, ge=1, description="Intra-op CPU threads of a trainer rank.")

    @property
    def colocated(self) -> bool:
        """Whether engines and trainer take turns on the same GPUs."""
        return self.placement == "colocated"

    @field_validator("ray_address")
    @classmethod
    def _one_of_rays(cls, address: str | None) -> str | None:
        if address is not None and address.startswith("ray://"):
            raise ConfigError(
                "cluster.ray_address", address, "Ray's client protocol is not supported",
                "start mslime on a machine of the cluster, and set HOST:6379 or auto",
            )  # fmt: skip
        return None if address == "local" else address

    @field_validator("env")
    @classmethod
    def _not_our_own(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if name in _OWN_VARIABLES:
                raise ConfigError(f"cluster.env.{name}", value, _OWN_VARIABLES[name], "remove it")
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError(
                    "cluster.env", name, "is not a valid name of an environment variable", "write NAME: value"
                )
        return env


def check_cluster(cluster: ClusterConfig, *, task: Task) -> None:
    """Reject a placement that the task does not support, and offload settings of a trainer that is never offloaded.

    Raises:
        ConfigError: the first broken rule.
    """
    if not cluster.colocated:
        for name in ("offload_to", "offload_directory"):
            value = getattr(cluster, name)
            if value != ClusterConfig.model_fields[name].default:
                raise ConfigError(f"cluster.{name}", str(value), "a trainer with separate GPUs is never offloaded",
                               "remove it, or set cluster.placement: colocated")  # fmt: skip
        return
    if cluster.offload_directory is not None and cluster.offload_to == "memory":
        raise ConfigError("cluster.offload_directory", str(cluster.offload_directory),
                       "has no effect with cluster.offload_to: memory", "remove one of the two")  # fmt: skip
    if task == "sft":
        raise not_colocated("supervised training has no engines", "remove it")


def not_colocated(rule: str, hint: str) -> ConfigError:
    """Error for settings that exclude `cluster.placement: colocated`. Engines and trainer never compute at the same
    time; a section that needs both at once raises this error.
    """
    return ConfigError("cluster.placement", "colocated", rule, hint)


def worker_environment(cluster: ClusterConfig, engine_fields: dict[str, Any]) -> dict[str, str]:
    """Environment variables of every process of the run.

    Trainer ranks and engines join one NCCL communicator for weight syncs, and NCCL fails if its members have different
    values of these two settings. SGLang 0.5.23 sets them itself if they are unset (`entrypoints/engine.py`), so all
    processes use its values.

    Args:
        engine_fields: SGLang's own fields, `sglang.extra`.
    """
    if cluster.device != "cuda":
        return dict(cluster.env)
    return {**engine_nccl(engine_fields), **cluster.env}


def engine_nccl(extra: dict[str, Any]) -> dict[str, str]:
    """NCCL settings that SGLang 0.5.23 would use for engines with these further flags."""
    symmetric = bool(extra.get("enable_symm_mem"))
    return {
        "NCCL_CUMEM_ENABLE": str(int(symmetric)),
        "NCCL_NVLS_ENABLE": str(int(symmetric or bool(extra.get("enable_nccl_nvls")))),
    }


@dataclass(frozen=True)
class PlacementClaim:
    """Processes of one kind that a run places, and the GPUs that each of them needs on its machine."""

    what: str
    count: int
    gpus: int


class RunParts(NamedTuple):
    """Parts of a run to start; without one of them the run serves to inspect the other."""

    trainers: bool = True
    engines: bool = True


WHOLE = RunParts()


def count_gpus(wanted: Sequence[PlacementClaim]) -> int:
    """GPUs of all claims."""
    return sum(claim.count * claim.gpus for claim in wanted)


def describe_gpus(wanted: Sequence[PlacementClaim]) -> str:
    """`24 GPUs (16 trainer, 8 engines)`."""
    parts = ", ".join(f"{claim.count * claim.gpus} {claim.what}" for claim in wanted)
    return f"{count_gpus(wanted)} GPUs ({parts})"


def check_machines(cluster: ClusterConfig, wanted: Sequence[PlacementClaim]) -> None:
    """Reject a run without a Ray cluster whose GPUs do not fit one machine. Raises ConfigError."""
    if cluster.device != "cuda" or cluster.ray_address is not None or count_gpus(wanted) <= cluster.gpus_per_node:
        return
    raise ConfigError(
        "cluster.ray_address",
        None,
        f"the run needs {describe_gpus(wanted)}, and one machine has {cluster.gpus_per_node} (cluster.gpus_per_node)",
        f"start Ray on all machines ({RAY_START}), then set RAY_ADDRESS=THAT_MACHINE:6379 or this field; "
        "docs/clusters.md shows it, also under Slurm and Kubernetes",
    )


# Specifications of GPUs from NVIDIA's data sheets: dense bfloat16 without sparsity, memory bandwidth, NVLink in one
# direction.


@dataclass(frozen=True)
class GpuSpec:
    """Specification of one GPU.

    Attributes:
        tflops: 10^12 floating-point operations a second of dense bfloat16 matrix products.
        memory: GB/s of its memory.
        nvlink: GB/s to other GPUs, in one direction; 0 without NVLink.
        links: NVLinks.
        memory_gb: nominal size.
    """

    tflops: float
    memory: float
    nvlink: float
    links: int
    memory_gb: int


GPUS = {
    "NVIDIA B300": GpuSpec(2250, 8000, 900, 18, 288),
    "NVIDIA B200": GpuSpec(2250, 8000, 900, 18, 180),
    "NVIDIA GH200": GpuSpec(989.4, 4000, 450, 18, 96),
    "NVIDIA H200 NVL": GpuSpec(835.5, 4800, 450, 18, 141),
    "NVIDIA H200": GpuSpec(989.4, 4800, 450, 18, 141),
    "NVIDIA H100 NVL": GpuSpec(835.5, 3938, 300, 12, 94),
    "NVIDIA H100 PCIe": GpuSpec(756.5, 2039, 300, 12, 80),
    "NVIDIA H100": GpuSpec(989.4, 3352, 450, 18, 80),
    "NVIDIA H800": GpuSpec(989.4, 3352, 200, 8, 80),
    "NVIDIA H20": GpuSpec(148, 4000, 450, 18, 96),
    "NVIDIA A100-SXM4-80GB": GpuSpec(312, 2039, 300, 12, 80),
    "NVIDIA A100-SXM4-40GB": GpuSpec(312, 1555, 300, 12, 40),
    "NVIDIA A100 80GB PCIe": GpuSpec(312, 1935, 300, 12, 80),
    "NVIDIA A100-PCIE-40GB": GpuSpec(312, 1555, 300, 12, 40),
    "NVIDIA L40S": GpuSpec(362, 864, 0, 0, 48),
}
"""By prefix of the driver's name for the GPU; the longest match counts."""


def nominal(name: str) -> GpuSpec | None:
    """Specification of the GPU with the driver's `name`; None: not in the table."""
    fitting = [known for known in GPUS if name.startswith(known) and not name[len(known) : len(known) + 1].isdigit()]
    return GPUS[max(fitting, key=len)] if fitting else None


def usual_gpu(memory_gb: float) -> str:
    """The usual GPU with the nearest nominal memory: A100 of 40 GB, H100, H200, B200, B300."""
    usual = ("NVIDIA A100-SXM4-40GB", "NVIDIA H100", "NVIDIA H200", "NVIDIA B200", "NVIDIA B300")
    return min(usual, key=lambda name: abs(GPUS[name].memory_gb - memory_gb))
