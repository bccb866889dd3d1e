"""Tasks: a function, its options, and requests for it. `BoundRequest` is one request, `Handle` its result."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

import msgspec

from holdfast._client.session import BoundRequest, Session
from holdfast._core.arguments import Arguments, id_maker, name_of
from holdfast._core.codec import Codec
from holdfast._core.events import Event, Topic
from holdfast._core.jobs import DEFAULT_PRIORITY, Outcome, Request, State, Update, Work, new_id
from holdfast._core.options import (
    DEFAULT_WAIT_S,
    HandlerOptions,
    Seconds,
    TaskOptions,
    UsingOptions,
    check_known,
    to_at,
    to_choice,
    to_count,
    to_ms,
    to_update,
    to_wait_s,
)
from holdfast._core.replies import CancelResult, Enqueued, Placed
from holdfast._core.retry_policy import FAIL_HANDLER, TASK, Policy, QueueConfig
from holdfast._worker.handler import Failure, Handler
from holdfast.errors import OptionError
from holdfast.storage.validation import FAILED_SUFFIX, clean_id

if TYPE_CHECKING:
    from holdfast._client.sync import SyncUsing

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F", bound=Callable[[Failure], object])

AT_MOST_ONCE = {"max_retries": 0, "max_stalls": 0, "max_timeouts": 0}
MIN_TIMEOUT_MS = 1


def bind(
    queue: str,
    payload: bytes,
    codec: str,
    returns: Callable[[], Any],
    options: UsingOptions,
    *,
    id: str | None = None,
    update: Update | None = None,
    priority: int = DEFAULT_PRIORITY,
    limits: dict[str, int] | None = None,
) -> BoundRequest[Any]:
    """A request, from what its caller says. `id`, `update`, `priority` and `limits` are the task's own."""
    if not (options or limits):
        request = Request(
            new_id() if id is None else id, Work(payload, codec, priority), update=update, custom_id=id is not None
        )
        return BoundRequest(queue, request, returns, raises=False, wait_s=DEFAULT_WAIT_S)
    asked: dict[str, Any] = dict(options)
    given = asked.get("id")
    if given is not None:
        if not isinstance(given, str | bytes):
            raise OptionError(f"id is text or bytes, not {given!r:.60} ({type(given).__name__})")
        id = clean_id(given)
    conflict = asked.get("on_conflict")
    if conflict is not None:
        update = to_update(conflict)
    if asked.get("delay") is not None and asked.get("run_at") is not None:
        raise OptionError("delay and run_at are both given: one of them says when")
    own = {name: to_count(name, asked[name]) for name in AT_MOST_ONCE if asked.get(name) is not None}
    if limits is not None and any(own.values()):
        raise OptionError(f"{queue} runs a job at most once: {', '.join(own)} cannot be more than 0")
    limits = own if limits is None else limits
    work = Work(
        payload,
        codec,
        to_count("priority", priority if asked.get("priority") is None else asked["priority"], 0, 9),
        None if asked.get("timeout") is None else to_ms("timeout", asked["timeout"], MIN_TIMEOUT_MS),
        limits.get("max_retries"),
        limits.get("max_stalls"),
        limits.get("max_timeouts"),
        None if asked.get("result_ttl") is None else to_ms("result_ttl", asked["result_ttl"]),
        None if asked.get("dedup_ttl") is None else to_ms("dedup_ttl", asked["dedup_ttl"]),
    )
    request = Request(
        new_id() if id is None else id,
        work,
        None if asked.get("run_at") is None else to_at("run_at", asked["run_at"]),
        None if asked.get("delay") is None else to_ms("delay", asked["delay"]),
        update,
        custom_id=id is not None,
    )
    wait_s = to_wait_s(asked["wait"]) if "wait" in asked else DEFAULT_WAIT_S
    return BoundRequest(queue, request, returns, raises=conflict == "raise", wait_s=wait_s)


