"""The same verbs, blocking: for Django views, scripts and notebooks. Each call runs on one event loop in the
background, which opens what it needs when it is first used, and again after a fork.

Every method here has the signature and the words of the one it calls; a test compares them.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import UnionType
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, overload

from holdfast._client.info import JobInfo, Stats
from holdfast._client.lease import Lease, read_token
from holdfast._client.queue import Queue
from holdfast._client.request import BoundRequest, Handle, enqueue_many
from holdfast._client.session import Session
from holdfast._client.task import Using
from holdfast._core.events import Event
from holdfast._core.jobs import State
from holdfast._core.options import DEFAULT_WAIT_S, EnqueueOptions, PullOptions, Seconds, UsingOptions
from holdfast._core.replies import CancelResult, KeepResult, Placed, Repaired, Snapshot, Swept
from holdfast.errors import NotOpen

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


class _Background:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="holdfast-sync", daemon=True)
        self._thread.start()


_lock = threading.Lock()
_background: _Background | None = None


def _current() -> _Background:
    """The one loop of this process. A child that was forked gets another: its parent's thread is not in it."""
    global _background
    if _background is None or _background.pid != os.getpid():
        with _lock:
            if _background is None or _background.pid != os.getpid():
                _background = _Background()
    return _background


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # Another thread may have held it in the parent.


os.register_at_fork(after_in_child=_after_fork)


