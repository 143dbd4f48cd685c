"""`mslime doctor`: what each check says of machines that are made up here, and of this one. GPUs are a fake NVML's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mslime.cli import main
from mslime.config.cluster import GPUS, nominal
from mslime.config.errors import ConfigError
from mslime_plugins.doctor import doctor_command, gpus, host, network_checks, packages, speeds, step
from mslime_plugins.doctor.findings import DoctorOptions, Finding, Gpu, HostCheck, Node, fail, ok, unseen, warn
from mslime_plugins.doctor.gpus import REASONS, see_gpus
from mslime_plugins.doctor.speeds import MATMUL
from tests.fixtures.fake_nvml import GIB, H100, FakeNvml


def machine(*changes: Mapping[str, Any], **node: Any) -> Node:
    """A node with a healthy H100 for each of `changes`; two without any."""
    healthy, blind = see_gpus(lambda: FakeNvml(max(1, len(changes)) if changes else 2))
    assert not blind
    changed = tuple(replace(gpu, **dict(change)) for gpu, change in zip(healthy, changes or ({}, {}), strict=True))
    return Node(DoctorOptions(), changed, **node)


def told(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(each.status, each.found) for each in findings]


def worst(findings: Iterator[Finding]) -> Finding:
    return max(findings, key=lambda each: ("ok", "cannot see", "warn", "fail").index(each.status))


# ------------------------------------------------------------------------------------------------------------- GPUs


def test_the_fake_nvml_has_no_name_that_the_real_one_lacks() -> None:
    pynvml = pytest.importorskip("pynvml", reason="an environment from before nvidia-ml-py was asked for")
    fake = FakeNvml()
    names = [*fake.answers, *REASONS, *(name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML")))]
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert pynvml.NVML_NVLINK_MAX_LINKS == fake.NVML_NVLINK_MAX_LINKS
    bits = [getattr(pynvml, name) for name in REASONS]
    assert len(set(bits)) == len(bits)


def test_a_gpu_is_read_whole() -> None:
    nvml = FakeNvml(1)
    nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"] = (
        nvml.nvmlClocksEventReasonSwPowerCap | nvml.nvmlClocksEventReasonHwThermalSlowdown
    )
    found, blind = see_gpus(lambda: nvml)
    assert blind == "" and not nvml.open
    assert found == (
        Gpu(0, H100, 80 * GIB, GIB // 2, True, 0, False, False, True, 700.0, 700.0, 32,
            ("power limit", "heat"), 16, 16, 18),
    )  # fmt: skip


def test_what_a_gpu_does_not_tell_is_none_and_stops_nothing() -> None:
    silent = tuple(FakeNvml().answers.keys() - {"nvmlDeviceGetName"})
    [gpu], _ = see_gpus(lambda: FakeNvml(1, silent=silent))
    assert (gpu.ecc, gpu.power_limit, gpu.persistence, gpu.slowed_by, gpu.mig) == (None, None, None, (), False)
    node = Node(DoctorOptions(), (gpu,))
    assert ("cannot see", "the driver does not report ECC") in told(gpus.check_gpus(node))
    assert "fail" not in {status for status, _ in told(gpus.check_clocks(node)) + told(gpus.check_links(node))}


def test_without_a_driver_or_the_library_it_is_said_which() -> None:
    def missing() -> Any:
        raise ImportError("pynvml")

    assert see_gpus(missing) == ((), "nvidia-ml-py is not installed")
    assert see_gpus(lambda: FakeNvml(driver=False)) == ((), "no NVIDIA driver responds (Driver Not Loaded)")
    assert see_gpus(lambda: FakeNvml(0)) == ((), "the NVIDIA driver shows no GPU")
    blind = Node(DoctorOptions(), (), "no NVIDIA driver answers")
    for check in (gpus.check_gpus, gpus.check_clocks, gpus.check_links):
        assert told(check(blind)) == [("cannot see", "no NVIDIA driver answers")]


def test_healthy_gpus_give_nothing_but_ok() -> None:
    node = machine()
    for check in (gpus.check_gpus, gpus.check_clocks, gpus.check_links):
        assert {status for status, _ in told(check(node))} == {"ok"}, told(check(node))


@pytest.mark.parametrize(("check", "change", "status", "says"), [
    (gpus.check_gpus, {"name": "NVIDIA X9000"}, "warn", "NVIDIA X9000"),
    (gpus.check_gpus, {"memory": 40 * GIB}, "warn", "GPUs differ"),
    (gpus.check_gpus, {"ecc": False}, "warn", "ECC is off on GPU 1"),
    (gpus.check_gpus, {"uncorrected": 3}, "fail", "uncorrected memory errors"),
    (gpus.check_gpus, {"remap_failed": True}, "fail", "could not be replaced, on GPU 1"),
    (gpus.check_gpus, {"remap_pending": True}, "warn", "to be replaced on GPU 1"),
    (gpus.check_gpus, {"mig": True}, "fail", "MIG is on for GPU 1"),
    (gpus.check_gpus, {"processes": (77,)}, "warn", "by processes 77"),
    (gpus.check_gpus, {"used": 30 * GIB}, "warn", "up to 30.0 GiB, by processes that are not visible here"),
    (gpus.check_clocks, {"persistence": False}, "warn", "persistence mode is off on GPU 1"),
    (gpus.check_clocks, {"power_limit": 500.0}, "warn", "power limit 500 W on GPU 1, the default is 700 W"),
    (gpus.check_clocks, {"slowed_by": ("heat",)}, "warn", "reduced by heat on GPU 1"),
    (gpus.check_clocks, {"temperature": 85}, "warn", "GPU 1 at 85 C before any work"),
    (gpus.check_links, {"links": 12}, "fail", "12 of 18 NVLinks are up on GPU 1"),
    (gpus.check_links, {"pcie_width": 8}, "warn", "PCIe has 8 of 16 lanes on GPU 1"),
])  # fmt: skip
def test_a_fault_of_one_gpu_is_named_with_what_to_do(
    check: Any, change: dict[str, Any], status: str, says: str
) -> None:
    found = [each for each in check(machine({}, change)) if each.status != "ok"]
    assert any(each.status == status and says in each.found and each.todo for each in found), found


def test_the_driver_is_compared_with_the_cuda_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def pretend(driver: str | None, newest: int | None, built: str | None, broken: str | None = None) -> Finding:
        monkeypatch.setattr(gpus, "driver_version", lambda: driver)
        monkeypatch.setattr(gpus, "cuda_of_driver", lambda: newest)
        monkeypatch.setattr(gpus, "_torch_build", lambda: built)
        monkeypatch.setattr(gpus, "failure", lambda code: broken)
        return worst(gpus.check_driver(Node(DoctorOptions(), root=tmp_path, environ={"CUDA_VISIBLE_DEVICES": ""})))

    assert pretend("580.65.06", 13000, "13.0").status == "ok"
    assert "CUDA 13 needs 580" in pretend("550.54", 13000, "13.0").found
    assert pretend("580.65.06", 12080, "13.0") == fail(
        "torch is built for CUDA 13.0, the driver supports at most 12.8", "update NVIDIA's driver"
    )
    assert pretend("580.65.06", 13000, None).found == "torch is a CPU build"
    assert "CUDA_VISIBLE_DEVICES is ''" in pretend("580.65.06", 13000, "13.0", "RuntimeError: no GPU").found
    assert pretend(None, None, None).status == "cannot see"
    card = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    lost = pretend(None, None, None)
    assert (lost.status, lost.found) == ("fail", "the machine has 1 NVIDIA GPUs, but no driver is loaded")


@pytest.mark.parametrize(
    ("name", "like"),
    [
        (H100, "NVIDIA H100"), ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"), ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H200 NVL", "NVIDIA H200 NVL"), ("NVIDIA H20", "NVIDIA H20"), ("NVIDIA H20-3e", "NVIDIA H20"),
        ("NVIDIA B200", "NVIDIA B200"), ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA H2000", "none"), ("Tesla T4", "none"),
    ],
)  # fmt: skip
def test_a_gpu_has_the_figures_of_its_own_model(name: str, like: str) -> None:
    assert nominal(name) is GPUS.get(like)


# ---------------------------------------------------------------------------------------------------------- networks


def infiniband(root: Path, **ports: str) -> Path:
    """A machine's RDMA devices: rate of each, or `down`."""
    for device, rate in ports.items():
        port = root / "sys/class/infiniband" / device / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("1: DOWN" if rate == "down" else "4: ACTIVE")
        (port / "rate").write_text(f"{'10' if rate == 'down' else rate} Gb/sec (4X NDR)\n")
    (root / "sys/module/nvidia_peermem").mkdir(parents=True)
    return root


