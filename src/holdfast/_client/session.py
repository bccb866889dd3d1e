"""An app's way to its storage: which one, opened where, and the few steps that every request takes.

A storage belongs to one event loop. An app that is open on one loop is not usable on another; blocking calls have a
loop and a connection of their own (sync.py).
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from holdfast._client.waiters import ask, wait
from holdfast._core.clock import Clock
from holdfast._core.codec import Codec, Codecs
from holdfast._core.failure import decode_error
from holdfast._core.jobs import Enqueued, Outcome, Placed, Request, State
from holdfast.errors import DuplicateJob, JobCancelled, JobFailed, JobForgotten, JobNotFound, NotOpen, OptionError
from holdfast.storage import DEFAULT_URL, Storage, connect, redact
from holdfast.storage.deferred import DeferredStorage
from holdfast.storage.validation import batches

URL_VARIABLE, NAMESPACE_VARIABLE = "HOLDFAST_URL", "HOLDFAST_NAMESPACE"
DEFAULT_NAMESPACE = "hf"

PARTS_AT_ONCE = 4
"""Of a long list, so many calls are on their way at a time: one is made ready while another is carried out."""

R_co = TypeVar("R_co", covariant=True)


class StorageAddress(msgspec.Struct, frozen=True):
    """Where an app's jobs are, as another process can be told."""

    url: str | None
    """None if the app was given a storage, or a clock, of its own."""
    namespace: str
    max_payload: int | None

    def check_shared(self) -> None:
        """Refuse what child processes cannot share."""
        if self.url is None:
            raise OptionError("child processes cannot share a storage or a clock made here: give the app a URL")
        if self.url.startswith("memory:"):
            raise OptionError("memory:// is in one process: use sqlite:///… or a server, or no child processes")


