"""Storages on Valkey, through a proxy that loses things, beside twins that lose nothing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.replies import Page
from holdfast.storage import audit, connect
from holdfast.storage.redis import RedisStorage
from tests.proxy import Exchange, Hook, Proxy
from tests.servers import Server, shared
from tests.storage.stage import Stage


@pytest.fixture
def server() -> Server:
    found = shared("valkey")
    assert found is not None
    return found


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    async with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
async def stage(proxy: Proxy) -> AsyncIterator[Stage]:
    """A storage behind the proxy."""
    async with opened(proxy.url) as stage:
        yield stage


@pytest.fixture
async def clone(server: Server) -> AsyncIterator[Stage]:
    """What happens to this one happens undisturbed: in another namespace, on a clock that shows the same."""
    async with opened(server.url) as stage:
        yield stage


@asynccontextmanager
async def opened(url: str, like: Stage | None = None, namespace: str = "") -> AsyncIterator[Stage]:
    """A storage with its own namespace and clock, or with those of another stage, as another process has it."""
    clock = ManualClock() if like is None else like.clock
    namespace = namespace or (uuid.uuid4().hex if like is None else namespace_of(like))
    async with connect(url, clock=clock, namespace=namespace) as storage:
        yield Stage(storage, clock)


def namespace_of(stage: Stage) -> str:
    return cast(RedisStorage, stage.storage).namespace


def key(stage: Stage, rest: str) -> str:
    """A key of the stage's queue."""
    return f"{{{namespace_of(stage)}/{stage.queue}}}:{rest}"


async def contents(stage: Stage) -> object:
    """All that can be read: counts and totals, workers, every record of every queue, and what the audit says."""
    snapshot = await stage.storage.snapshot()
    found: list[object] = []
    for stats in snapshot.queues:
        page: Page = await stage.storage.scan(stats.queue, limit=200)
        assert page.after is None
        records = await stage.storage.get(stats.queue, [job.id for job in page.jobs]) if page.jobs else []
        found.append((page.jobs, records, (await audit(stage.storage, stats.queue)).problems))
    return snapshot, found


def words_of(exchange: Exchange) -> list[bytes]:
    """What a call of the library says after its keys: the verb, the client, the number, and the rest."""
    return exchange.command[3 + int(exchange.command[2]) :] if exchange.name == "FCALL" else []


def call_of(exchange: Exchange) -> tuple[str, int] | None:
    """The verb and the number of a call that changes something; None for everything else."""
    verb, _, number, *_ = words_of(exchange) or (b"", b"", b"")
    return (verb.decode(), int(number)) if number else None


def applied(exchanges: Iterable[Exchange], verb: str) -> list[Exchange]:
    """The calls of a verb that the server has run."""
    return [exchange for exchange in exchanges if is_call(exchange, verb) and exchange.reply[:1] not in (b"", b"-")]


def is_call(exchange: Exchange, verb: str) -> bool:
    call = call_of(exchange)
    return call is not None and call[0] == verb


def first(true: Callable[[Exchange], bool], verdict: str, times: int = 1) -> Hook:
    """A hook that decides so about the first exchanges of a kind, and lets all others pass."""
    left = [verdict] * times
    return lambda exchange: left.pop() if left and true(exchange) else "pass"


def lost(verb: str, verdict: str) -> Hook:
    """A rule that loses the first reply to a call that the server has run."""
    return first(lambda exchange: bool(applied([exchange], verb)), verdict)


async def until(true: Callable[[], bool], seconds: float = 10) -> None:
    """Wait for what the other side does in its own time."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
