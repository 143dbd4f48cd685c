"""What a killed driver's Ray leaves behind is ended; a driver that ends properly is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.fixtures.processes import alive

ROOT = Path(__file__).parents[2]
# Stands in for a driver: one child looks like Ray's (and has a child that does not), the other is somebody else's.
DRIVER = """
import subprocess, sys, time
from mslime.run.sweeper import Sweeper
ray = "import subprocess, time; subprocess.Popen(['sleep', '301']); time.sleep(300)"
with Sweeper() as sweeper:
    children = [subprocess.Popen([sys.executable, "-c", ray, "/site-packages/ray/agent.py"], start_new_session=True),
                subprocess.Popen(["sleep", "302"], start_new_session=True)]
    print(sweeper._process.pid, *[c.pid for c in children], flush=True)
    {then}
"""


def wait_for(pids: list[int]) -> None:
    while any(alive(pid) for pid in pids):
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False])
def test_what_a_killed_drivers_ray_leaves_behind_is_ended(killed: bool) -> None:
    code = DRIVER.replace("{then}", "time.sleep(300)" if killed else "time.sleep(3)")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    sweeper, ray, other = (int(pid) for pid in driver.stdout.readline().split())
    try:
        time.sleep(3)  # long enough to be seen
        below = [p.pid for p in psutil.Process(ray).children()]
        assert len(below) == 1
        if killed:
            driver.send_signal(signal.SIGKILL)
        driver.wait(30)
        wait_for([sweeper])
        assert [alive(pid) for pid in (ray, *below, other)] == [not killed, not killed, True]
    finally:
        for pid in (ray, *below, other):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
