"""The launcher: ports, layout, environment, log reading, and the life of a server process.

Most tests run a stand-in for tritonserver that starts in a moment and misbehaves on demand; one runs the real server.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import until
from triton_lifecycle.launcher import LauncherError, installation, leftovers, server, serverlog
from triton_lifecycle.launcher.installation import (
    Installation,
    assemble_backends,
    child_environment,
    find_installation,
    libpython_folder,
)
from triton_lifecycle.launcher.ports import Ports, PortTaken, holder, is_free
from triton_lifecycle.launcher.restarts import RESTART_WINDOW_S, Restarts
from triton_lifecycle.launcher.server import StartFailed, TritonServer

STAND_IN = """
import http.server, os, signal, subprocess, sys, time
signal.alarm(120)  # deaf to SIGTERM or not, it outlives no test by much
options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if "=" in a)
mode = os.environ.get("STAND_IN", "")
if mode == "broken":
    print("E1201 05:09:36.314420 5296 model_lifecycle.cc:642] \\"failed to load 'm' version 1: Internal: "
          "TritonModelException: config_error: limits.max is no number\\\\n\\\\nAt:\\\\n  /x.py(3): initialize\\\\n\\"")
    sys.exit(1)
region = "/dev/shm/" + options["backend-config"].split("=")[1] + "region"
open(region, "w").close()
def end(*_):
    os.unlink(region)
    os._exit(0)
def cut(*_):
    os.unlink(region)
    print("E1201 05:09:36.314420 5296 main.cc:400] \\"failed to stop server: Internal - Exit timeout expired. "
          "Exiting immediately.\\"", flush=True)
    os._exit(1)
def fail(*_):
    os.unlink(region)
    os._exit(3)
signal.signal(signal.SIGTERM, {"stubborn": signal.SIG_IGN, "busy": cut, "failing": fail}.get(mode, end))
if mode == "orphans":  # one that carries the mark but left the group, one in the group without the mark
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.Popen(sleep, env={})
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(400 if mode == "slow" else 200)
        self.end_headers()
    def log_message(self, *_): pass
print('I1201 05:08:38.351944 4989 model_lifecycle.cc:472] "loading: m:1"', flush=True)
http.server.HTTPServer((options["http-address"], int(options["http-port"])), Health).serve_forever()
"""

Make = Callable[..., TritonServer]
Foreground = Callable[[str], subprocess.Popen[str]]


def _stand_in(folder: Path) -> Installation:
    binary = folder / "tritonserver"
    binary.write_text(f"#!{sys.executable}\n{STAND_IN}", encoding="utf-8")
    binary.chmod(0o755)
    python = folder / "backends" / "python"
    python.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_stub"):
        (python / name).touch()
    return Installation(binary, folder / "backends")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Build servers that run the stand-in in the given mode."""
    stand_in = _stand_in(tmp_path)
    monkeypatch.setattr(server, "find_installation", lambda: stand_in)
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.2)
    (tmp_path / "repository" / "m" / "1").mkdir(parents=True)
    made: list[TritonServer] = []

    def build(mode: str = "", **more: object) -> TritonServer:
        options = {"env": {"STAND_IN": mode}, "state": tmp_path / "state"} | more
        made.append(TritonServer(tmp_path / "repository", **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for one in made:
        one.kill()


def regions(of: TritonServer) -> list[Path]:
    """Return a server's shared memory regions."""
    return list(leftovers.SHM.glob(f"{of.shm_prefix}*"))


# --- the life of a server ---------------------------------------------------------------------------------------------


def test_a_server_starts_gets_ready_and_stops(make: Make):
    """start, wait_ready and stop: progress is told, the exit code is 0, and nothing is left."""
    told: list[str] = []
    one = make().start().wait_ready(20, told.append)
    assert one.running
    assert regions(one)
    assert one.http_url == f"127.0.0.1:{one.ports.http}"
    assert one.metrics_url == f"http://127.0.0.1:{one.ports.metrics}/metrics"
    assert told
    assert one.stop() == 0
    assert (one.exit_code, one.running, one.processes(), regions(one)) == (0, False, [], [])
    assert list((one.state / "servers").iterdir()) == []


def test_it_stops_at_the_end_of_a_with_block(make: Make):
    """The context manager starts the server and leaves none behind."""
    with make() as one:
        one.wait_ready(20)
        pid = one.pid
    assert one.exit_code == 0
    assert not psutil.pid_exists(pid)


def test_a_server_is_scheduled_with_its_starter(make: Make):
    """It leads a group of its own, for Ctrl-C, in its starter's session, which Linux schedules as one."""
    one = make().start()
    assert os.getpgid(one.pid) == one.pid
    assert os.getsid(one.pid) == os.getsid(0)


def test_a_second_start_is_refused(make: Make):
    """One object is one server."""
    one = make().start()
    with pytest.raises(LauncherError, match="started before"):
        one.start()


def test_one_that_ignores_sigterm_is_killed_after_its_grace(make: Make):
    """The wait for an orderly end is bounded, and the report says so."""
    one = make("stubborn").start().wait_ready(20)
    assert one.stop(grace_s=0.3) == -signal.SIGKILL
    assert "did not end within" in one.leftovers[0]


def test_whatever_a_killed_server_leaves_is_ended(make: Make):
    """Kill -9: processes known by mark or by group end, shared memory goes, without anybody asking."""
    one = make("orphans").start().wait_ready(20)
    family = one.processes()
    assert len(family) == 3
    os.kill(one.pid, signal.SIGKILL)
    assert one.wait(60) == -signal.SIGKILL
    assert not any(process.is_running() for process in family)
    assert regions(one) == []
    assert sum("ended" in line for line in one.leftovers) == 2


def test_a_failed_start_says_what_the_log_says(make: Make):
    """The message carries the model's own error, not the embedded interpreter's stack."""
    with pytest.raises(StartFailed, match=r"model m: config_error: limits\.max is no number") as caught:
        make("broken").start().wait_ready(20)
    assert "At:" not in str(caught.value)
    assert "code 1" in str(caught.value)


def test_a_start_that_takes_too_long_is_ended(make: Make):
    """The message says how far the server came, and the server is gone."""
    one = make("slow").start()
    until(lambda: "loading" in one.log())
    with pytest.raises(StartFailed, match=r"not ready after 1 s \(last seen loading m\)"):
        one.wait_ready(1)
    assert not one.running


def test_each_phase_is_told_once(make: Make, monkeypatch: pytest.MonkeyPatch):
    """Lines of several models and processes alternate in the log; the progress does not, and a long phase goes on."""
    one = make("slow").start()
    logs = iter(["starting a", "starting the engine", "starting a", "starting the engine", "loading"])
    monkeypatch.setattr(server, "LOOK_S", 0.01)
    monkeypatch.setattr(server, "PROGRESS_S", 0.3)
    monkeypatch.setattr(serverlog, "phase", lambda _: next(logs, "starting a"))
    told: list[str] = []
    with pytest.raises(StartFailed):
        one.wait_ready(2, told.append)
    phases = [line.split(" s  ")[1] for line in told]
    assert phases[:3] == ["starting a", "starting the engine", "loading"]
    assert set(phases[3:]) == {"still loading"}


def test_a_taken_port_is_told_before_anything_starts(make: Make):
    """The message names the port and the process that holds it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        free = Ports.free()
        one = make(ports=Ports(free.http, port, free.metrics))
        with pytest.raises(PortTaken, match=rf"port {port} \(grpc\).*\(pid {os.getpid()}\)"):
            one.start()
    assert one.processes() == []


@pytest.mark.parametrize(
    ("repository", "models", "says"),
    [
        ("nowhere", None, "does not exist"),
        ("empty", None, "holds no model"),
        ("repository", ["n"], "no model 'n' in .*; it has: m"),
    ],
)
def test_a_bad_repository_is_told_before_anything_starts(
    make: Make, tmp_path: Path, repository: str, models: list[str] | None, says: str
):
    """Each fault of the repository has its own clear message."""
    (tmp_path / "empty").mkdir()
    make()
    with pytest.raises(LauncherError, match=says):
        TritonServer(tmp_path / repository, models=models, state=tmp_path / "state").start()


@pytest.mark.parametrize(
    ("log", "says"), [("none/deep/x.log", "folder .*none/deep .*does not exist"), (".", "is a folder")]
)
def test_a_bad_place_for_the_log_is_told_before_anything_starts(make: Make, tmp_path: Path, log: str, says: str):
    """A folder that does not exist is named, not made: it may be mistyped."""
    one = make(log_path=tmp_path / log)
    with pytest.raises(LauncherError, match=says):
        one.start()
    assert not (tmp_path / "none").exists()
    assert one.processes() == []


def test_models_ports_and_own_arguments_reach_the_command_line(make: Make):
    """Named models switch to explicit loading; extra arguments come last."""
    one = make(models=["m"], ports=Ports.free(), extra_args=["--log-verbose=1"], exit_timeout_s=7).start()
    one.wait_ready(20)
    command = " ".join(psutil.Process(one.pid).cmdline())
    for part in (
        "--model-control-mode=explicit --load-model=m --log-verbose=1",
        "--exit-timeout-secs=7",
        f"--backend-config=python,shm-region-prefix-name={one.shm_prefix}",
        f"--grpc-port={one.ports.grpc}",
    ):
        assert part in command


def test_two_servers_share_neither_memory_nor_ports(make: Make):
    """Prefixes and ports of two servers at once are different, and one's end leaves the other alone."""
    one, two = make().start(), make().start()
    one.wait_ready(20)
    two.wait_ready(20)
    assert len({*vars(one.ports).values(), *vars(two.ports).values()}) == 6
    one.kill()
    assert two.running
    assert regions(two)


def test_old_logs_go_and_those_of_living_servers_stay(make: Make):
    """So many of the ended ones are kept; a server that runs keeps its log however old that is."""
    one = make().start().wait_ready(20)
    folder = one.log_path.parent
    for number in range(server.LOGS_KEPT + 5):
        log = folder / f"server-ended-{number:02}.log"
        log.touch()
        os.utime(log, (number, number))
    os.utime(one.log_path, (0, 0))
    two = make().start()
    ended = sorted(path.name for path in folder.glob("server-ended-*.log"))
    assert ended == [f"server-ended-{number:02}.log" for number in range(5, server.LOGS_KEPT + 5)]
    assert one.log_path.exists()
    assert two.log_path.exists()


def test_the_next_start_cleans_up_after_a_killed_launcher(make: Make, tmp_path: Path):
    """With launcher and server both killed, processes and shared memory are removed by whoever starts next."""
    orphan = subprocess.Popen(["sleep", "60"], env={leftovers.MARK: "dead"}, start_new_session=True)
    region = leftovers.SHM / f"tlc_test_{os.getpid()}_region"
    region.touch()
    with subprocess.Popen(["true"]) as gone:
        created = time.time()
    record = tmp_path / "state" / "servers" / "dead.json"
    leftovers.write_record(record, leftovers.Footprint("dead", region.name[:-6], gone.pid, created))
    facts = json.loads(record.read_text()) | {"launcher_pid": gone.pid, "launcher_created": created}
    record.write_text(json.dumps(facts))
    try:
        one = make().start()
        assert orphan.poll() is not None
        assert not region.exists()
        assert not record.exists()
        assert len(one.swept) == 2
        assert one.leftovers == []
    finally:
        orphan.kill()
        orphan.wait()
        region.unlink(missing_ok=True)


def test_a_group_number_given_out_again_is_not_ours():
    """A dead server's record never leads to a process that merely has its number by now."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        earlier = leftovers.Footprint("mark", "tlc_none_", stranger.pid, time.time() - 5000)
        found = earlier.processes()
        stranger.kill()
    assert found == []


MAPPER = """
import mmap, os, sys, time
if os.fork() == 0:  # the leader stands for tritonserver, its child for the stub
    kept = [mmap.mmap(os.open(path, os.O_RDWR), 8) for path in sys.argv[1:]]
    print("mapped", flush=True)
time.sleep(60)
"""


def test_a_clients_shared_memory_is_not_touched():
    """Of the files a server has mapped only those named as its engine names them are removed."""
    own, client = leftovers.SHM / f"psm_test{os.getpid()}", leftovers.SHM / f"client{os.getpid()}"
    for path in (own, client):
        path.write_bytes(b"12345678")
    command = [sys.executable, "-c", MAPPER, str(own), str(client)]
    leader = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    try:
        assert leader.stdout is not None
        leader.stdout.readline()
        footprint = leftovers.Footprint("mark", "tlc_none_", leader.pid, psutil.Process(leader.pid).create_time())
        footprint.observe()
        leader.kill()
        leader.wait()
        footprint.sweep(patience_s=0)
        assert client.exists()
        assert not own.exists()
    finally:
        leader.kill()
        leader.wait()
        leader.stdout.close()
        own.unlink(missing_ok=True)
        client.unlink(missing_ok=True)


DRIVER = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from triton_lifecycle.launcher import installation, server
from triton_lifecycle.launcher.foreground import Foreground
folder = Path({folder!r})
stand_in = installation.Installation(folder / "tritonserver", folder / "backends")
server.find_installation = lambda: stand_in
options = {{"state": folder / "state", "env": {{"STAND_IN": {mode!r}}}, "exit_timeout_s": 20}}
one = server.TritonServer(folder / "repository", **options)
say = lambda line: print(line, flush=True)
sys.exit(Foreground(one, say, restarts=2).run(on_ready=lambda it: say(f"READY {{it.pid}} {{it.http_url}}")))
"""


@pytest.fixture
def foreground(make: Make, tmp_path: Path) -> Iterator[Foreground]:
    """Run ``launcher.foreground`` in a process of its own, with the stand-in in the given mode."""
    make()
    started: list[subprocess.Popen[str]] = []

    def run(mode: str) -> subprocess.Popen[str]:
        paths = [str(Path(installation.__file__).parents[2])]
        code = DRIVER.format(paths=paths, folder=str(tmp_path), mode=mode)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        # Interrupted in the middle, a test leaves the driver's server too, and that one may be deaf to SIGTERM.
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
    leftovers.sweep_dead(tmp_path / "state" / "servers")


def _read_until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return line
    pytest.fail(f"it ended without saying {word!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_one_signal_drains(foreground: Foreground, number: signal.Signals):
    """The first Ctrl-C or SIGTERM stops the server in order, and its exit code is handed on."""
    process = foreground("")
    pid = int(_read_until(process, "READY ").split()[1])
    process.send_signal(number)
    _read_until(process, "draining")
    assert process.wait(60) == 0
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("mode", "says", "code"),
    [
        ("busy", "still running after the exit timeout of 20 s were cut", 1),
        ("failing", "not in order (exit code 3)", 3),
    ],
)
def test_in_the_foreground_a_bad_end_is_explained(foreground: Foreground, mode: str, says: str, code: int):
    """An exit code other than 0 comes with its reason, or with where to look for it."""
    process = foreground(mode)
    _read_until(process, "READY ")
    process.send_signal(signal.SIGINT)
    assert says in _read_until(process, "stopped")
    assert process.wait(60) == code


def test_in_the_foreground_a_second_signal_ends_at_once(foreground: Foreground):
    """A server that would take its whole grace is ended by the second Ctrl-C."""
    process = foreground("stubborn")
    pid = int(_read_until(process, "READY ").split()[1])
    process.send_signal(signal.SIGINT)
    _read_until(process, "draining")
    process.send_signal(signal.SIGINT)
    _read_until(process, "at once, as asked")
    process.wait(60)
    assert not psutil.pid_exists(pid)


def test_in_the_foreground_a_signal_ends_a_starting_server(foreground: Foreground):
    """Before it is ready there is nothing to drain."""
    process = foreground("slow")
    _read_until(process, "loading m")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


def test_in_the_foreground_a_dead_server_is_started_again(foreground: Foreground):
    """On the same ports, as often as allowed; then its end is an error with its story."""
    process = foreground("")
    where = set()
    for number in range(3):
        _, pid, url = _read_until(process, "READY ").split()
        where.add(url)
        os.kill(int(pid), signal.SIGKILL)
        if number < 2:
            assert "was ended by SIGKILL" in _read_until(process, f"started again ({number + 1} of 2)")
    assert len(where) == 1
    assert process.wait(60) == 1


def test_in_the_foreground_a_dead_stub_ends_the_server(foreground: Foreground, tmp_path: Path):
    """A model's process whose death its guardian reports costs the server its life: nobody waits for the dead."""
    process = foreground("")
    pid = int(_read_until(process, "READY ").split()[1])
    [record] = (tmp_path / "state" / "servers").glob("*.json")
    record.with_suffix(".deaths").write_text("123\n")
    assert "a model's process has died" in _read_until(process, "started again")
    _read_until(process, "READY ")
    assert not psutil.pid_exists(pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert list((tmp_path / "state" / "servers").iterdir()) == []


def test_the_server_ends_when_its_launcher_is_killed(foreground: Foreground):
    """Kill -9 of the launcher reaches tritonserver as SIGTERM."""
    process = foreground("")
    triton = psutil.Process(int(_read_until(process, "READY ").split()[1]))
    process.kill()
    triton.wait(60)


def test_the_real_server_two_at_once(tmp_path: Path):
    """Two real servers with a plain Python model: one's death is cleaned up after and leaves the other alone."""
    model = tmp_path / "repository" / "echo"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text('backend: "python"\ninstance_group [{ kind: KIND_CPU }]\n')
    (model / "1" / "model.py").write_text(
        textwrap.dedent("""\
            import msgspec  # of the environment, not of the interpreter
            class TritonPythonModel:
                def execute(self, requests):
                    return []
            """)
    )
    servers = [TritonServer(model.parent, state=tmp_path / "state", exit_timeout_s=5).start() for _ in range(2)]
    one, two = servers
    try:
        for each in servers:
            each.wait_ready(60)
            assert len(each.processes()) == 2
            assert regions(each)
        os.kill(one.pid, signal.SIGKILL)
        assert one.wait(60) == -signal.SIGKILL
        assert two.running
        two.kill()
        for each in servers:
            assert each.processes() == []
            assert regions(each) == []
    finally:
        for each in servers:
            each.kill()


def test_restarts_are_counted_within_their_window():
    """One more than allowed is refused, and what is longer ago than the window counts no more."""
    restarts = Restarts(2)
    assert [restarts.one_more(at) for at in (0.0, 10.0, 20.0)] == [True, True, False]
    assert str(restarts) == "2 of 2"
    assert restarts.one_more(RESTART_WINDOW_S + 5.0)
    assert not restarts.one_more(RESTART_WINDOW_S + 5.0)
    assert not Restarts(0).one_more(0.0)


# --- ports ------------------------------------------------------------------------------------------------------------


def test_free_ports_are_three_and_free():
    """Ports.free finds three different ports that can be bound."""
    found = Ports.free()
    assert len(set(vars(found).values())) == 3
    found.check("127.0.0.1")


@pytest.mark.parametrize(
    ("ports", "host", "says"),
    [
        (Ports(0, 1, 2), "127.0.0.1", "between 1 and 65535"),
        (Ports(29_001, 29_001, 29_002), "127.0.0.1", "given twice"),
        (Ports(29_001, 29_002, 29_003), "192.0.2.1", "no address of this machine"),
        (Ports(29_001, 29_002, 29_003), "no.such.host.invalid", "no address of this machine"),
    ],
)
def test_unusable_ports_are_told(ports: Ports, host: str, says: str):
    """Range, doubles and foreign addresses each have their message."""
    with pytest.raises(LauncherError, match=says):
        ports.check(host)


def test_the_holder_of_a_port_is_found():
    """A listener of this user is visible with its process id."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        found = holder(port)
        assert found is not None
        assert found.pid == os.getpid()


# --- installation -----------------------------------------------------------------------------------------------------


def test_the_layout_holds_the_stub_of_this_python_and_our_backend(tmp_path: Path):
    """Library and stub are real files side by side; both backend names lead to the given folder."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "model.py").write_text("x = 1")
    found = find_installation()
    folder = assemble_backends(found, tmp_path, tmp_path / "ours")
    library = folder / "python" / "libtriton_python.so"
    assert library.is_file()
    assert not library.is_symlink()
    assert (folder / "python" / "triton_python_backend_stub").read_bytes() == found.stub.read_bytes()
    for name in ("vllm", "lifecycle"):
        assert (folder / name / "model.py").read_text() == "x = 1"
    assert assemble_backends(found, tmp_path, tmp_path / "ours") == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_missing_stub_says_which_pythons_there_are(tmp_path: Path):
    """For a Python without a stub the message lists those that have one."""
    (tmp_path / "backends" / "python").mkdir(parents=True)
    (tmp_path / "backends" / "python" / "libtriton_python.so").touch()
    (tmp_path / "stubs" / "3.7").mkdir(parents=True)
    broken = Installation(tmp_path / "x", tmp_path / "backends", tmp_path / "stubs", tmp_path)
    with pytest.raises(LauncherError, match=r"it has: 3\.7"):
        assemble_backends(broken, tmp_path)


def test_the_childs_environment_finds_the_right_things_first(monkeypatch: pytest.MonkeyPatch):
    """libpython, packages and python3 of this environment come before everything else."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/theirs")
    monkeypatch.setenv("PYTHONPATH", "/their/code")
    found = find_installation()
    env = child_environment(found, mark={"MARK": "1"}, given={"VLLM_CPU_KVCACHE_SPACE": "3"})
    assert env["LD_LIBRARY_PATH"].split(":") == [str(libpython_folder()), str(found.libraries), "/theirs"]
    assert env["PATH"].startswith(str(Path(sys.executable).parent))
    code = env["PYTHONPATH"].split(":")
    assert (Path(code[0]) / "triton_lifecycle").is_dir()
    assert code[1].endswith("site-packages")
    assert code[-1] == "/their/code"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert env["MARK"] == "1"


def test_the_hub_is_off_unless_wanted(monkeypatch: pytest.MonkeyPatch):
    """Offline is a default, not a rule."""
    found = find_installation()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert child_environment(found, mark={}, given={})["HF_HUB_OFFLINE"] == "1"
    assert child_environment(found, mark={}, given={"HF_HUB_OFFLINE": "0"})["HF_HUB_OFFLINE"] == "0"
    assert "HF_HUB_OFFLINE" not in child_environment(found, mark={}, given={"TRITON_LIFECYCLE_ONLINE": "1"})


# --- the server's log -------------------------------------------------------------------------------------------------

GLOG = "E1201 05:09:34.647760 5296 model_lifecycle.cc:642] "


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (
            f"{GLOG}\"failed to load 'a' version 1: Invalid argument: unable to find backend library for backend 'x'\"",
            "model a: unable to find backend library for backend 'x'",
        ),
        (
            f"{GLOG}\"failed to load 'a' version 1: Internal: config_error: two:\\n  - x\"",
            "model a: config_error: two:\n  - x",
        ),
        ("/opt/bin/tritonserver: unrecognized option '--nosuch'\nusage", "unrecognized option '--nosuch'"),
        ("error: creating server: Internal - failed to load all models", "creating server: Internal - failed to load"),
        ("(EngineCore pid=1) ERROR 12-01 ValueError: no room for the KV cache", "ValueError: no room for the KV cache"),
        ("one\ntwo", "its last lines were:\none\ntwo"),
    ],
)
def test_a_log_is_explained(log: str, says: str):
    """The reason is found in each of the forms in which Triton, the stub and vLLM give it."""
    assert says in serverlog.explain(log)


ASIDES = """\
+---------+---------+--------+
| Model   | Version | Status |
| smollm2 | 1       | READY  |
+---------+---------+--------+
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked
  warnings.warn('resource_tracker: There appear to be %d '
"""


def test_a_killed_servers_last_lines_are_those_that_tell_something():
    """Rows of tables and the warnings of ending processes are left out; if nothing is left, that is said."""
    assert serverlog.explain(f"one\n{ASIDES}two\n{ASIDES}") == "its last lines were:\none\ntwo"
    assert serverlog.explain(ASIDES) == "its log does not say why"


def test_known_noise_explains_nothing():
    """Lines every CPU start prints are not taken for the reason."""
    noise = 'E1201 05:08:38.350657 4989 server.cc:241] "CudaDriverHelper has not been initialized."\n'
    assert serverlog.explain(f"{noise}error: the reason") == "the reason"


def test_the_phase_is_the_last_thing_seen():
    """A start's progress is told in a few words."""
    log = 'I1201 05:08:38.351944 4989 model_lifecycle.cc:472] "loading: m:1"\nINFO Starting to load model x\nother'
    assert serverlog.phase(log) == "loading the weights"
    assert serverlog.phase("") == ""
