"""The app: a storage and a set of tasks."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypedDict, Unpack, cast, overload

from holdfast._client import familiar
from holdfast._client.lease import Lease, read_token
from holdfast._client.queue import Queue
from holdfast._client.request import BoundRequest, Handle, call_hooks, handles_of
from holdfast._client.session import BeforeEnqueue, Session, check_shared
from holdfast._client.stats import AppStats, app_stats
from holdfast._client.task import Definition, Task, TaskDecorator
from holdfast._core.applications import Application
from holdfast._core.arguments import name_of
from holdfast._core.clock import Clock
from holdfast._core.codec import Codec
from holdfast._core.jobs import Job
from holdfast._core.options import PullOptions, Seconds, StubOptions, TaskOptions, check_names, to_count, to_ms
from holdfast._core.replies import Enqueued
from holdfast._worker.app_loader import AppParts, RunnableApp, application_of, locate_app
from holdfast._worker.current_job import current_job
from holdfast._worker.executor import Inline
from holdfast._worker.handler import AfterExecution, AppHooks, Around, Handler, Middleware, OnError
from holdfast._worker.processes.pool import Pool, PoolSettings
from holdfast._worker.signals import serve_until_signal
from holdfast._worker.telemetry import HookDispatcher, OnEvent, default_worker_name
from holdfast._worker.worker import Worker, WorkerSettings, choose
from holdfast.errors import OptionError
from holdfast.storage import Storage
from holdfast.storage.validation import FAILED_SUFFIX, batches, check_queue, check_worker, work_size

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from holdfast._client.sync import SyncApp

    T = TypeVar("T", default=None)
else:
    from typing import TypeVar

    T = TypeVar("T")

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H")
V = TypeVar("V")

MIN_LEASE_MS, MAX_LEASE_MS = 500, 3_600_000
MAX_PROCESSES = 1_000
CALLS_AT_ONCE = 4
"""Concurrent enqueue calls per queue in `enqueue_many`: the next batch is encoded while another one runs."""


class WorkerOptions(TypedDict, total=False):
    """Options of `app.run_worker`: the keywords of `app.worker`."""

    processes: int | None
    concurrency: int | None
    name: str | None
    lease: Seconds
    grace: Seconds
    drain_grace: Seconds
    max_jobs: int | None
    max_memory: int | None
    burst: bool
    max_burst_jobs: int | None


class Holdfast(RunnableApp, Generic[T]):
    """A storage and a set of tasks.

    `url` defaults to HOLDFAST_URL, else to `url` under [tool.holdfast] in the nearest pyproject.toml, else to
    `sqlite:///holdfast.db`: see `holdfast.storage.connect`. `namespace`, a part of the storage, defaults to
    HOLDFAST_NAMESPACE, pyproject.toml, `hf`. Each child process, or an inline worker, enters the context manager
    `lifespan` once; handlers read the object that it yields as `app.resources`.

    >>> app = Holdfast("memory://")
    >>> @app.task
    ... async def add(a: int, b: int) -> int:
    ...     return a + b
    """

    if not TYPE_CHECKING:
        __getattr__ = familiar.answer("an app", familiar.OF_AN_APP)

    def __init__(
        self,
        url: str | None = None,
        *,
        storage: Storage | None = None,
        namespace: str | None = None,
        codec: str | Codec = "json",
        lifespan: Callable[[], AbstractAsyncContextManager[T]] | None = None,
        max_payload: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._session = Session(
            url, storage=storage, namespace=namespace, codec=codec, max_payload=max_payload, clock=clock
        )
        self._lifespan = lifespan
        self._application = Application()
        self._tasks: dict[str, Definition] = {}
        self._around = AppHooks(find=self._find)
        self._on_event: list[OnEvent] = []

    def __repr__(self) -> str:
        return f"<Holdfast on {self._session!r}, {len(self._tasks)} tasks>"

    async def __aenter__(self) -> Self:
        await self._session.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.__aexit__(*exc)

    @property
    def storage(self) -> Storage:
        """The open storage, for its further operations. Raises `NotOpen` if the app is not open."""
        return self._session.storage

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that a worker of this app can run."""
        return [name for name, definition in self._tasks.items() if not definition.stub]

    @property
    def resources(self) -> T:
        """The object that `lifespan` yielded for the worker of the present job. For handlers."""
        return cast("T", current_job().resources)

    # Tasks

    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R, R]: ...
    @overload
    def task(self, /, **options: Unpack[TaskOptions]) -> TaskDecorator: ...
    def task(self, function: Any = None, /, **options: Any) -> Any:
        """Make a function a task: `@app.task`, or `@app.task(timeout=30, …)`. The API reference lists the options."""
        check_names("task", TaskOptions, options)
        define = partial(self._define, cast("TaskOptions", options), False)
        return define if function is None else define(function)

    def stub(self, **options: Unpack[StubOptions]) -> TaskDecorator:
        """Declare a task whose function is in another program. Only the signature is used here.

        >>> @app.stub(name="jobs.render")
        ... def render(doc: bytes) -> bytes:
        ...     raise NotImplementedError
        """
        check_names("stub", StubOptions, options)
        if "name" not in options:
            raise OptionError("a stub has no name: pass name=… of the queue that the other program serves")
        return cast("TaskDecorator", partial(self._define, cast("TaskOptions", options), True))

    def _define(self, options: TaskOptions, stub: bool, function: Callable[..., Any]) -> Task[Any, Any, Any]:
        if not callable(function) or inspect.isclass(function):
            raise OptionError(f"a task must be a function, not {function!r:.60}")
        name = options["name"] if "name" in options else default_name(function)
        check_queue(name)
        if name.endswith(FAILED_SUFFIX):
            raise OptionError(f"{name} is the name of a fail handler's queue: use @task.on_failure")
        if name in self._tasks:
            other = self._tasks[name].arguments.function
            raise OptionError(f"tasks {_where(other)} and {_where(function)} are both named {name!r}: pass name=…")
        definition = self._tasks[name] = Definition(self._session, function, name, options, stub=stub)
        return Task(definition)

    # Requests

    async def enqueue_many(self, bounds: Iterable[BoundRequest[R]]) -> list[Handle[R]]:
        """Enqueue many requests of `task.bind(…)`, at most 250 jobs or 1 MiB in one step, in order within each queue.
        Requests whose ids are refused raise one `DuplicateJob`, with these `ids` and the `handles` of the others.

        >>> await app.enqueue_many(sync_user.bind(id) for id in ids)
        """
        requests = self._checked(bounds)
        queues: dict[str, list[int]] = defaultdict(list)
        for index, bound in enumerate(requests):
            queues[bound.queue].append(index)
        storage = self.storage
        replies: dict[int, Enqueued] = {}

        async def send(queue: str, batch: list[int]) -> None:
            answers = await storage.enqueue(queue, [requests[index].request for index in batch])
            replies.update(zip(batch, answers, strict=True))

        async def send_queue(queue: str, indexes: list[int]) -> None:
            waiting = batches(indexes, lambda index: work_size(requests[index].request.work))
            while now := list(itertools.islice(waiting, CALLS_AT_ONCE)):
                await _all_or_raise(send(queue, batch) for batch in now)

        await _all_or_raise(send_queue(queue, indexes) for queue, indexes in queues.items())
        return handles_of(self._session, ((bound, replies[index]) for index, bound in enumerate(requests)))

    def enqueue_in(self, transaction: object, *bounds: BoundRequest[R]) -> list[Handle[R]]:
        """Enqueue inside a transaction of your own: the jobs exist only if it commits.

        `transaction` is a redis-py pipeline (sync or asyncio) on the app's server, or a `sqlite3.Connection` to the
        app's file. Nothing is sent before you commit. On SQLite, do not await this app before you commit: it would wait
        for your lock. An idle worker finds the jobs at its next poll, within a second. `placed` of the handles of a
        pipeline is None.

        >>> with sqlite3.connect("holdfast.db") as db:
        ...     db.execute("INSERT INTO users VALUES (?)", ["ada"])
        ...     app.enqueue_in(db, welcome.bind("ada"))
        """
        storage = self._session.transaction_storage
        sent: list[tuple[BoundRequest[R], Enqueued | None]] = []
        for queue, group in itertools.groupby(self._checked(bounds), lambda bound: bound.queue):
            for batch in batches(group, lambda bound: work_size(bound.request.work)):
                replies = storage.enqueue_in(transaction, queue, [bound.request for bound in batch])
                sent += zip(batch, replies, strict=True)
        return handles_of(self._session, sent)

    def _checked(self, requests: Iterable[BoundRequest[R]]) -> list[BoundRequest[R]]:
        bounds = list(requests)
        for bound in bounds:
            if not isinstance(bound, BoundRequest):
                raise OptionError(f"a request must come from task.bind(…) or queue.bind(…), not {bound!r:.60}")
        call_hooks(self._session, bounds)
        return bounds

    def queue(self, name: str, **options: Unpack[PullOptions]) -> Queue:
        """Return a queue by its name: enqueue any payload, lease jobs, operate the queue. The options are limits of
        leased jobs; without them there is no limit."""
        return Queue(self._session, name, options)

    async def lease(self, token: str, **options: Unpack[PullOptions]) -> Lease | None:
        """Return a lease by its `token`, in any process; None if it is lost. The options are those of `queue`."""
        return await self.queue(read_token(token)[0], **options).lease_from_token(token)

    async def stats(self) -> AppStats:
        """Return the counts of all queues, and the live workers."""
        return app_stats(await self.storage.snapshot())

    async def evict(self, worker: str) -> bool:
        """Ask a worker to stop. Returns False if no live worker has this name."""
        return await self.storage.evict(worker)

    @property
    def sync(self) -> SyncApp:
        """The blocking version of this app, for code without an event loop."""
        from holdfast._client.sync import SyncApp

        return SyncApp(self._session, self)

    async def _find(self, queue: str, id: str) -> Job | None:
        (job,) = await self.storage.get(queue, [id])
        return job

    # Hooks

    def before_enqueue(self, function: BeforeEnqueue) -> BeforeEnqueue:
        """Call a function with each `BoundRequest` of this app before it is sent: `request.queue`, `request.id`,
        `request.headers`. It may call `request.add_headers({…})`, or raise, and then nothing is sent. It must not be
        async."""
        if inspect.iscoroutinefunction(function):
            raise OptionError(f"before_enqueue takes a function that is not async: make {function.__name__} a def")
        return _add_hook("before_enqueue", self._session.before_enqueue, function)

    def middleware(self, function: Middleware) -> Middleware:
        """Call a function around every run: `async def timed(job, proceed): …; result = await proceed(); …`."""
        return _add_hook("middleware", self._around.middleware, function)

    def around(self, function: Around) -> Around:
        """Enter a context manager around every call of a handler, where the handler runs: a sync one on the thread of a
        handler that is not async, a sync or async one on the event loop of an async handler.

        >>> @app.around
        ... @contextmanager
        ... def session(job): ...
        """
        return _add_hook("around", self._around.around, function)

    def after_execution(self, function: AfterExecution) -> AfterExecution:
        """Call a function before the completion or the failure of a job is stored. It may change `result`, `error` and
        `ttl` of the `Execution`, and may be async. If it raises, nothing is changed and `on_error` is called."""
        return _add_hook("after_execution", self._around.after, function)

    def on_event(self, function: OnEvent) -> OnEvent:
        """Call a function with each `RunEvent` of the workers of this app, in order, after it is stored."""
        return _add_hook("on_event", self._on_event, function)

    def on_error(self, function: OnError) -> OnError:
        """Call a function with each error that is not the failure of a job, and its place: a hook that raised, or a
        storage that cannot be reached. Without this hook such an error is logged."""
        return _add_hook("on_error", self._around.errors, function)

    def add_codec(self, codec: Codec) -> None:
        """Add a codec, so that payloads with its name can be decoded."""
        self._session.codecs.add(codec)

    def codec_hooks(
        self, kind: type[V], /, *, encode: Callable[[V], object] | None = None, decode: Callable[[Any], V] | None = None
    ) -> None:
        """Encode and decode the values of a class of yours, in JSON and msgpack. `encode` returns a value that can be
        encoded, also for subclasses; `decode` makes the object again, for annotations with this class.

        >>> app.codec_hooks(Path, encode=str, decode=Path)
        """
        self._session.codecs.hooks.add(kind, encode, decode)

    # Work

    def worker(
        self,
        queues: str | Iterable[str] | None = None,
        *,
        processes: int | None = None,
        concurrency: int | None = None,
        name: str | None = None,
        lease: Seconds = 10,
        grace: Seconds = 25,
        drain_grace: Seconds = 10,
        max_jobs: int | None = None,
        max_memory: int | None = None,
        burst: bool = False,
        max_burst_jobs: int | None = None,
    ) -> Worker:
        """Return a worker: `async with app.worker(): …`. Runs are on this event loop, or in child `processes`.

        `queues` are names or patterns ("reports.*", or "*/failed" for fail handlers alone); the default is all tasks.
        `concurrency` is the maximum number of concurrent runs. Jobs of a dead worker run again within 1.5 leases and
        1 s. The end of the block gives runs `grace` seconds to finish. A `burst` worker ends when no job is ready, or
        after `max_burst_jobs` runs.

        Child processes import the app, which must be at the top of a module, and can be killed: if a run does not stop,
        its process ends after `drain_grace` seconds for its other runs. A process is replaced after `max_jobs` jobs, or
        if it uses more than `max_memory` bytes.
        """
        if name is not None:
            check_worker(name)
        if max_burst_jobs is not None and not burst:
            raise OptionError("max_burst_jobs limits a burst: pass burst=True, too")
        patterns = queues if queues is None or isinstance(queues, str) else list(queues)
        handlers = self._served(patterns)
        settings = WorkerSettings(
            name=name or default_worker_name(),
            queues=patterns,
            lease_ms=to_ms("lease", lease, MIN_LEASE_MS, MAX_LEASE_MS),
            grace_s=to_ms("grace", grace) / 1000,
            concurrency=None if concurrency is None else to_count("concurrency", concurrency, 1),
            burst=burst,
            max_burst_jobs=None if max_burst_jobs is None else to_count("max_burst_jobs", max_burst_jobs, 1),
        )
        if processes is None:
            return self._inline_worker(handlers, settings)
        check_shared(self._session.url)
        pool = Pool(
            PoolSettings(
                target=locate_app(self),
                path=sys.path,
                worker=settings.name,
                processes=to_count("processes", processes, 1, MAX_PROCESSES),
                drain_grace_s=to_ms("drain_grace", drain_grace) / 1000,
                max_jobs=None if max_jobs is None else to_count("max_jobs", max_jobs, 1),
                max_memory=None if max_memory is None else to_count("max_memory", max_memory, 1),
            )
        )
        return Worker(pool, self._opened, settings, HookDispatcher(self._on_event, self._around.report_error))

    def run_worker(self, queues: str | Iterable[str] | None = None, **options: Unpack[WorkerOptions]) -> None:
        """Run a worker until a signal stops it: the whole of a management command. The options are those of `worker`.

        SIGTERM or SIGINT stops it: runs have `grace` to finish. A second one gives them about one second. SIGHUP loads
        the code of child processes again. Call this on the main thread, where no event loop runs.
        """
        asyncio.run(serve_until_signal(self.worker(queues, **options)))

    def _parts(self) -> AppParts:
        return AppParts(
            handlers=self._served(None),
            hooks=self._around,
            on_event=self._on_event,
            lifespan=self._lifespan,
            url=self._session.url,
            on_default=self._session.on_default,
            namespace=self._session.namespace,
            max_payload=self._session.max_payload,
            open_lazily=self._open_lazily,
        )

    def _open_lazily(self) -> Self:
        """Return this app, whose storage opens at its first use: in a child process most handlers never use it."""
        self._session.open_lazily()
        return self

    def _inline_worker(self, handlers: Iterable[Handler], settings: WorkerSettings, *hooks: OnEvent) -> Worker:
        inline = Inline(handlers, self._around, self._find_application)
        dispatcher = HookDispatcher([*self._on_event, *hooks], self._around.report_error)
        return Worker(inline, partial(self._opened, inline), settings, dispatcher)

    def _find_application(self) -> Application:
        """Return the target and the source of this app. The search reads all modules: its result is kept."""
        if not self._application.target:
            self._application = application_of(self)
        return self._application

    @asynccontextmanager
    async def _opened(self, inline: Inline | None = None) -> AsyncGenerator[Storage]:
        """Open the storage for a worker, and enter the lifespan of its inline runs."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self)
            if inline is not None and self._lifespan is not None:
                inline.runner.resources = await stack.enter_async_context(self._lifespan())
            yield self.storage

    def _served(self, queues: str | Iterable[str] | None) -> list[Handler]:
        """Return the handlers and fail handlers of the tasks whose names match."""
        definitions = [self._tasks[name] for name in self.tasks]
        failed = [definition.fail_handler for definition in definitions if definition.fail_handler is not None]
        handlers = {handler.queue: handler for handler in [*(d.handler for d in definitions), *failed]}
        return [handlers[queue] for queue in choose(handlers, queues)]


async def _all_or_raise(sending: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all, even if some raise; then raise the first error."""
    for error in await asyncio.gather(*sending, return_exceptions=True):
        if error is not None:
            raise error


def _add_hook(what: str, hooks: list[H], function: H) -> H:
    if not callable(function):
        raise OptionError(f"{what} takes a function, not {function!r:.60}: use it as a decorator, @app.{what}")
    hooks.append(function)
    return function


def default_name(function: Callable[..., Any]) -> str:
    """Return `module.function`, with the program's file name for `__main__`, so that its workers find its jobs."""
    module = getattr(function, "__module__", None) or "tasks"
    if module == "__main__":
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else "main"
    return f"{module.removesuffix('.__main__')}.{name_of(function)}"


def _where(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    line = f" (line {code.co_firstlineno})" if code else ""
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}{line}"
