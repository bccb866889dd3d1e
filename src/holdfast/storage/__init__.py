"""The storage protocol: the verbs that every storage offers, each one atomic step. And `connect`, which opens one.

Python decides, the storage obeys: no backoff, limit or handler is known here. Values are in _core/jobs.py, what they
mean is in _core/lifecycle.py. `tests/storage` is the suite that a storage must pass, yours too.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from holdfast._core.clock import Clock
from holdfast._core.events import Events, Topic
from holdfast._core.jobs import (
    CancelResult,
    Claim,
    Complete,
    Enqueued,
    Extended,
    Fail,
    Job,
    KeepResult,
    LeaseRef,
    Page,
    Release,
    Repaired,
    Request,
    RetrySettlement,
    Settlement,
    SettleResult,
    Snapshot,
    State,
    StorageInfo,
    Swept,
    WorkerCommands,
    WorkerFacts,
)
from holdfast.errors import OptionError

__all__ = ["Complete", "Fail", "Release", "RetrySettlement", "Settlement", "Storage", "audit", "connect"]

DEFAULT_URL = "sqlite:///holdfast.db"


class Storage(Protocol):
    """Where jobs live. Every verb is one atomic step on the storage's own clock; a batch is applied in order, each
    item with a reply of its own. At most 250 items and 1 MiB a call. Open it with `async with`."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...

    def clone(self) -> Storage:
        """Another way to the same jobs, with the same settings, not yet open: for another thread with an event loop of
        its own. Each of the two is opened and closed for itself."""
        ...

    async def enqueue(self, queue: str, jobs: Sequence[Request]) -> list[Enqueued]:
        """Ask for jobs to run. The only verb that a full storage refuses."""
        ...

    def enqueue_in(self, transaction: object, queue: str, jobs: Sequence[Request]) -> list[Enqueued | None]:
        """Ask for jobs to run inside a transaction of the caller's own: they exist exactly if it commits. The storage
        need not be open.

        SQLite: a `sqlite3.Connection` on the same file, on the caller's thread. The replies hold if it commits. Nobody
        is woken by that commit: waiting workers find the job at their next look, within a second.
        Redis, Valkey: a redis-py pipeline, which gets one more command; nothing is sent. Its `execute` has a list of
        [placed, generation] for that, one for each job; here each is None. It must be of the same server: another's
        cannot be told apart. What the server refuses (it is full, it is a replica) is refused whole; but a queue of
        a newer release is found out too late, and the caller's part stands without the job: MULTI rolls nothing back.
        Memory: there are no transactions.
        """
        ...

    async def claim(self, queue: str, limit: int, *, worker: str, lease_ms: int) -> Claim:
        """Lease up to `limit` jobs that are due: by priority, then run_at, then arrival. Sweeps a little first."""
        ...

    async def ready(self, queues: Sequence[str]) -> list[str]:
        """Which of these queues have something for a worker: a job that is due, or a lease to take back. Changes
        nothing, and costs one call for any number of queues (in a cluster, one each)."""
        ...

    async def settle(self, queue: str, batch: Sequence[Settlement], *, worker: str) -> list[SettleResult]:
        """End leases. Only this worker's current fence settles; anything else is LOST and changes nothing."""
        ...

    async def extend(self, queue: str, leases: Sequence[LeaseRef], *, worker: str, lease_ms: int) -> Extended:
        """Say that the holder of these leases is alive: they last `lease_ms` from now."""
        ...

    async def cancel(self, queue: str, ids: Sequence[str]) -> list[CancelResult]:
        """Stop jobs: waiting ones at once, running ones by asking their worker."""
        ...

    async def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        """Read records."""
        ...

    async def keep(self, queue: str, ids: Sequence[str], ttl_ms: int, *, at_least: bool = False) -> list[KeepResult]:
        """Change how long outcomes are remembered; a live job's, when it ends. `at_least` never shortens."""
        ...

    def subscribe(self, *topics: Topic) -> AbstractAsyncContextManager[Events]:
        """Hear hints of what happens. They may be lost: look at the record once a second as well."""
        ...

    async def scan(self, queue: str, *, state: State | None = None, after: str | None = None, limit: int = 100) -> Page:
        """List records without payloads and results: those of a state in its order, or of all states, one by one."""
        ...

    async def snapshot(self) -> Snapshot:
        """Counts, totals, the oldest ready job's age, pauses and workers, of all queues."""
        ...

    async def pause(self, queue: str, paused: bool, *, reason: str = "") -> None:
        """Stop claims, or let them go on. Nothing else is stopped."""
        ...

    async def sweep(self, queue: str, limit: int = 100, *, worker: str | None = None) -> Swept:
        """Take back expired leases, in two steps, and forget what is due. With `worker`: take back all of its leases
        at once, because it is known to be dead."""
        ...

    async def purge(self, queue: str, states: Collection[State], limit: int = 100, *, drop: bool = False) -> int:
        """Delete waiting and finished records and ask running ones to cancel: how many this call did. Call until 0.
        `drop` then forgets an empty queue itself."""
        ...

    async def announce(self, worker: str, facts: WorkerFacts, *, ttl_ms: int) -> WorkerCommands:
        """Say that a worker is there and what it is; `facts["queues"]` lists what it serves. Its orders come back."""
        ...

    async def evict(self, worker: str) -> bool:
        """Ask a worker to stop. False if no such worker is there."""
        ...

    async def about(self) -> StorageInfo:
        """What it is, and what it keeps: for whoever looks after it."""
        ...

    async def repair(self, queue: str, *, dry_run: bool, cursor: str | None = None) -> Repaired:
        """Check a page of records and mend what is wrong; with `dry_run` only check. Goes on at `cursor`."""
        ...


