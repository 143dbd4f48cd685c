"""Rehearses `mslime doctor` on a machine without a GPU:

    python -m tests.rehearsal.doctor OUT [--only TEXT] [--stamp STAMP]

Every check that is not a whole run is made as on a machine with two H100: a fake NVML tells of them, and what is
measured runs on the fake runtime (`doctor_worker`). Kernels must agree with plain torch. How fast they are says nothing
here, so a speed that is found too low, and told, is well; a check that breaks is not.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from mslime.checks import environment
from mslime_plugins.doctor import speeds
from mslime_plugins.doctor.doctor_command import CHECKS, examine
from mslime_plugins.doctor.findings import DoctorOptions, Finding, HostCheck, Node
from mslime_plugins.doctor.gpus import see_gpus
from tests.fixtures.fake_nvml import FakeNvml
from tests.rehearsal.outcomes import Check, attempt, finish, options, true

BROKE = "the check failed"
SLOW = ("speed", "collectives")
"""Checks whose figures are those of the machine that rehearses."""


class FakeDriver(FakeNvml):
    """Two H100 under a driver that runs the CUDA of this torch."""

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13_000


def made(check: HostCheck, node: Node) -> list[Check]:
    """What a check told, one line each."""
    return [judged(check.name, finding) for finding in examine(check, node).findings]


def judged(name: str, finding: Finding) -> Check:
    """A finding is well unless its check broke, or a kernel computes something else."""
    broke = finding.found.startswith(BROKE) or (name == "kernels" and finding.status != "ok")
    blind = finding.status == "cannot see" and "NVIDIA driver" in finding.found
    told = finding.status if name not in SLOW else "measured"
    return true(f"{told}:", finding.found, not broke and not blind)


def main() -> int:
    """Run what has not been run, and print all of it."""
    given = options(__doc__).parse_args()
    fake: Any = FakeDriver(count=2)
    sys.modules["pynvml"] = fake
    given.out.mkdir(parents=True, exist_ok=True)
    module = given.out / "driver"
    module.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\n")
    environment._DRIVER_FILE = module
    os.environ["FAKE_CUDA_DEVICES"] = "2"
    speeds.WORKER = "tests.rehearsal.doctor_worker"
    gpus, blind = see_gpus()
    assert not blind, blind
    node = Node(DoctorOptions(), gpus, blind, dict(os.environ))
    work = {
        f"doctor: {check.name}": partial(made, check, node)
        for check in CHECKS
        if not check.full and given.only in f"doctor: {check.name}"
    }
    return finish(list(work), lambda name: attempt(name, work[name]), given.out / "outcomes", given.stamp)


if __name__ == "__main__":
    sys.exit(main())
