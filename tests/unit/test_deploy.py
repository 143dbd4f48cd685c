"""What brings mslime onto several machines: the Slurm script, with stand-ins for Slurm's commands, and the manifest."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "deploy/slurm.sh"


# ------------------------------------------------------------------------------------------------------------ Slurm


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a Slurm job on three machines, all of them this one; `calls` is what Ray was asked to do."""
    programs = tmp_path / "bin"
    programs.mkdir()
    fakes = {
        "scontrol": "printf 'gpu1\\ngpu2\\ngpu3\\n'",
        "hostname": "echo 127.0.0.1 10.1.1.1",
        "srun": 'for word; do case "$word" in --nodelist=*) export ON="${word#*=}"; shift ;; --*) shift ;; *) break ;; '
        'esac; done; exec "$@"',
        "ray": f'echo "$ON $*" >> {tmp_path}/calls; echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >> {tmp_path}/tokens\n'
        f'case "$*" in *--head*) exec {sys.executable} {tmp_path}/listen.py ;; *) exec sleep 60 ;; esac',
    }
    for name, body in fakes.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "listen.py").write_text(
        "import os, socket, time\n"
        "server = socket.create_server(('127.0.0.1', int(os.environ['RAY_PORT'])))\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").write_text("")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "gpu[1-3]",
        "SLURM_SUBMIT_DIR": str(tmp_path), "VENV": str(tmp_path / "venv"), "RAY_PORT": str(port),
    }  # fmt: skip


