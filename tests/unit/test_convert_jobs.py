"""Conversions that are killed, run out of disk or meet bad bytes: nothing half-written, nothing done twice."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mslime.config.errors import CheckpointError, ConfigError
from mslime.convert.hf import HFCheckpoint, staging_directory
from mslime.offline.inspect import HFSide, compare
from mslime.offline.jobs import CHECKSUMS, JOURNAL, SilentProgress, run_job
from mslime.offline.requantise import ToFp8
from tests.fixtures.convert_tools import write_model
from tests.fixtures.marks import nightly_except

ROOT = Path(__file__).parents[2]
TINY_SHARDS = ["--max-shard-gib", "0.00000001", "--quiet"]  # a file for each tensor


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


def job(source: Path, max_shard_bytes: int = 60_000) -> ToFp8:
    return ToFp8(source, power_of_two=False, max_shard_bytes=max_shard_bytes)


def command(source: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "mslime", "convert", "fp8", str(source), str(out), *options]


def finished(out: Path) -> int:
    """Files that a running conversion has finished."""
    journal = staging_directory(out) / JOURNAL
    return len(journal.read_text().split("\n")) - 2 if journal.exists() else 0


def wait_for(what: Callable[[], bool]) -> None:
    while not what():
        time.sleep(0.002)


@pytest.mark.slow
def test_several_processes_write_what_one_does(source: Path, tmp_path: Path) -> None:
    alone = run_job(job(source), tmp_path / "alone")
    assert run_job(job(source), tmp_path / "together", workers=2) == alone and alone.files > 4
    for path in (tmp_path / "alone").iterdir():
        assert path.read_bytes() == (tmp_path / "together" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("victim", nightly_except(["a worker"], ["the whole conversion", "a worker"]))
@pytest.mark.slow
def test_a_kill_leaves_nothing_under_the_final_name_and_the_next_run_goes_on(
    source: Path, tmp_path: Path, victim: str
) -> None:
    source = write_model(tmp_path / "larger", num_hidden_layers=8, num_experts=16)
    out = tmp_path / "out"
    first = subprocess.Popen(
        command(source, out, "--workers", "2", *TINY_SHARDS), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: finished(out) >= 3)
    children = [c for c in psutil.Process(first.pid).children() if "spawn_main" in " ".join(c.cmdline())]
    os.kill(first.pid if victim == "the whole conversion" else children[0].pid, signal.SIGKILL)
    _, said = first.communicate(timeout=60)
    if victim == "a worker":
        assert first.returncode == 2 and "ended during its work" in said and "same command again" in said
    wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))
    assert not out.exists() and finished(out) < 400, "killed in the middle"
    kept = finished(out)
    second = subprocess.run(
        command(source, out, "--workers", "1", *TINY_SHARDS), cwd=ROOT, check=False, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert second.returncode == 0 and f"{kept} of them from an earlier run" in second.stdout, second
    assert not staging_directory(out).exists() and not list(out.glob(".*"))
    run_job(job(source), tmp_path / "uninterrupted")
    assert compare(HFSide(out), HFSide(tmp_path / "uninterrupted")) == []


BUSY = """
from mslime.offline.jobs import Workers
from tests.fixtures.convert_tools import sleep_long
if __name__ == "__main__":
    list(Workers(2).run(sleep_long, [1, 2], print))
