"""Supervision of a child process without an engine: guard, logs, ports, flags and environment."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.request import proxy_bypass

import psutil
import pytest

from mslime.backends.cpu.sglang import SITE_DIR
from mslime.backends.sglang.flags import command_line, environment, server_fields
from mslime.backends.sglang.server_process import ServerPart, ServerProcess, SupervisedProcess, attach, log_tail
from mslime.config.errors import EngineError
from mslime.config.keys import NO_KEYS
from mslime.config.resolved import ServerSpec, engine_spec
from mslime.config.schema import RunConfig
from mslime.engine_plugin import dispatch
from mslime.engine_plugin.wire import LOADER_VARIABLE
from mslime.network import ephemeral_ports, free_port, own_ports, port_in_use
from tests.fixtures.processes import alive

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # as engines on a CPU are started
# Ignores SIGTERM, has a child, and a grandchild in another session whose parent is gone: as stubborn as engines get.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "300"])
subprocess.run([sys.executable, "-c", "import subprocess; subprocess.Popen(['setsid', 'sleep', '301'])"])
print("child up", flush=True)
time.sleep(300)
"""


def wait_for(condition: Any) -> bool:
    while not condition():
        time.sleep(0.05)
    return True


def supervise(tmp_path: Path, code: str) -> SupervisedProcess:
    env = {**ENV, "TMPDIR": str(tmp_path)}  # a guard that is killed leaves its directory behind
    return SupervisedProcess("engine0", [sys.executable, "-c", code], env, tmp_path / "engine0.log")


def family(process: SupervisedProcess) -> list[int]:
    return [process.pid, *(p.pid for p in psutil.Process(process.pid).children(recursive=True))]


def test_stop_ends_every_process_however_stubborn(tmp_path: Path) -> None:
    process = supervise(tmp_path, STUBBORN)
    assert wait_for(lambda: "child up" in process.log_text() and len(family(process)) == 4), process.log_text()
    pids = family(process)
    process.stop()
    process.stop()
    assert process.poll() is not None and not [pid for pid in pids if alive(pid)]


# Spawns what SGLang spawns: processes that import the server's module before they do anything else.
SPAWNS = """
import multiprocessing, sys, time
from mslime.backends.sglang import launch

def work():
    time.sleep(300)

if __name__ == "__main__":
    import os
    os.environ[launch._SERVER_PID] = str(os.getpid())
    context = multiprocessing.get_context("spawn")
    lock = context.Lock()
    context.Process(target=work).start()
    time.sleep(300)
elif __name__ == "__mp_main__":
    launch.die_with_the_server()
    print("child up", flush=True)
"""

# Forks as a server on a CPU does.
FORKS = """
import multiprocessing, os, time
from mslime.backends.sglang import launch

def work():
    print("child up", flush=True)
    time.sleep(300)

os.environ[launch._SERVER_PID] = str(os.getpid())
launch.fork_children()
multiprocessing.set_start_method("spawn", force=True)
lock = multiprocessing.Lock()
multiprocessing.Process(target=work).start()
time.sleep(300)
"""


@pytest.mark.parametrize(
    ("killed", "code", "processes"),
    [
        *[(k, SPAWNS, 3) for k in ("guard", "owner", "guard and owner", "server", "guard while children start")],
        *[(k, FORKS, 2) for k in ("guard", "server")],
        ("owner", STUBBORN, 3),
    ],
)
def test_no_process_and_no_shared_memory_outlives_the_guard_the_owner_or_the_server(
    tmp_path: Path, killed: str, code: str, processes: int
) -> None:
    before = set(os.listdir("/dev/shm"))
    script = tmp_path / "starts.py"
    script.write_text(code)
    log = tmp_path / "log"
    owner_code = f"""
import os, sys, time
from pathlib import Path
from mslime.backends.sglang.server_process import SupervisedProcess
p = SupervisedProcess("engine0", [sys.executable, {str(script)!r}], dict(os.environ), Path({str(log)!r}))
print(p.pid, flush=True)
time.sleep(300)
"""
    env = {**ENV, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", owner_code], env=env, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    guard = int(owner.stdout.readline())
    below = psutil.Process(guard)
    starting = killed == "guard while children start"
    assert wait_for(
        lambda: len(below.children(recursive=True)) == processes and (starting or "child up" in log.read_text())
    )
    family = [guard, *(p.pid for p in below.children(recursive=True))]
    victims = {"owner": [owner.pid], "server": [family[1]], "guard and owner": [guard, owner.pid]}
    for pid in victims.get(killed, [guard]):
        os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not [pid for pid in family if alive(pid)]), [pid for pid in family if alive(pid)]
    assert wait_for(lambda: not {n for n in set(os.listdir("/dev/shm")) - before if n.startswith("sem.mp-")})
    owner.kill()
    owner.wait(10)


