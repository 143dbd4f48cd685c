"""Process placement in a Ray cluster: the run's needs against the machines' resources, and the machine of each rank.

Ray numbers the bundles of a placement group without regard to machines once there are more than sixteen. Neighbouring
ranks share most traffic, tensor-parallel groups above all, so ranks are numbered here: by machine, then by GPU.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, cast

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mslime.config.cluster import RAY_START, ClusterConfig, PlacementClaim, count_gpus, describe_gpus
from mslime.config.errors import ConfigError

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class BundleLocation:
    """Location of one bundle of a placement group.

    Attributes:
        address: of the machine.
        node: Ray's id of the machine.
        gpu: the number of its first GPU there.
    """

    address: str
    node: str = ""
    gpu: int = 0

    @property
    def order(self) -> tuple[int, int, str, str, int]:
        """Sort key with numeric addresses, which keeps machines of one rack together: 10.0.0.9 before 10.0.0.10."""
        try:
            parsed = ip_address(self.address)
        except ValueError:  # a host name
            return (0, 0, self.address, self.node, self.gpu)
        return (parsed.version, int(parsed), "", self.node, self.gpu)


@dataclass(frozen=True)
class ActorPlacement:
    """Placement of a process.

    Attributes:
        options: Ray's options of its actor.
        gpus: GPUs for the process if Ray does not assign them: those of trainer ranks that it shares.
    """

    options: dict[str, Any]
    gpus: tuple[str, ...] | None = None


def gpus_of(spots: Sequence[BundleLocation]) -> tuple[str, ...]:
    """Numbers of neighbouring GPUs for one engine.

    Raises:
        ConfigError: they are not on one machine.
    """
    if len({(spot.address, spot.node) for spot in spots}) > 1:
        raise ConfigError(
            "sglang.tp_size", len(spots),
            f"the trainer's GPUs that an engine would share are on {' and '.join({spot.address for spot in spots})}; "
            f"free GPUs of a machine must come in multiples of {len(spots)}",
            "stop other jobs on these machines, or choose a size that divides each machine's number of GPUs",
        )  # fmt: skip
    return tuple(str(spot.gpu) for spot in spots)


def in_order(spots: Sequence[BundleLocation]) -> list[int]:
    """Indices of the bundles by machine, then by GPU: rank r belongs in bundle `in_order(spots)[r]`."""
    return sorted(range(len(spots)), key=lambda bundle: spots[bundle].order)


def spots_of(group: PlacementGroup, gpus: bool) -> list[BundleLocation]:
    """Locations of all bundles of a placed group.

    Args:
        gpus: also run a short task in every bundle that finds its GPU; otherwise the number is 0.
    """
    where: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    bundles, find_gpu = sorted(where), cast("Any", ray.remote(_first_gpu))
    strategies = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle) for bundle in bundles]
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 1, "max_retries": 0}
    numbers = [0] * len(bundles)
    if gpus:
        numbers = ray.get([find_gpu.options(scheduling_strategy=each, **options).remote() for each in strategies])
    return [BundleLocation(addresses[where[bundle]], where[bundle], numbers[bundle]) for bundle in bundles]


def _first_gpu() -> int:
    return min(int(gpu) for gpu in ray.get_gpu_ids())


def machines() -> dict[str, str]:
    """`name (address)` of every machine of the cluster, by Ray's id."""
    return {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in ray.nodes()}


def on_other_machines(placed: Mapping[str, Sequence[str]], here: str, names: Mapping[str, str]) -> list[str]:
    """One line for each other machine, with the processes placed there.

    Args:
        placed: Ray's id of each process's machine, in order, by the processes' common name without their number.
        here: the id of this machine.
        names: of the machines.
    """
    found: dict[str, list[str]] = {}
    for called, nodes in placed.items():
        for node in dict.fromkeys(nodes):
            numbers = [index for index, its in enumerate(nodes) if its == node]
            if node != here:
                found.setdefault(node, []).extend(_runs(called, numbers))
    return [f"{names.get(node, node)}: {', '.join(processes)}" for node, processes in found.items()]


def _runs(called: str, numbers: Sequence[int]) -> list[str]:
    """`rank0 to rank3`, `rank6` of 0, 1, 2, 3, 6."""
    begins = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(begins, ends, strict=True)
    return [f"{called}{a}" if a == b else f"{called}{a} to {called}{b}" for a, b in pairs]


def check_tensor_groups(spots: Sequence[BundleLocation], tp: int) -> None:
    """Raise if tensor-parallel neighbours are on several machines.

    Args:
        spots: in rank order.

    Raises:
        ConfigError: names the ranks and their machines.
    """
    for first in range(0, len(spots), tp):
        machines = {(spot.address, spot.node): spot.address for spot in spots[first : first + tp]}
        if len(machines) > 1:
            raise ConfigError(
                "megatron.tensor_model_parallel_size",
                tp,
                f"ranks {first} to {first + tp - 1} would share every layer over the network, between "
                f"{' and '.join(machines.values())}; free GPUs of a machine must come in multiples of {tp}",
                "stop other jobs on these machines, or choose a size that divides each machine's number of GPUs",
            )


def refuse_small_cluster(cluster: ClusterConfig, wanted: Sequence[PlacementClaim]) -> None:
    """Compare the run's needs with the resources of all machines, before any process waits for them.

    Waits `cluster.join_s` for machines that are still joining.

    Raises:
        ConfigError: the cluster can never hold the run.
    """
    deadline = time.monotonic() + cluster.join_s
    while (problem := _too_small(cluster, wanted)) is not None:
        if time.monotonic() >= deadline:
            raise problem
        time.sleep(_POLL_SECONDS)


def _too_small(cluster: ClusterConfig, wanted: Sequence[PlacementClaim]) -> ConfigError | None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if cluster.device == "cuda":
        have, largest = [int(resources.get("GPU", 0)) for resources in nodes], max(claim.gpus for claim in wanted)
        if sum(have) < count_gpus(wanted):
            return _refusal(cluster.ray_address, f"needs {describe_gpus(wanted)}", f"{sum(have)}", len(nodes))
        if max(have) < largest:
            return _refusal(
                cluster.ray_address, f"launches engines of {largest} GPUs", f"at most {max(have)} on one", len(nodes)
            )
    cores, processes = sum(int(resources.get("CPU", 0)) for resources in nodes), sum(claim.count for claim in wanted)
    if cores < processes:
        needs = f"starts {processes} processes, one per core"
        return _refusal(cluster.ray_address, needs, f"{cores} cores", len(nodes))
    return None


def _refusal(address: str | None, needs: str, has: str, nodes: int) -> ConfigError:
    where = f"the Ray cluster at {address} ({nodes} machines)" if address else "this machine"
    return ConfigError(
        "cluster.ray_address",
        address,
        f"the run {needs}, and {where} has {has}",
        "add machines with `ray start --address=...` (cluster.join_s waits for them), or use fewer ranks or engines"
        if address
        else f"start Ray on more machines ({RAY_START}) and set RAY_ADDRESS=THAT_MACHINE:6379; see docs/clusters.md",
    )