class Session:
    """See `holdfast.Holdfast`, which is what users have."""

    def __init__(
        self,
        url: str | None,
        *,
        storage: Storage | None,
        namespace: str | None,
        codec: str | Codec,
        max_payload: int | None,
        clock: Clock | None,
    ) -> None:
        namespace = os.environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE if namespace is None else namespace
        if storage is not None and url is not None:
            raise OptionError("url and storage are both given: one of them says where the jobs are")
        self.codecs = Codecs(codec)
        self._url = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        self._options: dict[str, Any] = {"namespace": namespace, "clock": clock, "max_payload": max_payload}
        self._storage = storage if storage is not None else self._connect(url)
        own = storage is not None or clock is not None
        self.address = StorageAddress(None if own else self._url, namespace, max_payload)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened = 0
        self._rehearsal: Storage | None = None
        """What tests put in place of the storage, for every loop."""
        self._rehearsed = 0
        """How often the app was opened during a rehearsal."""
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._others: dict[asyncio.AbstractEventLoop, Storage] = {}
        """Storages that were opened beside the app's own: the blocking calls'."""

    def _connect(self, url: str | None) -> Storage:
        try:
            return connect(self._url, **self._options)
        except OptionError as error:
            if url is None and URL_VARIABLE in os.environ:
                raise OptionError(f"{URL_VARIABLE}: {error}") from None
            raise

    def __repr__(self) -> str:
        return f"{redact(repr(self._storage))}"

    @property
    def storage(self) -> Storage:
        """The storage that is open on the running loop."""
        if self._rehearsal is not None:
            return self._rehearsal
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise NotOpen("there is no running event loop: await this in async code, or use `.sync`") from None
        if loop is self._loop:
            return self._storage
        other = self._others.get(loop)
        if other is not None:
            return other
        if self._loop is None:
            raise NotOpen("the app is not open: use it inside 'async with app:'")
        raise NotOpen(
            "the app was opened on another event loop: open and use it on one loop, make a second app for a second"
            " loop, or use `.sync` from other threads"
        )

    async def __aenter__(self) -> None:
        if self._rehearsal is not None:
            self._rehearsed += 1
            return
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            if not self._loop.is_closed():
                raise NotOpen("the app is open on another event loop: close it there, or make a second app")
            self._storage, self._loop, self._opened = self._storage.clone(), None, 0
        async with self._lock(loop):
            if self._loop is None:
                await self._storage.__aenter__()
                self._loop = loop
            self._opened += 1

    async def __aexit__(self, *exc: object) -> None:
        if self._rehearsed:
            self._rehearsed -= 1
            return
        self._opened -= 1
        async with self._lock(asyncio.get_running_loop()):
            if self._opened == 0 and self._loop is not None:
                storage, self._storage, self._loop = self._storage, self._storage.clone(), None
                await storage.__aexit__(None, None, None)

    def _lock(self, loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
        """One at a time opens or closes on a loop."""
        return self._locks.setdefault(loop, asyncio.Lock())

    @property
    def any_storage(self) -> Storage:
        """The storage, open or not: for what needs no connection."""
        return self._storage if self._rehearsal is None else self._rehearsal

    def defer(self) -> None:
        """Open the storage only when it is first used: in a child process most handlers never do."""
        assert self._loop is None
        self._storage = DeferredStorage(self._storage)

    def rehearse(self, storage: Storage | None) -> None:
        """Put another storage in place of the app's own, on every loop, until None is put back: for tests."""
        if storage is not None and self._rehearsal is not None:
            raise OptionError("the app is in a rehearsal already: end that one first")
        self._rehearsal = storage

    async def open_beside(self) -> None:
        """Open the storage once more, for the running loop."""
        loop = asyncio.get_running_loop()
        if self._rehearsal is not None or loop in self._others:
            return
        async with self._lock(loop):
            if loop not in self._others:
                storage = self._storage.clone()
                await storage.__aenter__()
                self._others[loop] = storage

    async def close_beside(self) -> None:
        storage = self._others.pop(asyncio.get_running_loop(), None)
        if storage is not None:
            await storage.__aexit__(None, None, None)

    async def enqueue(self, bound: BoundRequest[Any]) -> Enqueued:
        (reply,) = await self.storage.enqueue(bound.queue, [bound.request])
        bound.check(reply)
        return reply

    async def enqueue_many(self, bounds: Iterable[BoundRequest[Any]]) -> list[tuple[BoundRequest[Any], Enqueued]]:
        """Send requests in as few calls as there can be, each queue's in order; replies in the order given. If some
        cannot be sent, others may have been."""
        every = _checked(bounds)
        queues: dict[str, list[int]] = defaultdict(list)
        for at, bound in enumerate(every):
            queues[bound.queue].append(at)
        storage = self.storage
        replies: dict[int, Enqueued] = {}

        async def send(queue: str, part: list[int]) -> None:
            told = await storage.enqueue(queue, [every[at].request for at in part])
            replies.update(zip(part, told, strict=True))

        async def send_all(queue: str, places: list[int]) -> None:
            parts = batches(places, lambda at: _size(every[at]))
            while few := list(itertools.islice(parts, PARTS_AT_ONCE)):
                _raise_first(await asyncio.gather(*(send(queue, part) for part in few), return_exceptions=True))

        _raise_first(await asyncio.gather(*(send_all(*both) for both in queues.items()), return_exceptions=True))
        sent = [(bound, replies[at]) for at, bound in enumerate(every)]
        for bound, reply in sent:
            bound.check(reply)
        return sent

    def enqueue_in(
        self, transaction: object, bounds: Iterable[BoundRequest[Any]]
    ) -> list[tuple[BoundRequest[Any], Enqueued | None]]:
        """Enqueue inside of somebody's transaction. Neighbours that go to one queue travel together."""
        every = _checked(bounds)
        sent: list[tuple[BoundRequest[Any], Enqueued | None]] = []
        for queue, group in itertools.groupby(range(len(every)), lambda at: every[at].queue):
            for part in batches(group, lambda at: _size(every[at])):
                requests = [every[at].request for at in part]
                replies = self.any_storage.enqueue_in(transaction, queue, requests)
                sent += zip((every[at] for at in part), replies, strict=True)
        for bound, reply in sent:
            if reply is not None:
                bound.check(reply)
        return sent

    async def call(self, bound: BoundRequest[Any]) -> Any:
        """Enqueue and wait for the result."""
        reply, outcome = await ask(self.storage, bound.queue, bound.request, wait_s=bound.wait_s, check=bound.check)
        return self.value_of(bound.queue, reply.id, outcome, bound.returns())

    async def wait_for(self, queue: str, id: str, generation: int, wait_s: float | None) -> Outcome:
        return await wait(self.storage, queue, id, generation, wait_s=wait_s)

    async def newest_generation(self, queue: str, id: str) -> int:
        """The generation that a request waits for which does not know its own: the newest that there is."""
        (job,) = await self.storage.get(queue, [id])
        if job is None:
            raise JobForgotten(f"job {id!r} in {queue} has no record: was the transaction committed?")
        return job.generation if job.run is None or job.run.next is None else job.run.next.generation

    def value_of(self, queue: str, id: str, outcome: Outcome, returns: Any) -> Any:
        """The result of a job that completed. Raises what became of any other."""
        if outcome.state is State.CANCELLED:
            raise JobCancelled(f"job {id!r} in {queue} was cancelled")
        if outcome.state is State.FAILED:
            error = decode_error(outcome.error)
            raise JobFailed(f"job {id!r} in {queue} failed: {error}", error=error)
        if outcome.result is None:
            return None
        return self.codecs.decode(f"the result of job {id!r} in {queue}", outcome.result, outcome.codec, returns)


class BoundRequest(Generic[R_co]):
    """One request, ready to be sent: `task.bind(…)` or `queue.bind(…)`. Its arguments are encoded already."""

    __slots__ = ("queue", "raises", "request", "returns", "wait_s")

    def __init__(
        self, queue: str, request: Request, returns: Callable[[], Any], *, raises: bool, wait_s: float | None
    ) -> None:
        self.queue = queue
        self.request = request
        self.returns = returns
        """What its result is decoded as."""
        self.raises = raises
        """A duplicate is an error."""
        self.wait_s = wait_s

    @property
    def id(self) -> str:
        return self.request.id

    def check(self, reply: Enqueued) -> None:
        """Raise what the caller asked to be raised."""
        if reply.placed is None:
            raise JobNotFound(f"there is no job {self.id!r} in {self.queue} whose payload could be used again")
        if self.raises and reply.placed in (Placed.DUPLICATE, Placed.COMPLETED):
            raise DuplicateJob(f"job {self.id!r} in {self.queue} is there already ({reply.state})")

    def __repr__(self) -> str:
        return f"<a request for job {self.id!r} in {self.queue}>"


def _raise_first(ended: Sequence[BaseException | None]) -> None:
    for error in ended:
        if error is not None:
            raise error


def _checked(bounds: Iterable[BoundRequest[Any]]) -> list[BoundRequest[Any]]:
    every = list(bounds)
    for bound in every:
        if not isinstance(bound, BoundRequest):
            raise OptionError(f"a request is what task.bind(…) or queue.bind(…) gives, not {bound!r:.60}")
    return every


def _size(bound: BoundRequest[Any]) -> int:
    return len(bound.request.work.payload or b"")