def test_rdma_devices_are_counted_with_what_a_gpu_gets(tmp_path: Path) -> None:
    healthy = machine(root=infiniband(tmp_path / "a", mlx5_0="400", mlx5_1="400"))
    assert told(network_checks.check_infiniband(healthy)) == [
        ("ok", "2 RDMA ports are up, 800 Gb/s in total, 400 per GPU")
    ]
    lame = machine(root=infiniband(tmp_path / "b", mlx5_0="200", mlx5_1="down"))
    (tmp_path / "b/sys/module/nvidia_peermem").rmdir()
    assert [each.status for each in network_checks.check_infiniband(lame)] == ["warn", "warn", "warn"]
    assert "down: mlx5_1:1" in [each.found for each in network_checks.check_infiniband(lame)]
    dead = machine(root=infiniband(tmp_path / "c", mlx5_0="down"))
    assert told(network_checks.check_infiniband(dead)) == [("fail", "no port of mlx5_0 is up")]
    assert worst(network_checks.check_infiniband(machine(root=tmp_path / "d"))).status == "cannot see"


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("NCCL_SOCKET_IFNAME", "lo", "ok"), ("NCCL_SOCKET_IFNAME", "=lo", "ok"), ("NCCL_SOCKET_IFNAME", "=l", "fail"),
        ("NCCL_SOCKET_IFNAME", "bond7", "fail"), ("GLOO_SOCKET_IFNAME", "bond7", "fail"),
        ("NCCL_SOCKET_IFNAME", "^docker,veth", "ok"), ("NCCL_IB_HCA", "mlx5_0:1", "ok"),
        ("NCCL_IB_HCA", "mlx9", "fail"), ("NCCL_P2P_DISABLE", "1", "warn"),
        ("NCCL_P2P_DISABLE", "0", "ok"), ("NCCL_IB_DISABLE", "1", "warn"),
        ("NCCL_DEBUG", "trace", "warn"), ("NCCL_DEBUG", "INFO", "ok"),
    ],
)  # fmt: skip
def test_variables_of_nccl_are_held_against_the_machine(variable: str, value: str, status: str, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(network_checks, "_interfaces_up", lambda: ["eth0", "lo"])
    node = machine(root=infiniband(tmp_path, mlx5_0="400"), environ={variable: value})
    assert worst(network_checks.check_nccl(node)).status == status, told(network_checks.check_nccl(node))


def test_one_of_several_interfaces_must_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_checks, "_interfaces_up", lambda: ["docker0", "eth0", "ib0", "lo"])
    assert "several interfaces are up (eth0, ib0)" in worst(network_checks.check_nccl(machine())).found
    assert worst(network_checks.check_nccl(machine(environ={"NCCL_SOCKET_IFNAME": "ib0"}))).status == "ok"