class Handle(Generic[R_co]):
    """A job that was asked for."""

    __slots__ = ("_app", "_cached", "_returns", "generation", "id", "placed", "queue")

    def __init__(self, app: Session, bound: BoundRequest[R_co], reply: Enqueued | None) -> None:
        self._app = app
        self.queue = bound.queue
        self.id = bound.id
        self.placed: Placed | None = None if reply is None else reply.placed
        """What the request did: new, updated, deferred, duplicate or completed. None where a transaction of yours
        has yet to decide it."""
        self.generation = 0 if reply is None else reply.generation
        self._cached: Outcome | None = None if reply is None else reply.outcome
        self._returns = bound.returns

    async def result(self, *, wait: Seconds | None = DEFAULT_WAIT_S) -> R_co:
        """What the job returned. Waits up to `wait` seconds (30; None for ever; 0 looks once).

        Raises `JobFailed` with the cause as data, `JobCancelled`, `JobForgotten`, or `WaitTimeout`; the job goes on.
        """
        wait_s = to_wait_s(wait)
        outcome = self._cached
        if outcome is None:
            if self.placed is None and not self.generation:
                self.generation = await self._app.newest_generation(self.queue, self.id)
            outcome = await self._app.wait_for(self.queue, self.id, self.generation, wait_s)
        return cast("R_co", self._app.value_of(self.queue, self.id, outcome, self._returns()))

    async def state(self) -> State | None:
        """The state of its record; None if there is none (any more)."""
        (job,) = await self._app.storage.get(self.queue, [self.id])
        return None if job is None else job.state

    async def cancel(self) -> CancelResult:
        """Stop the job: `CANCELLED` (and truthy) if it waited, `ASKED` if it runs and its worker is told to stop it."""
        (reply,) = await self._app.storage.cancel(self.queue, [self.id])
        return reply

    async def events(self) -> AsyncIterator[Event]:
        """What happens to this job from now on. Hints: some may be lost, so never wait for one alone."""
        async with self._app.storage.subscribe(Topic(self.queue, "all", self.id)) as events:
            async for event in events:
                if event.happened:
                    yield event

    def __repr__(self) -> str:
        return f"<handle of job {self.id!r} in {self.queue}, {self.placed}>"


class Using(Generic[P, R]):
    """A task with options for the requests made through it."""

    def __init__(self, app: Session, definition: Definition, options: UsingOptions) -> None:
        self._app = app
        self._definition = definition
        self._options = options

    def using(self, **options: Unpack[UsingOptions]) -> Using[P, R]:
        """The same task, asked for with these options: `id, on_conflict, delay, run_at, priority, result_ttl,
        dedup_ttl, timeout, max_retries, max_stalls, max_timeouts, wait`."""
        check_known("using", options, UsingOptions)
        return Using(self._app, self._definition, cast("UsingOptions", {**self._options, **options}))

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundRequest[R]:
        """A request that is not sent yet: for `app.enqueue_many` and `app.enqueue_in`."""
        return self._definition.bind(args, kwargs, self._options)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Ask for a run. When this returns, the job is stored."""
        bound = self.bind(*args, **kwargs)
        return Handle(self._app, bound, await self._app.enqueue(bound))

    async def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Ask for a run and wait for its result; a cached one comes at once. Raises as `Handle.result` does."""
        return cast("R", await self._app.call(self.bind(*args, **kwargs)))

    @property
    def sync(self) -> SyncUsing[P, R]:
        """The same verbs, blocking: for code that has no event loop."""
        from holdfast._client.sync import SyncUsing

        return SyncUsing(self._app, self)