def run(session: Session, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run what `make` gives on the background's loop, and wait for it."""
    _refuse_in_a_loop()
    background = _current()

    async def opened() -> T:
        await session.open_for_blocking_calls()
        return await make()

    future = asyncio.run_coroutine_threadsafe(opened(), background.loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _refuse_in_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise NotOpen("a blocking call in a running event loop would stop the loop: await the async version instead")


def close(session: Session) -> None:
    """Close what blocking calls have opened. The next one opens it again."""
    _refuse_in_a_loop()
    if _background is not None and _background.pid == os.getpid():
        asyncio.run_coroutine_threadsafe(session.close_for_blocking_calls(), _background.loop).result(5)


@atexit.register
def _close_all() -> None:
    if _background is not None and _background.pid == os.getpid():
        _background.loop.call_soon_threadsafe(_background.loop.stop)


def mirrors(source: type[Any]) -> Callable[[type[T]], type[T]]:
    """A class whose methods say what those of `source` say."""

    def mirror(facade: type[T]) -> type[T]:
        for name, method in vars(facade).items():
            if callable(method) and method.__doc__ is None and not name.startswith("_"):
                method.__doc__ = getattr(source, name).__doc__
        return facade

    return mirror


@mirrors(Handle)
class SyncHandle(Generic[R_co]):
    """A job that was requested. See `Handle`."""

    def __init__(self, session: Session, handle: Handle[R_co]) -> None:
        self._session = session
        self._handle = handle
        self.queue: str = handle.queue
        self.id: str = handle.id
        self.placed: Placed | None = handle.placed

    @property
    def generation(self) -> int:
        return self._handle.generation

    def result(self, *, wait: Seconds | None = DEFAULT_WAIT_S) -> R_co:
        return run(self._session, lambda: self._handle.result(wait=wait))

    def state(self) -> State | None:
        return run(self._session, lambda: self._handle.state())

    def cancel(self) -> CancelResult:
        return run(self._session, lambda: self._handle.cancel())

    def events(self) -> Iterator[Event]:
        return _iterate(self._session, lambda: self._handle.events())

    def __repr__(self) -> str:
        return repr(self._handle)


@mirrors(Using)
class SyncUsing(Generic[P, R]):
    """A task, blocking. See `Using`."""

    def __init__(self, session: Session, task: Using[P, R]) -> None:
        self._session = session
        self._task = task

    def using(self, **options: Unpack[UsingOptions]) -> SyncUsing[P, R]:
        return SyncUsing(self._session, self._task.using(**options))

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundRequest[R]:
        return self._task.bind(*args, **kwargs)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> SyncHandle[R]:
        return SyncHandle(self._session, run(self._session, lambda: self._task.enqueue(*args, **kwargs)))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return run(self._session, lambda: self._task.call(*args, **kwargs))


@mirrors(Lease)
class SyncLease:
    """The right to work on one job. See `Lease`."""

    def __init__(self, session: Session, lease: Lease) -> None:
        self._session = session
        self._lease = lease
        self.queue: str = lease.queue
        self.id: str = lease.id
        self.payload: Any = lease.payload
        self.attempt: int = lease.attempt
        self.fence: int = lease.fence

    @property
    def deadline(self) -> datetime:
        return self._lease.deadline

    @property
    def token(self) -> str:
        return self._lease.token

    @property
    def cancel_asked(self) -> bool:
        return self._lease.cancel_asked

    @property
    def settled(self) -> bool:
        return self._lease.settled

    def complete(self, result: object = None) -> bool:
        return run(self._session, lambda: self._lease.complete(result))

    def retry(
        self, *, delay: Seconds | None = None, at: datetime | None = None, error: BaseException | str | None = None
    ) -> bool:
        return run(self._session, lambda: self._lease.retry(delay=delay, at=at, error=error))

    def fail(self, error: BaseException | str = "failed") -> bool:
        return run(self._session, lambda: self._lease.fail(error))

    def release(self) -> bool:
        return run(self._session, lambda: self._lease.release())

    def extend(self, seconds: Seconds | None = None, *, progress: object = None) -> bool:
        return run(self._session, lambda: self._lease.extend(seconds, progress=progress))

    def __repr__(self) -> str:
        return repr(self._lease)


@mirrors(Queue)
class SyncQueue:
    """A queue by its name, blocking. See `Queue`."""

    def __init__(self, session: Session, queue: Queue) -> None:
        self._session = session
        self._queue = queue
        self.name: str = queue.name

    def bind(self, payload: object, **options: Unpack[EnqueueOptions]) -> BoundRequest[Any]:
        return self._queue.bind(payload, **options)

    def enqueue(self, payload: object, **options: Unpack[EnqueueOptions]) -> SyncHandle[Any]:
        return SyncHandle(self._session, run(self._session, lambda: self._queue.enqueue(payload, **options)))

    def call(self, payload: object, *, wait: Seconds | None = DEFAULT_WAIT_S, **options: Unpack[EnqueueOptions]) -> Any:
        return run(self._session, lambda: self._queue.call(payload, wait=wait, **options))

    def lease_from_token(self, token: str) -> SyncLease | None:
        lease = run(self._session, lambda: self._queue.lease_from_token(token))
        return None if lease is None else SyncLease(self._session, lease)

    def retry(self, id: str | bytes) -> SyncHandle[Any]:
        return SyncHandle(self._session, run(self._session, lambda: self._queue.retry(id)))

    def lease(self, *, seconds: Seconds = 30, wait: Seconds | None = DEFAULT_WAIT_S) -> SyncLease | None:
        lease = run(self._session, lambda: self._queue.lease(seconds=seconds, wait=wait))
        return None if lease is None else SyncLease(self._session, lease)

    @contextmanager
    def leased(
        self, *, seconds: Seconds = 30, wait: Seconds | None = DEFAULT_WAIT_S, extend: bool = True
    ) -> Generator[SyncLease | None]:
        block = self._queue.leased(seconds=seconds, wait=wait, extend=extend)
        lease = run(self._session, lambda: _enter(block))
        try:
            yield None if lease is None else SyncLease(self._session, lease)
        except BaseException as error:
            raised = error
            run(self._session, lambda: _leave(block, raised))
            raise
        else:
            run(self._session, lambda: _leave(block, None))

    def get(self, id: str | bytes) -> JobInfo | None:
        return run(self._session, lambda: self._queue.get(id))

    @overload
    def result(self, id: str | bytes, *, type: type[R], wait: Seconds | None = DEFAULT_WAIT_S) -> R: ...
    @overload
    def result(self, id: str | bytes, *, type: UnionType, wait: Seconds | None = DEFAULT_WAIT_S) -> Any: ...
    @overload
    def result(self, id: str | bytes, *, wait: Seconds | None = DEFAULT_WAIT_S) -> Any: ...
    def result(self, id: str | bytes, *, type: Any = Any, wait: Seconds | None = DEFAULT_WAIT_S) -> Any:
        return run(self._session, lambda: self._queue.result(id, type=type, wait=wait))

    def keep(self, id: str | bytes, ttl: Seconds) -> KeepResult:
        return run(self._session, lambda: self._queue.keep(id, ttl))

    def cancel(self, id: str | bytes) -> CancelResult:
        return run(self._session, lambda: self._queue.cancel(id))

    def jobs(self, state: State | str | None = None) -> Iterator[JobInfo]:
        return _iterate(self._session, lambda: self._queue.jobs(state))

    def stats(self) -> Stats:
        return run(self._session, lambda: self._queue.stats())

    def pause(self, *, reason: str = "") -> None:
        return run(self._session, lambda: self._queue.pause(reason=reason))

    def resume(self) -> None:
        return run(self._session, lambda: self._queue.resume())

    def sweep(self, *, worker: str | None = None) -> Swept:
        return run(self._session, lambda: self._queue.sweep(worker=worker))

    def repair(self, *, dry_run: bool = False) -> Repaired:
        return run(self._session, lambda: self._queue.repair(dry_run=dry_run))

    def purge(self, states: Collection[State | str] = Queue.PURGED) -> int:
        return run(self._session, lambda: self._queue.purge(states))

    def delete(self, *, wait: Seconds | None = DEFAULT_WAIT_S) -> bool:
        return run(self._session, lambda: self._queue.delete(wait=wait))

    def events(self) -> Iterator[Event]:
        return _iterate(self._session, lambda: self._queue.events())


class SyncApp:
    """An app, blocking. See `Holdfast`; tasks and queues have a `sync` of their own."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def enqueue_many(self, bounds: Iterable[BoundRequest[R]]) -> list[SyncHandle[R]]:
        """See `Holdfast.enqueue_many`."""
        handles = run(self._session, lambda: enqueue_many(self._session, bounds))
        return [SyncHandle(self._session, handle) for handle in handles]

    def queue(self, name: str, **options: Unpack[PullOptions]) -> SyncQueue:
        """See `Holdfast.queue`."""
        return SyncQueue(self._session, Queue(self._session, name, options))

    def lease(self, token: str, **options: Unpack[PullOptions]) -> SyncLease | None:
        """See `Holdfast.lease`."""
        return self.queue(read_token(token).queue, **options).lease_from_token(token)

    def stats(self) -> Snapshot:
        """Counts of all queues, and the workers that are there."""
        return run(self._session, lambda: self._session.storage.snapshot())

    def evict(self, worker: str) -> bool:
        """Ask a worker to stop. False if there is none of that name."""
        return run(self._session, lambda: self._session.storage.evict(worker))

    def close(self) -> None:
        """Close the connection of the blocking calls. The next one opens it again."""
        close(self._session)


def _iterate(session: Session, make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
    items = make()

    async def following() -> T:
        return await anext(items)

    async def leave() -> None:
        await items.aclose()  # type: ignore[attr-defined]

    try:
        while True:
            try:
                item = run(session, following)
            except StopAsyncIteration:
                return
            yield item
    finally:
        run(session, leave)


async def _enter(block: Any) -> Any:
    return await block.__aenter__()


async def _leave(block: Any, error: BaseException | None) -> None:
    try:
        await block.__aexit__(None if error is None else type(error), error, None)
    except BaseException as raised:
        if raised is not error:
            raise
