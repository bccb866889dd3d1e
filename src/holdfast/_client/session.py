"""The open storages of an app: one for each event loop, or the storage of a rehearsal.

A storage belongs to one event loop, so an app that is open on one loop is not usable on another. Blocking calls have
their own loop and connection (sync.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from holdfast._client.settings import find_settings, warn_of_default
from holdfast._core.clock import Clock
from holdfast._core.codec import Codec, Codecs
from holdfast.errors import NotOpen, OptionError
from holdfast.storage import Storage, connect

if TYPE_CHECKING:
    from holdfast._client.request import BoundRequest

BeforeEnqueue = Callable[["BoundRequest[Any]"], None]


def check_shared(url: str | None) -> None:
    """Refuse a storage that child processes cannot share. The URL is `Session.url`."""
    if url is None:
        raise OptionError("child processes cannot share a storage or clock object: create the app with a URL")
    if url.startswith("memory:"):
        raise OptionError("child processes cannot share memory://: use sqlite:///… or a server, or an inline worker")


class Session:
    """The storage and the codecs of an app, which all objects of the app share."""

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
        if storage is not None and url is not None:
            raise OptionError("url and storage are mutually exclusive: pass only one")
        self.codecs = Codecs(codec)
        self.before_enqueue: list[BeforeEnqueue] = []
        """Hooks that see each request before it is sent."""
        settings = find_settings(url, namespace)
        self.namespace = settings.namespace
        self.max_payload = max_payload
        self.url = settings.url if storage is None and clock is None else None
        """None if the app was created with a storage or a clock object, which another process cannot share."""
        self.on_default = settings.is_default and self.url is not None
        """Whether nothing chose the URL."""
        if storage is None:
            try:
                storage = connect(settings.url, namespace=self.namespace, clock=clock, max_payload=max_payload)
            except OptionError as error:
                if settings.source:
                    raise OptionError(f"{settings.source}: {error}") from None
                raise
        self._warns = self.on_default
        """Whether the next opening of the storage logs that nothing chose it."""
        self._storage = storage
        """The storage of the app: open on `_loop`, or closed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._users = 0
        """Number of active `async with app` blocks."""
        self._pid = 0
        """Id of the process that has opened the app last."""
        self._open: dict[asyncio.AbstractEventLoop, Storage] = {}
        """The storage on the loop of `async with app`, and clones of it for blocking calls on other loops."""
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self.rehearsal: Storage | None = None
        """The storage of a rehearsal. It is used on every loop, and opens at its first use."""
        self.run_blocking: Callable[[Callable[[], Awaitable[Any]]], Any] | None = None
        """Runs blocking calls on the threads of their callers, in an eager rehearsal."""
        self._users_in_rehearsal = 0

    def __repr__(self) -> str:
        return repr(self._storage)

    @property
    def storage(self) -> Storage:
        """The storage that is open on the running event loop. Raises `NotOpen` if there is none."""
        if self.rehearsal is not None:
            return self.rehearsal
        try:
            storage = self._open.get(asyncio.get_running_loop())
        except RuntimeError:
            raise NotOpen("there is no running event loop: await this in async code, or use `.sync`") from None
        if storage is not None:
            return storage
        if self._loop is None:
            raise NotOpen("the app is not open: use it inside 'async with app:'")
        raise NotOpen("the app is open on another event loop: use it there, make a second app, or use `.sync`")

    @property
    def transaction_storage(self) -> Storage:
        """The storage for `enqueue_in`, which uses a transaction of the caller and needs no open storage."""
        return self.rehearsal or self._storage

    async def __aenter__(self) -> None:
        if self.rehearsal is not None:
            self._users_in_rehearsal += 1
            return
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            forked = self._pid != os.getpid()
            if not forked:  # The loop of the parent stays in `_open`: its deletion would disturb the parent.
                if not self._loop.is_closed():
                    raise NotOpen("the app is open on another event loop: close it there, or make a second app")
                del self._open[self._loop]
            self._storage, self._loop, self._users = self._storage.clone(), None, 0
        async with self._lock(loop):
            if self._loop is None:
                await self._storage.__aenter__()
                self._warn_once()
                self._open[loop] = self._storage
                self._loop, self._pid = loop, os.getpid()
            self._users += 1

    async def __aexit__(self, *exc: object) -> None:
        if self._users_in_rehearsal:  # The rehearsal may have ended meanwhile.
            self._users_in_rehearsal -= 1
            return
        if self._pid != os.getpid():
            return  # In a fork. The parent closes the app.
        self._users -= 1
        async with self._lock(asyncio.get_running_loop()):
            if self._users == 0 and self._loop is not None:
                storage, self._storage = self._storage, self._storage.clone()
                del self._open[self._loop]
                self._loop = None
                await storage.__aexit__(None, None, None)

    def open_lazily(self) -> None:
        """Open the storage at its first use, not at `async with app`. For child processes, whose worker warns."""
        assert self._loop is None
        self._warns = False
        self._storage.lazy = True

    def rehearse(
        self, storage: Storage | None, run_blocking: Callable[[Callable[[], Awaitable[Any]]], Any] | None = None
    ) -> None:
        """Use another storage on every loop; None ends this rehearsal. With `run_blocking` it is eager. For tests."""
        if storage is not None:
            if self.rehearsal is not None:
                raise OptionError("the app is already in a rehearsal: end that one first")
            storage.open_lazily()
        self.rehearsal, self.run_blocking = storage, run_blocking

    @property
    def eager(self) -> bool:
        """Whether a job runs before its enqueue returns."""
        return self.run_blocking is not None

    async def open_for_blocking_calls(self) -> None:
        """Open the storage on the running loop too, if it is not open there."""
        loop = asyncio.get_running_loop()
        if self.rehearsal is not None or loop in self._open:
            return
        async with self._lock(loop):
            if loop not in self._open:
                storage = self._storage.clone()
                await storage.__aenter__()
                self._warn_once()
                self._open[loop] = storage

    async def close_for_blocking_calls(self) -> None:
        """Close the storage that `open_for_blocking_calls` opened on the running loop, if there is one."""
        storage = self._open.pop(asyncio.get_running_loop(), None)
        if storage is not None:
            await storage.__aexit__(None, None, None)

    def _warn_once(self) -> None:
        if self._warns and self.url is not None:
            warn_of_default(self.url)
        self._warns = False

    def _lock(self, loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
        """Return the lock that is held while a storage is opened or closed on a loop."""
        return self._locks.setdefault(loop, asyncio.Lock())