class Task(Using[P, R], Generic[P, R, C]):
    """A function that can be asked for: `enqueue`, `call`, `using`, `bind`. Called plainly it just runs, here."""

    def __init__(self, app: Session, definition: Definition) -> None:
        super().__init__(app, definition, UsingOptions())
        self.name = definition.name
        """Its queue's."""
        self.__wrapped__ = definition.arguments.function
        self.__doc__ = definition.arguments.function.__doc__
        self.__name__ = name_of(definition.arguments.function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        if self._definition.stub:
            raise OptionError(f"{self.name} is a stub: its function is in another program. Use enqueue or call")
        return cast("C", self._definition.arguments.function(*args, **kwargs))

    @overload
    def on_failure(self, function: F, /) -> F: ...
    @overload
    def on_failure(self, /, **options: Unpack[HandlerOptions]) -> Callable[[F], F]: ...
    def on_failure(self, function: Any = None, /, **options: Any) -> Any:
        """What to do when a job of this task has failed for good: a job of its own, stored in the step that ends the
        other, run at least once. It takes a `Failure`, and options of its own: 100 retries, 10 s to 900 s apart."""

        def register(function: F) -> F:
            self._definition.add_fail_handler(function, cast("HandlerOptions", options))
            return function

        return register if function is None else register(function)

    def __repr__(self) -> str:
        return f"<task {self.name}>"


class TaskDecorator(Protocol):
    """What `@app.task(…)` gives."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R, R]: ...


class Definition:
    """What is known of a task, whoever asks."""

    def __init__(
        self, app: Session, function: Callable[..., Any], name: str, options: TaskOptions, *, stub: bool = False
    ) -> None:
        self._app = app
        self.stub = stub
        """The function is not here."""
        self.name = name
        self.arguments = Arguments(name, function)
        self._options = options
        unique, singleton = options.get("unique"), options.get("singleton")
        if unique is not None and singleton is not None:
            raise OptionError(f"{name} is both unique and singleton: a second request is dropped, or it is not")
        template = unique if singleton is None else singleton
        self._make_id = None if template is None else id_maker(self.arguments, template)
        self._update = None if singleton is None else Update()
        self._priority = to_count("priority", options.get("priority", DEFAULT_PRIORITY), 0, 9)
        self._codec_name = options.get("codec")
        if self._codec_name is not None:
            app.codecs.get(self._codec_name)
        self.policy = task_policy(options)
        self._limits = AT_MOST_ONCE if self.policy.at_most_once else None
        self.handler = make_handler(app, name, self.arguments, self.policy, options, self._codec_name)
        self.fail_handler: Handler | None = None

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: UsingOptions) -> BoundRequest[Any]:
        given = self.arguments.bind(args, kwargs)
        codec = self._codec()
        return bind(
            self.name,
            self.arguments.encode(self._app.codecs, codec, given),
            codec.name,
            self._returns,
            options,
            id=None if self._make_id is None or options.get("id") is not None else self._make_id(given),
            update=self._update,
            priority=self._priority,
            limits=self._limits,
        )

    def _returns(self) -> Any:
        return self.arguments.returns

    def add_fail_handler(self, function: Callable[[Failure], object], options: HandlerOptions) -> None:
        check_known(f"on_failure of {self.name}", options, HandlerOptions)
        if self.fail_handler is not None:
            raise OptionError(f"{self.name} has a fail handler already")
        if len(Arguments(self.name, function).signature.parameters) != 1:
            raise OptionError(f"the fail handler of {self.name} takes one parameter, a Failure")
        queue = self.name + FAILED_SUFFIX
        policy = handler_policy(FAIL_HANDLER, options)
        self.fail_handler = make_handler(self._app, queue, Arguments(queue, function), policy, options, None)
        self.fail_handler.fails_for = self.arguments
        self.policy = msgspec.structs.replace(self.policy, follows_up=True)
        self.handler.config = msgspec.structs.replace(self.handler.config, policy=self.policy)

    def _codec(self) -> Codec:
        if self.arguments.raw:
            return self._app.codecs.get("raw")
        return self._app.codecs.default if self._codec_name is None else self._app.codecs.get(self._codec_name)


def task_policy(options: TaskOptions) -> Policy:
    policy = handler_policy(TASK, options)
    delivery = to_choice("delivery", options.get("delivery", "at_least_once"), ("at_least_once", "at_most_once"))
    exclusive = options.get("singleton") is not None
    on_loss = to_choice(
        "on_storage_loss", options.get("on_storage_loss", "kill" if exclusive else "hold"), ("hold", "kill")
    )
    result_ttl, dedup_ttl = options.get("result_ttl"), options.get("dedup_ttl")
    return msgspec.structs.replace(
        policy,
        **(AT_MOST_ONCE if delivery == "at_most_once" else {}),
        result_ttl_ms=policy.result_ttl_ms if result_ttl is None else to_ms("result_ttl", result_ttl),
        dedup_ttl_ms=None if dedup_ttl is None else to_ms("dedup_ttl", dedup_ttl),
        at_most_once=delivery == "at_most_once",
        exclusive=exclusive,
        dies_with_storage=on_loss == "kill",
    )


def handler_policy(base: Policy, options: HandlerOptions) -> Policy:
    """The policy that options ask for, where they say something."""
    asked: dict[str, Any] = dict(options)
    changes: dict[str, int] = {}
    for name in ("max_retries", "max_stalls", "max_timeouts"):
        if name in asked:
            changes[name] = to_count(name, asked[name])
    for name in ("timeout", "failure_ttl", "cancel_grace"):
        if name in asked:
            changes[f"{name}_ms"] = to_ms(name, asked[name], MIN_TIMEOUT_MS if name == "timeout" else 0)
    return msgspec.structs.replace(base, **changes, **backoff_of(base, asked))


def backoff_of(base: Policy, asked: Mapping[str, Any]) -> dict[str, int]:
    """The least and the longest backoff. Where only one is given, the other gives way to it."""
    least = base.min_backoff_ms if "min_backoff" not in asked else to_ms("min_backoff", asked["min_backoff"])
    most = base.max_backoff_ms if "max_backoff" not in asked else to_ms("max_backoff", asked["max_backoff"])
    if least > most and "min_backoff" in asked and "max_backoff" in asked:
        raise OptionError(f"max_backoff ({most / 1000:g} s) is less than min_backoff ({least / 1000:g} s)")
    if least > most:
        least = most = least if "min_backoff" in asked else most
    return {"min_backoff_ms": least, "max_backoff_ms": most}


def make_handler(
    app: Session, queue: str, arguments: Arguments, policy: Policy, options: HandlerOptions, codec: str | None
) -> Handler:
    concurrency = options.get("concurrency")
    config = QueueConfig(
        queue=queue,
        policy=policy,
        size=to_count("size", options.get("size", 10), 1, 100_000),
        concurrency=None if concurrency is None else to_count("concurrency", concurrency, 1),
        queue_priority=to_count("queue_priority", options.get("queue_priority", 100)),
    )
    return Handler(config, arguments, app.codecs, app.codecs.default.name if codec is None else codec)