@pytest.mark.parametrize(("threads", "method"), [(1, "fork"), (2, "spawn")])
@pytest.mark.slow
def test_children_are_forked_where_no_other_thread_holds_a_lock(threads: int, method: str) -> None:
    code = f"""
import multiprocessing, threading
from mslime.backends.sglang import launch
launch.fork_children()
stay = threading.Event()
others = [threading.Thread(target=stay.wait) for _ in range({threads} - 1)]
[other.start() for other in others]
multiprocessing.set_start_method("spawn", force=True)
print(multiprocessing.get_start_method())
stay.set()
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=True)
    assert done.stdout == f"{method}\n"


def test_a_process_that_starts_when_its_server_is_gone_already_ends_at_once() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    code = "from mslime.backends.sglang import launch; launch.die_with_the_server(); print('lives')"
    for server, says in ((gone.pid, ""), (os.getpid(), "lives\n")):
        env = {**ENV, "MSLIME_ENGINE_PID": str(server)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == (says, 0 if says else 1), done.stderr


def test_what_does_not_die_with_its_parent_is_killed_when_the_guard_is(tmp_path: Path) -> None:
    """Processes of other programs, which know nothing of the server: their group is ended."""
    code = "import subprocess, time; subprocess.Popen(['sleep', '303']); print('up', flush=True); time.sleep(300)"
    process = supervise(tmp_path, code)
    assert wait_for(lambda: "up" in process.log_text().splitlines())
    pids = family(process)
    assert len(pids) == 3
    os.kill(process.pid, signal.SIGKILL)
    assert wait_for(lambda: not [pid for pid in pids if alive(pid)])
    process.stop()
    assert not Path(process._tmp).exists()


@pytest.mark.slow
def test_shared_memory_that_a_killed_command_leaves_is_removed_unless_another_uses_it(tmp_path: Path) -> None:
    own, others = (Path("/dev/shm") / f"mslime-test-{os.getpid()}-{name}" for name in ("own", "others"))
    for path in (own, others):
        path.write_bytes(b"x" * 4096)
    code = f"""