async def audit(storage: Storage, queue: str, *, repair: bool = False) -> Repaired:
    """Check all of a queue, a page at a time; with `repair`, mend what is wrong.

    >>> (await audit(storage, "emails")).problems
    []
    """
    step = await storage.repair(queue, dry_run=not repair)
    problems, checked = list(step.problems), step.checked
    while step.cursor is not None:
        step = await storage.repair(queue, dry_run=not repair, cursor=step.cursor)
        problems += step.problems
        checked += step.checked
    return Repaired(problems, checked, None)


def connect(
    url: str = DEFAULT_URL,
    *,
    namespace: str = "hf",
    clock: Clock | None = None,
    max_payload: int | None = None,
) -> Storage:
    """The storage that a URL names, not yet open.

    `sqlite:///file.db` is relative, `sqlite:////srv/file.db` absolute, both take `?synchronous=full`.
    `memory://name` is shared within the process, `memory://` is nobody else's.
    `redis://host:6379/0`, `rediss://`, `valkey://`, `valkeys://`, `redis+sentinel://host:26379,other/SERVICE/0` and
    `redis+cluster://host:6379,other` take redis-py's options, `?timeout=10` and `?eviction=allow`.
    """
    parts = _split(url)
    options: dict[str, object] = {"namespace": namespace, "clock": clock}
    if max_payload is not None:
        options["max_payload"] = max_payload
    opener = _SCHEMES.get(parts.scheme)
    if opener is None:
        raise OptionError(f"{redact(url)!r:.120} has no scheme that is known: use one of {', '.join(_SCHEMES)}")
    return opener(url, parts, options)


def redact(url: str) -> str:
    """A URL as it may be shown: without whatever could be a password, also in one that is not well formed."""
    head, at, tail = url.rpartition("@")
    if at:
        scheme, slashes, _ = head.partition("://")
        url = f"{scheme if slashes else ''}{slashes}***@{tail}"
    return re.sub(r"(?i)((?:pass|pwd|secret|token|auth|cred|api_?key)[^=&]*=)[^&#]*", r"\1***", url)


def _split(url: str) -> SplitResult:
    if not isinstance(url, str):
        raise OptionError(f"a storage URL is text like {DEFAULT_URL!r}, not {type(url).__name__}")
    try:
        return urlsplit(url)
    except ValueError as error:
        raise OptionError(f"{redact(url)!r:.120} is not a URL ({error}): use one like {DEFAULT_URL!r}") from None


def _sqlite(url: str, parts: SplitResult, options: dict[str, object]) -> Storage:
    path = unquote(parts.path[1:])
    if parts.netloc or not path or path == ":memory:" or "\0" in path:
        raise OptionError(
            f"{redact(url)!r:.120} names no file:"
            " use sqlite:///jobs.db (relative), sqlite:////srv/jobs.db (absolute) or memory://"
        )
    asked = _query(url, parts, {"synchronous"})
    module = importlib.import_module("holdfast.storage.local.sqlite")
    storage: Storage = module.SqliteStorage(path, **asked, **options)
    return storage


_shared: dict[tuple[str, object], Storage] = {}


def _memory(url: str, parts: SplitResult, options: dict[str, object]) -> Storage:
    _query(url, parts, set())
    name = parts.netloc + parts.path
    key = (name, options["namespace"])
    if name and key in _shared:
        return _shared[key]
    module = importlib.import_module("holdfast.storage.local.memory")
    storage: Storage = module.MemoryStorage(name, **options)
    return _shared.setdefault(key, storage) if name else storage  # Another thread may have been quicker.


def _redis(url: str, parts: SplitResult, options: dict[str, object]) -> Storage:
    try:
        importlib.import_module("hiredis")
    except ImportError:
        message = f"{redact(url)!r:.120} needs the redis extra: pip install 'holdfast[redis]'"
        raise OptionError(message) from None
    module = importlib.import_module("holdfast.storage.redis")
    storage: Storage = module.open_url(url, redact(url), **options)
    return storage


def _query(url: str, parts: SplitResult, known: set[str]) -> dict[str, str]:
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = asked.keys() - known
    if unknown or parts.fragment:
        allowed = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise OptionError(f"{redact(url)!r:.120} has an option that is not known: {allowed}")
    return asked


_SCHEMES: dict[str, Callable[[str, SplitResult, dict[str, object]], Storage]] = {
    "sqlite": _sqlite,
    "memory": _memory,
    "redis": _redis,
    "rediss": _redis,
    "valkey": _redis,
    "valkeys": _redis,
    "redis+sentinel": _redis,
    "redis+cluster": _redis,
}