def test_the_run_starts_beside_a_head_with_a_worker_on_every_other_machine(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    told = f'echo "ran at $RAY_ADDRESS with $*"; echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >> {tmp_path}/tokens; exit 7'
    command = ["bash", "-c", told, "name", "--train.lr", "1e-6"]
    done = subprocess.run(
        ["bash", str(SLURM), *command], env=slurm, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7, "the run's own exit status"
    address = f"127.0.0.1:{slurm['RAY_PORT']}"
    assert f"ran at {address} with --train.lr 1e-6 --cluster.join-s 600" in done.stdout
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sorted(call.split()[0] for call in calls) == ["gpu1", "gpu2", "gpu3"]
    by_machine = {call.split()[0]: call for call in calls}
    assert "start --head" in by_machine["gpu1"] and "--node-ip-address=127.0.0.1" in by_machine["gpu1"]
    assert all(f"start --address={address}" in by_machine[machine] for machine in ("gpu2", "gpu3"))
    tokens = (tmp_path / "tokens").read_text().splitlines()
    assert len(tokens) == 4 and re.fullmatch("token [0-9a-f]{64}", tokens[0]), "Ray on each machine, and the run"
    assert len(set(tokens)) == 1 and tokens[0].split()[1] not in done.stdout + done.stderr


def test_the_end_of_the_job_reaches_the_run_which_ends_in_its_own_time(slurm: dict[str, str], tmp_path: Path) -> None:
    body = (
        f'trap "sleep 1; echo saved > {tmp_path}/saved; exit 0" TERM; touch {tmp_path}/up; while :; do sleep 0.1; done'
    )
    started = subprocess.Popen(["bash", str(SLURM), "bash", "-c", body], env=slurm, stdout=subprocess.PIPE)
    try:
        while not (tmp_path / "up").exists():
            assert started.poll() is None
            time.sleep(0.1)
        started.send_signal(signal.SIGTERM)
        assert started.wait(30) == 0
        assert (tmp_path / "saved").read_text() == "saved\n"
    finally:
        started.kill()


@pytest.mark.parametrize(("missing", "words"), [("SLURM_JOB_NODELIST", ["true"]), ("", [])])
def test_what_is_missing_is_said_with_a_way_out(slurm: dict[str, str], missing: str, words: list[str]) -> None:
    slurm.pop(missing, None)
    done = subprocess.run(
        ["bash", str(SLURM), *words], env=slurm, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1 and "hint" in done.stderr


# ------------------------------------------------------------------------------------------------------- Kubernetes


def closed(required: str = "", **fields: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema of an object with these fields and no others."""
    return {
        "type": "object", "properties": fields, "required": required.split(), "additionalProperties": False,
    }  # fmt: skip


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
QUANTITY = {"type": ["string", "integer"], "pattern": r"^\d+(Gi|Mi|Ti)?$"}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = closed(
    "name image", name=TEXT, image=TEXT, imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    lifecycle=closed("preStop", preStop=closed("exec", exec=closed("command", command=items(TEXT)))), workingDir=TEXT,
    env=items(closed("name value", name=TEXT, value=TEXT)), resources=closed(requests=QUANTITIES, limits=QUANTITIES),
    securityContext=closed(capabilities=closed(add=items(TEXT))),
    volumeMounts=items(closed("name mountPath", name=TEXT, mountPath=TEXT)),
)  # fmt: skip
VOLUME = closed(
    "name", name=TEXT, persistentVolumeClaim=closed("claimName", claimName=TEXT),
    emptyDir=closed(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY), hostPath=closed("path", path=TEXT, type=TEXT),
)  # fmt: skip
POD = closed(
    "containers", hostNetwork={"type": "boolean"},
    dnsPolicy={"enum": ["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"]},
    terminationGracePeriodSeconds=COUNT, containers=items(CONTAINER), volumes=items(VOLUME),
)  # fmt: skip
# The part of KubeRay's ray.io/v1 RayJob (operator 1.5.1) that the manifest uses: what may stand where, and as what.
MACHINES = {
    "rayStartParams": {"type": "object", "additionalProperties": TEXT}, "template": closed("spec", spec=POD),
}  # fmt: skip
RAY_CLUSTER = closed(
    "headGroupSpec", rayVersion=TEXT, authOptions=closed("mode", mode={"enum": ["token", "disabled"]}),
    headGroupSpec=closed("template", **MACHINES),
    workerGroupSpecs=items(closed(
        "groupName template minReplicas maxReplicas", groupName=TEXT, replicas=COUNT, minReplicas=COUNT,
        maxReplicas=COUNT, **MACHINES,
    )),
)  # fmt: skip
RAY_JOB = closed(
    "apiVersion kind metadata spec", apiVersion={"const": "ray.io/v1"}, kind={"const": "RayJob"},
    metadata=closed("name", name=TEXT),
    spec=closed(
        "entrypoint rayClusterSpec", entrypoint=TEXT, backoffLimit=COUNT, shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT, rayClusterSpec=RAY_CLUSTER,
    ),
)  # fmt: skip


def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy/rayjob.yaml").read_text())


def machines() -> list[dict[str, Any]]:
    spec = manifest()["spec"]["rayClusterSpec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_the_manifest_is_a_ray_job_of_the_api() -> None:
    import jsonschema

    jsonschema.Draft202012Validator(RAY_JOB).validate(manifest())
    broken = manifest()
    broken["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["container"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(RAY_JOB).validate(broken)


def test_the_manifest_names_this_ray_and_mounts_what_it_declares() -> None:
    spec = manifest()["spec"]["rayClusterSpec"]
    assert f'"ray=={spec["rayVersion"]}"' in (ROOT / "pyproject.toml").read_text()
    for machine in machines():
        pod = machine["template"]["spec"]
        (container,) = pod["containers"]
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert machines()[0]["template"] == machines()[1]["template"], "head and workers are alike"


def test_the_cluster_has_a_token_and_the_image_what_its_probes_and_jobs_speak_to() -> None:
    assert manifest()["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert "dashboard-host" not in machines()[0]["rayStartParams"], "probes and the submitter come from outside"
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    assert '"ray[default]==' in dockerfile and " procps wget " in dockerfile


DRIVER = """
import signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(0.5)
    Path(sys.argv[2]).write_text("saved")
    sys.exit()

signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""


def test_a_machine_that_is_given_back_tells_the_driver_first_and_waits_until_it_has_saved(tmp_path: Path) -> None:
    pod = machines()[0]["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    # The words of the hook as they are, but for a name that no other process on this machine has.
    own = f"bin/mslime-{uuid.uuid4().hex}"
    hook = [word.replace("[b]in/mslime", f"[b]{own[1:]}").replace("[r]ay::", f"[r]ay-{own}::") for word in command]
    assert hook != command and pod["terminationGracePeriodSeconds"] >= 600
    program = tmp_path / own
    program.parent.mkdir()
    program.write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, str(program), "train", str(tmp_path / "saved")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None and driver.stdout.readline() == "up\n"
        threading.Thread(target=driver.wait, daemon=True).start()  # as its parent does: it leaves no zombie
        subprocess.run(hook, check=False, timeout=60)
        assert (tmp_path / "saved").read_text() == "saved"
    finally:
        driver.kill()