"""


@pytest.mark.slow
def test_workers_end_with_their_parent_in_the_middle_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "busy.py")], env=environment)

    def busy() -> list[psutil.Process]:
        """Workers that have imported torch and begun."""
        return [c for c in psutil.Process(parent.pid).children() if c.num_threads() > 1]

    wait_for(lambda: len(busy()) == 2)
    workers = busy()
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers))


def _at_most_100_kb() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.parametrize("workers", nightly_except(["2"], ["1", "2"]))
@pytest.mark.nightly
def test_a_full_disk_names_file_and_tensor_and_the_next_run_goes_on(source: Path, tmp_path: Path, workers: str) -> None:
    out = tmp_path / "out"
    options = ["--max-shard-gib", "0.0001", "--workers", workers, "--quiet"]
    failed = subprocess.run(
        command(source, out, *options), cwd=ROOT, check=False, capture_output=True, text=True, timeout=120,
        preexec_fn=_at_most_100_kb,
    )  # fmt: skip
    assert failed.returncode == 2 and "File too large" in failed.stderr, failed
    assert ".safetensors: model.layers." in failed.stderr and "Traceback" not in failed.stderr
    assert not out.exists() and not list(staging_directory(out).glob("*.part"))
    again = subprocess.run(
        command(source, out, *options), cwd=ROOT, check=False, capture_output=True, text=True, timeout=120
    )
    assert again.returncode == 0, again
    assert HFCheckpoint(out).shapes == HFCheckpoint(source).shapes


def test_a_disk_without_enough_space_is_noticed_before_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    nearly_full = shutil._ntuple_diskusage(10**9, 10**9 - 4096, 4096)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: nearly_full)
    with pytest.raises(CheckpointError, match="4096 bytes free"):
        run_job(job(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Meddling(SilentProgress):
    """A progress display that does something at the start of a phase."""

    def __init__(self, phase: str, what: object) -> None:
        self._phase, self._what = phase, what

    def phase(self, name: str, total_bytes: int, done_bytes: int) -> None:
        assert callable(self._what)
        if name == self._phase:
            self._what()


def test_a_bit_that_the_disk_turned_is_found_and_its_file_is_not_kept(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def turn_a_bit() -> None:
        path = sorted(staging_directory(out).glob("*.safetensors"))[2]
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"model-00003-of-.*safetensors: model\.layers\..*different checksum"):
        run_job(job(source), out, progress=Meddling("verify", turn_a_bit))
    assert not out.exists()
    again = run_job(job(source), out)
    assert again.kept_files == again.files - 1, "the bad file alone is written again"


def test_a_second_conversion_into_the_same_directory_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def again() -> None:
        with pytest.raises(ConfigError, match="another conversion is writing it"):
            run_job(job(source), out)

    run_job(job(source), out, progress=Meddling("convert", again))
    with pytest.raises(ConfigError, match="exists already"):
        run_job(job(source), out)


class Stopped(Exception):
    """The end of a run in the middle."""


def stop_after(source: Path, out: Path, files: int, **options: int) -> None:
    """Convert, and stop when so many files are finished."""
    first = job(source, **options)

    class Stopping(SilentProgress):
        def advance(self, nbytes: int) -> None:
            if finished(out) >= files:
                raise Stopped

    with pytest.raises(Stopped):
        run_job(first, out, progress=Stopping())


def test_finished_files_are_kept_for_the_same_conversion_only(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stop_after(source, out, 2)
    assert run_job(job(source), out).kept_files == 2
    stop_after(source, tmp_path / "b", 2)
    assert run_job(job(source, max_shard_bytes=50_000), tmp_path / "b").kept_files == 0
    stop_after(source, tmp_path / "c", 2)
    weights = sorted(source.glob("*.safetensors"))[0]
    os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
    assert run_job(job(source), tmp_path / "c").kept_files == 0, "the source has changed"


def test_a_journal_that_was_cut_off_and_a_file_that_was_cut_off_are_done_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stop_after(source, out, 3)
    staging = staging_directory(out)
    journal = staging / JOURNAL
    journal.write_text(journal.read_text()[:-10])
    os.truncate(staging / json.loads(journal.read_text().split("\n")[1])["file"], 10)
    (staging / ".model-00009.part").write_bytes(b"left over")
    assert run_job(job(source), out).kept_files == 1
    run_job(job(source), tmp_path / "uninterrupted")
    assert compare(HFSide(out), HFSide(tmp_path / "uninterrupted")) == []
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in (tmp_path / "uninterrupted").iterdir()
    )


def test_every_tensor_of_the_output_has_a_checksum(source: Path, tmp_path: Path) -> None:
    run_job(job(source), tmp_path / "out")
    files = json.loads((tmp_path / "out" / CHECKSUMS).read_text())
    assert {name for file in files.values() for name in file["spans"]} == set(HFCheckpoint(tmp_path / "out").stored)


MEASURE = """
import re, sys
from pathlib import Path
from mslime.convert.families import read_hf_config
from mslime.offline.jobs import run_job
from mslime.offline.requantise import ToFp8
from mslime.offline.to_hf import ToHf
from mslime.offline.to_megatron import ToMegatron
from tests.fixtures.convert_tools import fake_placement, write_model

def convert_all_ways(source, out, shard):
    config = read_hf_config(source)
    placement = fake_placement(config)
    run_job(ToMegatron(source, config, placement, max_file_bytes=shard), out / "megatron")
    run_job(ToHf(out / "megatron", out / "megatron" / "hf", config, placement, max_shard_bytes=shard), out / "hf")
    run_job(ToFp8(source, power_of_two=False, max_shard_bytes=shard), out / "fp8")

def kib(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

source, out, shard = Path(sys.argv[1]), Path(sys.argv[2]), 24 << 20
convert_all_ways(write_model(out / "small"), out / "warm", shard)  # pays for imports
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = kib("VmRSS")
convert_all_ways(source, out, shard)
print((kib("VmHWM") - before) * 1024 / shard)
"""


@pytest.mark.nightly
def test_a_conversion_of_many_shards_needs_no_more_memory_than_two(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", shards=8, hidden_size=1024, moe_intermediate_size=1024, num_experts=16)
    assert sum(path.stat().st_size for path in source.glob("*.safetensors")) > 8 * (24 << 20)
    (tmp_path / "out").mkdir()
    # What is freed goes back at once: glibc would keep up to another shard, more or less of it by chance.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    measured = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, str(source), str(tmp_path / "out")],
        cwd=ROOT, check=False, capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip
    assert measured.returncode == 0, measured.stderr
    assert 0 < float(measured.stdout) <= 2.0, measured.stdout
