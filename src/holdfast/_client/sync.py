"""Blocking versions of the API, for Django views, scripts and notebooks: on an event loop in a background thread.

Every method here has the signature and the docstring of the async method that it calls; a test compares them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, cast, overload

from holdfast._client import familiar
from holdfast._client.app import Holdfast
from holdfast._client.lease import Lease
from holdfast._client.queue import Queue
from holdfast._client.request import BoundRequest, Handle, Using
from holdfast._client.session import Session
from holdfast._core.options import DEFAULT_WAIT_S, EnqueueOptions, PullOptions, Seconds, UsingOptions
from holdfast._core.replies import Placed
from holdfast.errors import DuplicateJob, NotOpen

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""The loop of each process id. A forked child does not have the thread of its parent's loop, so it starts another."""


def _background_loop() -> asyncio.AbstractEventLoop:
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="holdfast-sync", daemon=True).start()
        return loop


# A fork waits for the lock: otherwise a child could get it locked by a thread that it does not have.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def run(session: Session, make: Callable[[], Awaitable[T]]) -> T:
    """Await the result of `make` on the background loop, and wait for it."""
    _refuse_in_a_loop()
    if session.run_blocking is not None:
        return cast("T", session.run_blocking(make))

    async def opened() -> T:
        await session.open_for_blocking_calls()
        return await make()

    future = asyncio.run_coroutine_threadsafe(opened(), _background_loop())
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
    raise NotOpen("a blocking call inside an event loop would stop the loop: await the async version instead")


class Blocking(Generic[S_co]):
    """The blocking form of an object of the class `mirrors`. Annotations of a subclass become properties that read the
    attributes of the object; its methods get the docstrings of the class."""

    def __init__(self, session: Session, source: S_co) -> None:
        self._session = session
        self._source = source

    def __init_subclass__(cls, *, mirrors: type[Any]) -> None:
        for name, method in vars(cls).items():
            if callable(method) and method.__doc__ is None:
                method.__doc__ = getattr(mirrors, name).__doc__
        for name in inspect.get_annotations(cls):
            setattr(cls, name, property(attrgetter(f"_source.{name}")))

    def __repr__(self) -> str:
        return repr(self._source)


Verb = Callable[Concatenate[S, P], Coroutine[Any, Any, R]]
BlockingVerb = Callable[Concatenate[Blocking[S], P], R]


@overload
def blocking(method: Verb[S, P, R]) -> BlockingVerb[S, P, R]: ...
@overload
def blocking(method: Verb[S, P, R], wrap: Callable[[Session, R], T]) -> BlockingVerb[S, P, T]: ...
def blocking(method: Callable[..., Any], wrap: Callable[[Session, Any], Any] | None = None) -> Callable[..., Any]:
    """Return the blocking form of an async method. `wrap` makes the blocking form of its result."""

    @functools.wraps(method)
    def call(self: Blocking[Any], *args: Any, **kwargs: Any) -> Any:
        session, source = self._session, self._source  # pyright: ignore[reportPrivateUsage]
        result = run(session, lambda: method(source, *args, **kwargs))
        return result if wrap is None else wrap(session, result)

    return call