def test_http_to_this_machine_is_tried_and_proxies_are_told() -> None:
    assert [each.status for each in network_checks.check_loopback(machine())] == ["ok", "ok"]
    behind = machine(environ={"http_proxy": "http://proxy:3128", "no_proxy": "example.org"})
    assert "http_proxy is set" in worst(network_checks.check_loopback(behind)).found
    fine = machine(environ={"http_proxy": "http://proxy:3128", "no_proxy": "127.0.0.1"})
    assert worst(network_checks.check_loopback(fine)).status == "ok"


@pytest.mark.parametrize(("address", "nodes", "status"), [
    ("127.0.1.1", 1, "ok"), ("127.0.1.1", 2, "warn"), ("10.0.0.5", 2, "ok"), (None, 1, "warn"),
])  # fmt: skip
def test_a_name_that_means_loopback_is_no_name_for_others(
    address: str | None, nodes: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(name: str) -> str:
        if address is None:
            raise OSError("unknown")
        return address

    monkeypatch.setattr(network_checks.socket, "gethostbyname", lookup)
    assert worst(network_checks.check_address(Node(DoctorOptions(nodes=nodes)))).status == status


# -------------------------------------------------------------------------------------------------------------- host


def test_the_disk_of_the_checkpoints_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / "outputs" / "not" / "there"
    found = list(host.check_disk(Node(DoctorOptions(directory=place))))
    assert [each.status for each in found] == ["ok", "ok"] and found[1].values["mb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_or_slow_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(free: int, speed: float) -> list[str]:
        usage = host.shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(host.shutil, "disk_usage", lambda path: usage)
        monkeypatch.setattr(host, "write_speed", lambda directory, size: speed)
        return [each.status for each in host.check_disk(machine_at(tmp_path))]

    def machine_at(directory: Path) -> Node:
        return replace(machine(), options=DoctorOptions(directory=directory))

    original = host.shutil.disk_usage
    for free, speed, statuses in (
        (GIB, 900, ["fail"]), (50 * GIB, 900, ["warn", "ok"]), (500 * GIB, 200, ["ok", "warn"]),
        (500 * GIB, 900, ["ok", "ok"]),
    ):  # fmt: skip
        monkeypatch.setattr(host.shutil, "disk_usage", original)
        assert pretend(free, speed) == statuses


def test_shared_memory_and_a_containers_limit_are_read(tmp_path: Path) -> None:
    assert worst(host.check_shared_memory(machine(root=tmp_path))).status == "cannot see"
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert host.check_shared_memory(machine(root=tmp_path)).__next__().values["total_gib"] > 0
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text(f"{4 * GIB}\n")
    assert worst(host.check_host(machine(root=tmp_path))).found.startswith("4 GiB of memory")
    assert worst(host.check_host(machine(root=tmp_path))).status == "fail"
    limit.write_text("max\n")
    assert host._container_limit(machine(root=tmp_path)) is None


@pytest.mark.parametrize(("soft", "hard", "status"), [(1024, 1024, "fail"), (20_000, 20_000, "warn"),
                                                      (65536, 65536, "ok"), (-1, -1, "ok")])  # fmt: skip
def test_open_files_are_counted(soft: int, hard: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = host.resource.getrlimit
    monkeypatch.setattr(
        host.resource, "getrlimit",
        lambda which: (soft, hard) if which == host.resource.RLIMIT_NOFILE else (-1, real(which)[1]),
    )  # fmt: skip
    assert worst(host.check_limits(Node(DoctorOptions(), root=Path("/nowhere")))).status == status


def test_rdma_needs_memory_that_may_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (2**16, 2**20))
    node = machine(root=infiniband(tmp_path, mlx5_0="400"))
    assert worst(host.check_limits(node)).found.startswith("0.1 MiB of memory may be locked")


@pytest.mark.parametrize(("off", "error", "status"), [(True, 0, "warn"), (False, 200_000, "warn"), (False, 900, "ok")])
def test_a_clock_that_nobody_keeps_is_told(off: bool, error: int, status: str) -> None:
    assert host.clock_finding(off, error).status == status
    assert len(list(host.check_clock(machine()))) == 1


# ------------------------------------------------------------------------------------------------- packages, kernels


def test_versions_are_held_against_the_pins_of_the_project() -> None:
    pins = packages.pins("cpu")
    assert pins["torch"] == "2.13.0" and pins["rich"] == "15.0.0" and "transformer-engine" not in pins
    assert packages.pins("gpu")["transformer-engine"] == "2.20.2" and "torch" not in packages.pins("gpu")
    found = {"torch": "2.13.0+cpu", "ray": "2.1", "rich": None}
    finding = packages.versions_finding({"torch": "2.13.0", "ray": "2.60.0", "rich": "15.0.0"}, found.get, "cpu")
    assert finding.status == "warn"
    assert finding.found == "ray 2.1 instead of 2.60.0; rich not installed instead of 15.0.0"
    assert packages.versions_finding({"torch": "2.13.0"}, found.get, "cpu").status == "ok"


def test_an_import_that_fails_is_a_failure_and_an_optional_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(code: str) -> str | None:
        return next((f"ImportError: {name}" for name in ("transformer_engine", "flash_attn") if name in code), None)

    monkeypatch.setattr(packages, "failure", broken)
    monkeypatch.setattr(packages, "versions_finding", lambda *arguments: ok("versions"))
    found = list(packages.check_packages(machine()))
    failed = [each.found for each in found if each.status == "fail"]
    assert failed == [
        "transformer_engine.pytorch cannot be imported (the trainer's layers and grouped experts): "
        "ImportError: transformer_engine"
    ]
    assert any(each.found.startswith("flash_attn is not installed, and is optional") for each in found)


def test_a_kernel_that_computes_something_else_is_a_failure() -> None:
    assert packages.kernel_finding("k", 1e-6, 1e-4).status == "ok"
    assert packages.kernel_finding("k", 1e-3, 1e-4).status == "fail"
    assert packages.kernel_finding("k", float("nan"), 1e-4).status == "fail"
    assert "RuntimeError: no kernel image" in packages.kernel_finding("k", "RuntimeError: no kernel image", 1e-4).found


@pytest.mark.nightly
def test_this_machines_kernels_agree_with_plain_torch_and_its_speed_is_told() -> None:
    here = Node(DoctorOptions(), (), "no driver")
    first, second = packages.check_kernels(here)
    assert first.status == "ok" and 0 < first.values["difference"] < 1e-5 and second.status == "cannot see"
    [speed] = speeds.check_speed(here)
    assert speed.status == "cannot see" and "GFLOP/s in float32" in speed.found


# ------------------------------------------------------------------------------------------------------------ speeds


@pytest.mark.parametrize(("found", "statuses"), [
    ([700, 710, 705], ["ok"]), ([450, 450, 450], ["warn"]), ([300, 300, 300], ["fail"]),
    ([700, 710, 600], ["ok", "warn"]),
])  # fmt: skip
def test_a_speed_is_held_against_the_nominal_one_and_the_slowest_gpu_is_named(
    found: list[float], statuses: list[str]
) -> None:
    known = nominal(H100)
    assert known is not None
    got = list(speeds.speed_findings("products", "TFLOP/s", found, known.tflops, MATMUL))
    assert [each.status for each in got] == statuses
    if len(got) == 2:
        assert got[1].found == "products: GPU 2 reaches 86% of the median"
    [unknown] = speeds.speed_findings("products", "TFLOP/s", [1.0, 1.0], None, MATMUL)
    assert unknown.status == "ok" and "no reference value" in unknown.found


def test_collectives_are_held_against_the_links_that_they_cross() -> None:
    known = nominal(H100)
    assert speeds.expected_bandwidth(known, 8, 8, 400) == {"all_reduce": 450, "all_to_all": 450}
    # Of 16 GPUs on two machines with 8 x 50 GB/s, 8 of a GPU's 15 parts go over its adapter.
    assert speeds.expected_bandwidth(known, 16, 8, 400) == {"all_reduce": 400, "all_to_all": 50 * 15 / 8}
    assert speeds.expected_bandwidth(None, 8, 8, 0) == {"all_reduce": 0.0, "all_to_all": 0.0}
    rates = {"all_reduce": 380.0, "all_to_all": 100.0}
    assert [each.status for each in speeds.collective_findings(rates, known, 8, 8, 0)] == ["ok", "fail"]
    assert [each.status for each in speeds.collective_findings(rates, known, 16, 8, 400)] == ["ok", "ok"]
    assert [each.status for each in speeds.collective_findings(rates, None, 8, 8, 0)] == ["ok", "ok"]


def test_every_gpu_that_is_visible_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(commands: list[list[str]]) -> list[Any]:
        asked.extend(commands)
        return [{"tflops": 700.0, "gb_per_s": 3000.0, "all_reduce": 380.0, "all_to_all": 330.0} for _ in commands]

    monkeypatch.setattr(speeds, "measured", answer)
    node = machine({}, {}, {}, {}, environ={"CUDA_VISIBLE_DEVICES": "4,5,6"})
    assert [each.status for each in speeds.check_speed(node)] == ["ok", "ok"]
    assert [words[2] for words in asked] == ["cuda:0", "cuda:1", "cuda:2"]
    asked.clear()
    assert [each.status for each in speeds.check_collectives(node)] == ["ok", "ok"]
    assert [(words[2], words[4], words[6]) for words in asked] == [(f"cuda:{i}", f"{i}", "3") for i in range(3)]
    assert told(speeds.check_collectives(machine({}))) == [
        ("cannot see", "one GPU: there are no collectives to measure")
    ]


@pytest.mark.slow
def test_two_machines_connect_over_gloo_and_their_clocks_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Both are this one: two calls of the command, two ranks each, real collectives."""
    head = f"127.0.0.1:{speeds.free_port()}"
    words = ["doctor", "--only", "collectives", "--json", "--nodes", "2", "--head", head, "--node-rank"]
    other = subprocess.Popen([sys.executable, "-m", "mslime", *words, "1"], stdout=subprocess.PIPE, text=True)
    try:
        assert main([*words, "0"]) == 0
        theirs = json.loads(other.communicate(timeout=120)[0])
    finally:
        other.kill()
        other.wait()
    for told_by in (json.loads(capsys.readouterr().out), theirs):
        [check] = told_by["checks"]
        bandwidth, clocks = check["findings"]
        assert "4 processes over gloo on 2 machines" in bandwidth["found"], bandwidth
        # Both machines have the same clock: what is left is how late a busy process leaves the barrier.
        assert 0 <= clocks["values"]["clock_ms"] < 60_000
        assert clocks["found"].startswith("the machines' clocks are") and told_by["counted"]["fail"] == 0


@pytest.mark.slow
def test_a_process_that_breaks_gives_its_last_words() -> None:
    with pytest.raises(speeds.MeasurementFailed, match="CUDA|NVIDIA"):
        speeds.measured([["speed", "--device", "cuda:99", "--seconds", "0.1"]])


# -------------------------------------------------------------------------------------------------------------- step


HEALTHY = {
    "grad_norm": 0.5, "weights/bytes": 1e6, "weights/seconds": 0.1, "mismatch/kl": 1e-9, "mismatch/abs_max": 1e-5,
}  # fmt: skip
"""Metrics of a step."""


@pytest.mark.parametrize(("device", "changes", "statuses"), [
    ("cpu", {}, ["ok", "ok", "ok", "ok"]), ("cpu", {"mismatch/kl": 1e-5}, ["ok", "ok", "ok", "warn"]),
    ("cuda", {"mismatch/kl": 5e-4}, ["ok", "ok", "ok", "ok"]),
    ("cuda", {"mismatch/kl": 5e-3}, ["ok", "ok", "ok", "warn"]),
    ("cuda", {"mismatch/kl": 0.3}, ["ok", "ok", "ok", "fail"]),
    ("cpu", {"mismatch/kl": None}, ["ok", "ok", "ok", "fail"]),
    ("cpu", {"grad_norm": None}, ["fail", "ok", "ok", "ok"]), ("cpu", {"grad_norm": 0.0}, ["fail", "ok", "ok", "ok"]),
])  # fmt: skip
def test_a_step_is_judged_by_its_metrics(device: str, changes: dict[str, Any], statuses: list[str]) -> None:
    rows = [{"step": 0}, {"step": 1} | HEALTHY, {"step": 2} | HEALTHY | changes]
    assert [each.status for each in step.step_findings(rows, device, 60.0)] == statuses


def test_a_run_that_did_not_make_its_steps_is_a_failure() -> None:
    assert [each.status for each in step.step_findings([{"step": 1} | HEALTHY], "cpu", 1.0)] == ["fail"]


def test_the_step_takes_the_gpus_that_are_there(tmp_path: Path) -> None:
    from mslime.config.loader import build

    model = step.write_tiny_model(tmp_path / "model")
    for node, device, placement in (
        (Node(DoctorOptions()), "cpu", "separate"), (machine({}), "cuda", "colocated"), (machine(), "cuda", "separate"),
    ):  # fmt: skip
        config = build(step.run_settings(node, model, tmp_path))
        assert (config.cluster.device, config.cluster.placement) == (device, placement)
        assert config.weights.verify == "always" and config.cluster.ray_address is None


# ----------------------------------------------------------------------------------------------------------- command


def test_a_check_that_breaks_is_a_failure_and_the_others_go_on() -> None:
    def breaks(node: Node) -> Iterator[Finding]:
        yield ok("half way")
        raise OSError("the bus is gone")

    found = doctor_command.examine(HostCheck("bus", "", breaks), machine())
    assert [each.status for each in found.findings] == ["ok", "fail"]
    assert found.findings[1].found == "the check failed: OSError: the bus is gone"


@pytest.mark.parametrize(("findings", "plain", "strict"), [
    ((ok("a"), unseen("b")), False, False), ((warn("a", "b"),), False, True), ((fail("a", "b"), ok("c")), True, True),
])  # fmt: skip
def test_what_fails_decides_the_status(findings: tuple[Finding, ...], plain: bool, strict: bool) -> None:
    examined = [doctor_command.CheckFindings("x", 0.1, findings)]
    assert (
        doctor_command.failed(examined, strict=False) is plain
        and doctor_command.failed(examined, strict=True) is strict
    )


def test_checks_are_chosen_by_name() -> None:
    names = [check.name for check in doctor_command.CHECKS]
    assert [check.name for check in doctor_command.choose((), (), True)] == names
    assert [check.name for check in doctor_command.choose((), ("disk",), False)] == [
        name for name in names if name not in ("disk", "step")
    ]
    assert [check.name for check in doctor_command.choose(("step", "gpus"), (), False)] == ["gpus", "step"]
    with pytest.raises(ConfigError, match="collectives"):
        doctor_command.choose(("colectives",), (), False)
    with pytest.raises(ConfigError, match="no check is left"):
        doctor_command.choose(("disk",), ("disk",), False)


@pytest.mark.parametrize(("options", "field"), [
    (DoctorOptions(nodes=0), "--nodes"), (DoctorOptions(nodes=2, node_rank=2, head="a:1"), "--node-rank"),
    (DoctorOptions(nodes=2), "--head"), (DoctorOptions(model=Path("/nowhere")), "--model"),
])  # fmt: skip
def test_options_that_contradict_are_refused(options: DoctorOptions, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        doctor_command.check_options(options)
    assert caught.value.field == field and caught.value.hint


def test_it_tells_a_person_and_a_program_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["doctor", "--only", "host", "limits", "gpus", "--directory", str(tmp_path)]
    status = main([*words, "--json"])
    told_to_program = json.loads(capsys.readouterr().out)
    assert main(words) == status == told_to_program["exit_status"]
    printed = capsys.readouterr().out
    assert [each["check"] for each in told_to_program["checks"]] == ["gpus", "host", "limits"]
    for each in told_to_program["checks"]:
        for finding in each["findings"]:
            assert (
                set(finding) == {"status", "found", "todo", "values"} and finding["status"] in doctor_command.STATUSES
            )
            assert finding["status"] == "ok" or finding["found"][:30] in printed
    assert main(["doctor", "--list"]) == 0 and "collectives" in capsys.readouterr().out
    assert main(["doctor", "--only", "gpsu"]) == 2 and "gpus" in capsys.readouterr().err
