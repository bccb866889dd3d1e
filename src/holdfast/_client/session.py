"""Which storage is open where: one storage per event loop, or the one storage of a rehearsal.

A storage belongs to one event loop. An app that is open on one loop is not usable on another; blocking calls have their
own loop and their own connection (sync.py).
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec

from holdfast._core.clock import Clock
from holdfast._core.codec import Codec, Codecs
from holdfast.errors import NotOpen, OptionError
from holdfast.storage import Storage, connect
from holdfast.storage.urls import DEFAULT_URL, redact

URL_VARIABLE, NAMESPACE_VARIABLE = "HOLDFAST_URL", "HOLDFAST_NAMESPACE"
DEFAULT_NAMESPACE = "hf"


class StorageAddress(msgspec.Struct, frozen=True):
    """Where an app's jobs are, for another process."""

    url: str | None
    """None if the app was created with a storage object or with a clock."""
    namespace: str
    max_payload: int | None

    def check_shared(self) -> None:
        """Refuse a storage that child processes cannot share."""
        if self.url is None:
            raise OptionError("child processes cannot share a storage or a clock made here: give the app a URL")
        if self.url.startswith("memory:"):
            raise OptionError("memory:// is in one process: use sqlite:///… or a server, or no child processes")


class Session:
    """The storage of an app, and its codecs: what every object of the app uses. Users hold it as a
    `holdfast.Holdfast`."""

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
            raise OptionError("url and storage are both given: pass only one")
        self.codecs = Codecs(codec)
        shareable = storage is None and clock is None
        resolved_url = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        self.address = StorageAddress(resolved_url if shareable else None, namespace, max_payload)
        if storage is None:
            options: dict[str, Any] = {"namespace": namespace, "clock": clock, "max_payload": max_payload}
            storage = _connect(resolved_url, options, from_environment=url is None and URL_VARIABLE in os.environ)
        self._normal = StoragePerLoop(storage)
        self._provider: StorageProvider = self._normal
        self._opened_in_rehearsal = 0

    def __repr__(self) -> str:
        return redact(repr(self._normal.transaction_storage))

    @property
    def storage(self) -> Storage:
        """The storage that is open on the running loop. Raises `NotOpen`."""
        return self._provider.storage

    @property
    def transaction_storage(self) -> Storage:
        """The storage for `enqueue_in`, which works in a transaction of the caller and needs no open storage."""
        return self._provider.transaction_storage

    async def __aenter__(self) -> None:
        if self.rehearsing:
            self._opened_in_rehearsal += 1
        else:
            await self._normal.open()

    async def __aexit__(self, *exc: object) -> None:
        if self._opened_in_rehearsal:  # The rehearsal may have ended since.
            self._opened_in_rehearsal -= 1
        else:
            await self._normal.close()

    @property
    def rehearsing(self) -> bool:
        return self._provider is not self._normal

    def defer(self) -> None:
        """Open the storage only when it is first used: in a child process most handlers never use it."""
        self._normal.make_lazy()

    def rehearse(self, storage: Storage | None) -> None:
        """For tests: use another storage on every loop, until None ends the rehearsal."""
        if storage is None:
            self._provider = self._normal
            return
        if self.rehearsing:
            raise OptionError("the app is in a rehearsal already: end that one first")
        self._provider = RehearsalStorage(storage)

    async def open_for_blocking_calls(self) -> None:
        """Open the storage on the running loop too, unless it is."""
        await self._provider.open_second()

    async def close_for_blocking_calls(self) -> None:
        """Close the storage that `open_for_blocking_calls` opened on the running loop, if there is one."""
        await self._normal.close_second()


class StorageProvider(Protocol):
    """Gives a session its storage."""

    @property
    def storage(self) -> Storage: ...
    @property
    def transaction_storage(self) -> Storage: ...
    async def open_second(self) -> None: ...


class StoragePerLoop:
    """The normal provider: the app's storage on the loop of `async with app`, and second ones on other loops."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        """The app's storage: open on `_loop`, or closed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._users = 0
        """How many `async with app` blocks are active."""
        self._open: dict[asyncio.AbstractEventLoop, Storage] = {}
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    @property
    def storage(self) -> Storage:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise NotOpen("there is no running event loop: await this in async code, or use `.sync`") from None
        storage = self._open.get(loop)
        if storage is not None:
            return storage
        if self._loop is None:
            raise NotOpen("the app is not open: use it inside 'async with app:'")
        raise NotOpen(
            "the app was opened on another event loop: open and use it on one loop, make a second app for a second"
            " loop, or use `.sync` from other threads"
        )

    @property
    def transaction_storage(self) -> Storage:
        return self._storage

    def make_lazy(self) -> None:
        assert self._loop is None
        self._storage.lazy = True

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            if not self._loop.is_closed():
                raise NotOpen("the app is open on another event loop: close it there, or make a second app")
            del self._open[self._loop]
            self._storage, self._loop, self._users = self._storage.clone(), None, 0
        async with self._lock(loop):
            if self._loop is None:
                await self._storage.__aenter__()
                self._open[loop] = self._storage
                self._loop = loop
            self._users += 1

    async def close(self) -> None:
        self._users -= 1
        async with self._lock(asyncio.get_running_loop()):
            if self._users == 0 and self._loop is not None:
                storage, self._storage = self._storage, self._storage.clone()
                del self._open[self._loop]
                self._loop = None
                await storage.__aexit__(None, None, None)

    async def open_second(self) -> None:
        loop = asyncio.get_running_loop()
        if loop in self._open:
            return
        async with self._lock(loop):
            if loop not in self._open:
                storage = self._storage.clone()
                await storage.__aenter__()
                self._open[loop] = storage

    async def close_second(self) -> None:
        storage = self._open.pop(asyncio.get_running_loop(), None)
        if storage is not None:
            await storage.__aexit__(None, None, None)

    def _lock(self, loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
        """Held while a storage is opened or closed on a loop."""
        return self._locks.setdefault(loop, asyncio.Lock())


class RehearsalStorage:
    """The provider of a rehearsal: one storage on every loop, open from its first use on."""

    def __init__(self, storage: Storage) -> None:
        storage.open_lazily()
        self.storage = storage
        self.transaction_storage = self.storage

    async def open_second(self) -> None:
        """Nothing to do: the storage is open on every loop."""


def _connect(url: str, options: dict[str, Any], *, from_environment: bool) -> Storage:
    try:
        return connect(url, **options)
    except OptionError as error:
        if from_environment:
            raise OptionError(f"{URL_VARIABLE}: {error}") from None
        raise