import mmap, os, signal, time
maps = [mmap.mmap(os.open(p, os.O_RDWR), 4096) for p in ({str(own)!r}, {str(others)!r})]
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up", flush=True)
time.sleep(300)
"""
    with others.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        process = supervise(tmp_path, code)
        assert wait_for(lambda: "up" in process.log_text().splitlines())
        process.stop()
        assert not own.exists() and others.exists()
    others.unlink()


def test_a_dead_process_is_reported_with_status_and_the_end_of_its_log(tmp_path: Path) -> None:
    process = supervise(tmp_path, "import sys; print('first words'); print('last words'); sys.exit(3)")
    assert wait_for(lambda: process.poll() is not None)
    error = process.died()
    assert error.value == "exit status 3" and "last words" in error.rule and str(tmp_path) in error.hint
    process.stop()


def test_sockets_and_other_temporary_files_go_with_the_process(tmp_path: Path) -> None:
    process = supervise(tmp_path, "import tempfile; print('dir', tempfile.mkdtemp(), flush=True)")
    assert wait_for(lambda: process.poll() is not None)
    (made,) = [line.split()[1] for line in process.log_text().splitlines() if line.startswith("dir ")]
    assert "mslime-" in made and not Path(made).exists() and not Path(made).parent.exists()
    process.stop()


def test_a_new_process_does_not_report_the_log_of_the_one_before(tmp_path: Path) -> None:
    for word in ("old", "new"):
        process = supervise(tmp_path, f"print('{word} words')")
        assert wait_for(lambda p=process: p.poll() is not None)
        process.stop()
    assert "new words" in process.log_text() and "old words" not in process.log_text()


def test_the_tail_of_a_log_is_short_and_without_model_files_that_a_server_does_not_need(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "no log" in log_tail(log)
    log.write_text("\n\n".join(f"line {i}" for i in range(50000)))
    assert log_tail(log, 2) == "line 49998\nline 49999"
    noise = "[03:05:40] Ignore import error when loading sglang.srt.models.x: No module named 'y'\n"
    log.write_text("ValueError: the reason\n" + 40 * noise + "the end\n")
    assert log_tail(log) == "ValueError: the reason\nthe end"


# ------------------------------------------------------------------------------------------------ ports and URLs


def test_a_port_in_use_is_an_error_that_names_it(tiny_run: RunConfig, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_in_use("127.0.0.1", port)
        with pytest.raises(EngineError, match=f"127.0.0.1:{port}.*another process listens"):
            ServerProcess(engine_spec(tiny_run), 0, tmp_path, port=port).start()
    assert not port_in_use("127.0.0.1", free_port())


# Stands in for a server that meets a port of somebody else's. It is told what to do at its first start, serves at its
# second, and answers to the name it was given.
STAND_IN = """
import http.server, json, pathlib, subprocess, sys, time
count, first, port, name = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
count.write_text(count.read_text() + "x" if count.exists() else "x")
if len(count.read_text()) == 1:
    if first == "ends":
        sys.exit("OSError: [Errno 98] address already in use")
    if first == "lives on":
        print("ERROR: [Errno 98] error while attempting to bind on address: address already in use", flush=True)
        time.sleep(300)
    name = "a stranger"
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"served_model_name": name}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print("Load weight begin", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


@pytest.mark.parametrize("first", ["ends", "lives on", "is another server"])
def test_a_port_that_is_somebody_elses_is_replaced_by_another_at_once(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    count = tmp_path / "count"
    monkeypatch.setattr(
        "mslime.backends.sglang.server_process.command_line",
        lambda f: [sys.executable, "-c", STAND_IN, str(count), first, str(f["port"]), f["served_model_name"]],
    )
    server = ServerProcess(engine_spec(tiny_run), 0, tmp_path)
    address = server.start()
    assert server.alive and count.read_text() == "xx" and address.identity.startswith("engine0-")
    assert int(address.url.rpartition(":")[2]) in own_ports()
    assert server.phase().startswith("loading weights, ")
    server.stop()
    assert not server.alive


def test_ports_are_chosen_outside_the_range_that_the_kernel_draws_from() -> None:
    first, last = ephemeral_ports()
    chosen = {free_port() for _ in range(50)}
    assert len(chosen) > 25 and not [port for port in chosen if first <= port <= last]


@pytest.mark.parametrize(
    ("kernel", "ours"),
    [
        ("32768\t60999\n", (20000, 32767, 61000, 65535)),
        ("16384 65535", (20000, 20001, 65534, 65535)),  # none is left for us, so every one will do
        ("not a range", (20000, 32767, 61000, 65535)),
    ],
)
def test_the_ports_that_are_ours_follow_from_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, ours: tuple[int, ...]
) -> None:
    (tmp_path / "range").write_text(kernel)
    monkeypatch.setattr("mslime.network.EPHEMERAL", tmp_path / "range")
    assert set(ours) <= set(own_ports()) and not {19999, 65536} & set(own_ports())
    monkeypatch.setattr("mslime.network.EPHEMERAL", tmp_path / "missing")
    assert ephemeral_ports() == (32768, 60999)


SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.mark.parametrize(
    ("logged", "phase"),
    [
        ("", "starting"),
        ("server_args={...}", "starting its processes"),
        ("server_args=\nLoad weight begin. avail mem=", "loading weights"),
        ("server_args=\nLoad weight begin.\nLoad weight end.\nCapture decode CUDA graph begin.", "capturing CUDA"),
    ],
)  # fmt: skip
def test_the_phase_of_a_start_is_read_off_the_log(tiny_run: RunConfig, tmp_path: Path, logged: str, phase: str) -> None:
    server = ServerProcess(engine_spec(tiny_run), 0, tmp_path)
    server._process = supervise(tmp_path, f"print({logged!r}, flush=True)")
    assert wait_for(lambda: not server.alive)
    assert server.phase().startswith(phase) and server.phase().endswith(" s")
    server.stop()


class FakeMachine:
    """Another machine of a server, whose part ends when a test says so."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ended = False

    def launch(self, rendezvous: str) -> None:
        self.calls.append(f"launch {rendezvous}")

    def check(self) -> None:
        self.calls.append("check")
        if self.ended:
            raise EngineError("engine0_part1", "exit status 1", "the server ended", "read its log")

    def stop(self) -> None:
        self.calls.append("stop")


def over_two(config: RunConfig) -> ServerSpec:
    settings = config.sglang.model_copy(update={"tp_size": 4, "nnodes": 2})
    return engine_spec(config.model_copy(update={"sglang": settings}))


def test_parts_on_other_machines_start_with_the_first_and_end_with_it(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mslime.backends.sglang.server_process.ASK_OTHERS_S", 0.0)
    monkeypatch.setattr(
        "mslime.backends.sglang.server_process.command_line", lambda fields: told.append(fields) or SLEEPER
    )
    told, other = list[dict[str, Any]](), FakeMachine()
    other.ended = True
    server = ServerProcess(over_two(tiny_run), 0, tmp_path, others=[other])
    with pytest.raises(EngineError, match="engine0_part1"):
        server.start()
    rendezvous = told[0]["dist_init_addr"]
    assert (told[0]["nnodes"], told[0]["node_rank"]) == (2, 0) and rendezvous.startswith("127.0.0.1:")
    assert other.calls == [f"launch {rendezvous}", "check", "stop"] and not server.alive


def test_a_part_is_the_same_server_under_another_number(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[dict[str, Any]]()
    monkeypatch.setattr(
        "mslime.backends.sglang.server_process.command_line", lambda fields: told.append(fields) or SLEEPER
    )
    spec = over_two(tiny_run)
    part = ServerPart(spec, 3, 1, tmp_path, "127.0.0.1", NO_KEYS, routes=True)
    part.check()
    part.launch("10.0.0.1:4000")
    before = part._process
    part.launch("10.0.0.1:5000")
    part.check()
    assert before is not None and before.poll() is not None, "the one in whose place it is"
    first = server_fields(spec, 3, "127.0.0.1", 1, None, True, (0, "10.0.0.1:5000"))
    different = {name for name in first if first[name] != told[-1][name]}
    assert different == {"port", "node_rank"} and told[-1]["node_rank"] == 1
    assert part._process is not None
    part._process._guard.kill()
    assert wait_for(lambda: part._process is not None and part._process.poll() is not None)
    with pytest.raises(EngineError, match="engine3_part1"):
        part.check()
    part.stop()
    part.stop()


def test_attaching_needs_a_url() -> None:
    assert attach("http://host:1234/", 2).url == "http://host:1234"
    assert attach("http://host:1234/", 2).name == "engine2"
    with pytest.raises(EngineError, match="http://host:port"):
        attach("host:1234", 0)


# ----------------------------------------------------------------------------------------- flags and environment


@pytest.fixture
def tiny_run(tmp_path: Path) -> RunConfig:
    """A run whose checkpoint is a config.json only."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_experts": 8, "architectures": ["Qwen3MoeForCausalLM"]}))
    return RunConfig.model_validate(
        {
            "seed": 10,
            "model": {"path": str(model)},
            "data": {"prompts": ["p.jsonl"]},
            "cluster": {"device": "cpu"},
            "deadlines": {"engine_start_s": 60},
            "sglang": {"extra": {"enable_deterministic_inference": True, "watchdog_timeout": 60.0}},
        }
    )