def iterating(method: Callable[Concatenate[S, P], AsyncIterator[T]]) -> BlockingVerb[S, P, Iterator[T]]:
    """Return the blocking form of an async generator."""

    def iterate(self: Blocking[S], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        session, source = self._session, self._source  # pyright: ignore[reportPrivateUsage]
        items = method(source, *args, **kwargs)
        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield run(session, items.__anext__)
        finally:
            run(session, items.aclose)  # type: ignore[attr-defined]

    return functools.update_wrapper(iterate, method)


class SyncHandle(Blocking[Handle[R_co]], mirrors=Handle):
    """A requested job, blocking. See `Handle`."""

    if not TYPE_CHECKING:
        __getattr__ = familiar.answer("a handle", familiar.OF_A_HANDLE)

    queue: str
    id: str
    placed: Placed | None
    generation: int

    def result(self, *, wait: Seconds | None = DEFAULT_WAIT_S) -> R_co:
        return run(self._session, lambda: self._source.result(wait=wait))

    state = blocking(Handle[Any].state)
    info = blocking(Handle[Any].info)
    cancel = blocking(Handle[Any].cancel)
    set_priority = blocking(Handle[Any].set_priority)
    events = iterating(Handle[Any].events)


class SyncUsing(Blocking[Using[P, R]], mirrors=Using):
    """A task, blocking. See `Using`."""

    if not TYPE_CHECKING:
        __getattr__ = familiar.answer("a task", familiar.OF_A_TASK)

    def using(self, **options: Unpack[UsingOptions]) -> SyncUsing[P, R]:
        return SyncUsing(self._session, self._source.using(**options))

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundRequest[R]:
        return self._source.bind(*args, **kwargs)

    def id_for(self, *args: P.args, **kwargs: P.kwargs) -> str:
        return self._source.id_for(*args, **kwargs)

    def handle(self, id: str | bytes) -> SyncHandle[R]:
        return SyncHandle(self._session, self._source.handle(id))

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> SyncHandle[R]:
        return SyncHandle(self._session, run(self._session, lambda: self._source.enqueue(*args, **kwargs)))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return run(self._session, lambda: self._source.call(*args, **kwargs))


class SyncLease(Blocking[Lease], mirrors=Lease):
    """The right to run one job, blocking. See `Lease`."""

    queue: str
    id: str
    payload: Any
    headers: dict[str, str]
    attempt: int
    fence: int
    deadline: datetime
    token: str
    cancel_asked: bool
    settled: bool

    complete = blocking(Lease.complete)
    retry = blocking(Lease.retry)
    fail = blocking(Lease.fail)
    release = blocking(Lease.release)
    extend = blocking(Lease.extend)


def _sync_lease(session: Session, lease: Lease | None) -> SyncLease | None:
    return None if lease is None else SyncLease(session, lease)


def _sync_handles(session: Session, handles: Iterable[Handle[R] | None]) -> list[SyncHandle[R] | None]:
    return [None if handle is None else SyncHandle(session, handle) for handle in handles]


class SyncQueue(Blocking[Queue], mirrors=Queue):
    """A queue by its name, blocking. See `Queue`."""

    if not TYPE_CHECKING:
        __getattr__ = familiar.answer("a queue", familiar.OF_A_QUEUE)

    name: str

    enqueue = blocking(Queue.enqueue, SyncHandle)
    call = blocking(Queue.call)
    retry = blocking(Queue.retry, SyncHandle)
    retry_many = blocking(Queue.retry_many, _sync_handles)
    lease = blocking(Queue.lease, _sync_lease)
    lease_from_token = blocking(Queue.lease_from_token, _sync_lease)
    get = blocking(Queue.get)
    get_many = blocking(Queue.get_many)
    result = blocking(Queue.result)
    keep = blocking(Queue.keep)
    keep_many = blocking(Queue.keep_many)
    cancel = blocking(Queue.cancel)
    cancel_many = blocking(Queue.cancel_many)
    set_priority = blocking(Queue.set_priority)
    set_priority_many = blocking(Queue.set_priority_many)
    jobs = iterating(Queue.jobs)
    stats = blocking(Queue.stats)
    pause = blocking(Queue.pause)
    resume = blocking(Queue.resume)
    sweep = blocking(Queue.sweep)
    repair = blocking(Queue.repair)
    purge = blocking(Queue.purge)
    delete = blocking(Queue.delete)
    events = iterating(Queue.events)

    def bind(self, payload: object, **options: Unpack[EnqueueOptions]) -> BoundRequest[Any]:
        return self._source.bind(payload, **options)

    @contextmanager
    def leased(
        self, *, seconds: Seconds = 30, wait: Seconds | None = DEFAULT_WAIT_S, extend: bool = True
    ) -> Generator[SyncLease | None]:
        block = self._source.leased(seconds=seconds, wait=wait, extend=extend)

        def leave(*exc: Any) -> bool | None:
            return run(self._session, lambda: block.__aexit__(*exc))

        lease = run(self._session, block.__aenter__)
        with ExitStack() as stack:
            stack.push(leave)
            yield _sync_lease(self._session, lease)


class SyncApp(Blocking[Holdfast[Any]], mirrors=Holdfast):
    """An app, blocking. See `Holdfast`. Tasks and queues have `sync` too."""

    if not TYPE_CHECKING:
        __getattr__ = familiar.answer("an app", familiar.OF_AN_APP)

    lease = blocking(Holdfast[Any].lease, _sync_lease)
    stats = blocking(Holdfast[Any].stats)
    evict = blocking(Holdfast[Any].evict)

    def enqueue_many(self, bounds: Iterable[BoundRequest[R]]) -> list[SyncHandle[R]]:
        try:
            handles = run(self._session, lambda: self._source.enqueue_many(bounds))
        except DuplicateJob as error:
            error.handles = [SyncHandle(self._session, handle) for handle in error.handles]
            raise
        return [SyncHandle(self._session, handle) for handle in handles]

    def queue(self, name: str, **options: Unpack[PullOptions]) -> SyncQueue:
        return SyncQueue(self._session, self._source.queue(name, **options))

    def close(self) -> None:
        """Close the connection of the blocking calls. The next call opens it again."""
        _refuse_in_a_loop()
        if loop := _loops.get(os.getpid()):
            asyncio.run_coroutine_threadsafe(self._session.close_for_blocking_calls(), loop).result(5)