@pytest.mark.slow
def test_every_flag_is_known_to_the_installed_server_and_keeps_its_value(tiny_run: RunConfig) -> None:
    """Parsed by SGLang's own parser, in a process with the CPU platform."""
    fields = server_fields(engine_spec(tiny_run), 2, "127.0.0.1", 3333)
    fields |= {
        "fp8_gemm_runner_backend": "auto",
        "lora_strict_loading": False,
        "dllm_fdfo": False,
        "disable_radix_cache": False,
        "json_model_override_args": {"a": 1},
        "cuda_graph_bs_decode": [1, 2],
    }
    paired = tiny_run.sglang.model_copy(update={"pairs": "mooncake"})
    of_pair = engine_spec(tiny_run.model_copy(update={"sglang": paired}))
    halves = [
        server_fields(of_pair, 2, "127.0.0.1", 3333, half="prefill", bootstrap_port=4444),
        server_fields(of_pair, 2, "127.0.0.1", 3333, half="decode"),
    ]
    assert [half["disaggregation_mode"] for half in halves] == ["prefill", "decode"]
    code = """
import json, sys
from mslime.backends.cpu import sglang
sglang.install()
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
negatable = sorted(a.dest for a in parser._actions if isinstance(a, argparse.BooleanOptionalAction))
flags = {o for a in parser._actions for o in a.option_strings}
odd = sorted(a.dest for a in parser._actions if "--" + a.dest.replace("_", "-") not in flags)
lines = [vars(parser.parse_args(line)) for line in json.loads(sys.argv[1])]
print("\\n" + json.dumps([lines, negatable, odd], default=str))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([command_line(each)[3:] for each in (fields, *halves)])],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines, negatable, odd = json.loads(done.stdout.splitlines()[-1])
    for parsed, asked in zip(lines, (fields, *halves), strict=True):
        for name, value in asked.items():
            expected = json.dumps(value) if isinstance(value, dict) else value
            assert value is None or parsed[name] == expected, name
    from mslime.backends.sglang import flags

    assert set(negatable) == flags._NEGATABLE and set(odd) == set(flags._FLAG_NAMES)


def test_the_server_s_fields_follow_the_run(tiny_run: RunConfig) -> None:
    fields = server_fields(engine_spec(tiny_run), 2, "127.0.0.1", 3333)
    assert fields["random_seed"] == 12 and fields["weight_version"] == "0" and fields["watchdog_timeout"] == 60.0
    assert fields["dtype"] == "float32" and fields["sleep_on_idle"] and not fields["enable_return_routed_experts"]
    assert server_fields(engine_spec(tiny_run), 2, "h", 1, routes=True)["enable_return_routed_experts"]
    on_gpu = server_fields(replace(engine_spec(tiny_run), device="cuda"), 0, "127.0.0.1", 3333)
    assert on_gpu["dtype"] == "bfloat16" and on_gpu["device"] == "cuda" and on_gpu["max_total_tokens"] is None


def test_the_environment_carries_the_platform_on_cpu_only() -> None:
    base = {"PYTHONPATH": "/mine", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NO_PROXY": "a"}
    cpu = environment(base, cpu=True, ranks=2, gpus=None)
    assert cpu["SGLANG_USE_CPU_ENGINE"] == "1" and cpu["PYTHONPATH"].split(os.pathsep)[0] == str(SITE_DIR)
    assert cpu["PYTHONPATH"].endswith("/mine") and len(cpu["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert cpu["NO_PROXY"] == "a,127.0.0.1,localhost" and cpu["HF_HUB_OFFLINE"] == "1"
    lower = environment({"no_proxy": "b", "NO_PROXY": "a"}, cpu=True, ranks=1, gpus=None)
    for env, around in ((cpu, "a"), (lower, "b"), (environment({}, cpu=True, ranks=1, gpus=None), "")):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("no_proxy", "NO_PROXY"):
                patch.setenv(name, env[name])
            assert proxy_bypass("127.0.0.1") and (not around or proxy_bypass(around))
    gpu = environment(base, cpu=False, ranks=2, gpus=["4", "5"])
    assert "SGLANG_USE_CPU_ENGINE" not in gpu and str(SITE_DIR) not in gpu["PYTHONPATH"]
    assert gpu["CUDA_VISIBLE_DEVICES"] == "4,5" and "PYTORCH_CUDA_ALLOC_CONF" not in gpu
    assert base == {"PYTHONPATH": "/mine", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NO_PROXY": "a"}


def test_a_server_on_a_gpu_finds_the_cuda_runtime_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory saver's library, which is preloaded, needs it; without it every scheduler ends with status 127."""
    runtime = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    runtime.parent.mkdir(parents=True)
    runtime.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = environment({"LD_LIBRARY_PATH": "/driver"}, cpu=False, ranks=1, gpus=None)["LD_LIBRARY_PATH"].split(":")
    assert found[0] == "/driver" and str(runtime.parent) in found
    assert "LD_LIBRARY_PATH" not in environment({}, cpu=True, ranks=1, gpus=None)


def test_a_server_finds_the_plug_in_beside_those_of_the_user() -> None:
    env = environment({}, cpu=False, ranks=1, gpus=None)
    found = [point for d in metadata.distributions(path=env["PYTHONPATH"].split(os.pathsep))
             for point in d.entry_points if point.group == "sglang.srt.plugins"]  # fmt: skip
    assert [point.name for point in found] == ["mslime"] and found[0].load() is dispatch.install
    users = environment({"SGLANG_PLUGINS": "theirs"}, cpu=False, ranks=1, gpus=None)
    assert "SGLANG_PLUGINS" not in env and users["SGLANG_PLUGINS"] == "theirs,mslime"
    own_loader = environment({}, cpu=False, ranks=1, gpus=None, recorded=False)
    assert (env[LOADER_VARIABLE], own_loader[LOADER_VARIABLE]) == ("recorded", "model")
