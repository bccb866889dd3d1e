"""Requests: a task or queue binds a payload to a `BoundRequest`; sending it returns the `Handle` of the job."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, cast

from msgspec.structs import replace

from holdfast._client import familiar, waiters
from holdfast._client.info import JobInfo, info_of
from holdfast._client.session import Session
from holdfast._client.waiters import to_wait_s, value_of
from holdfast._core.arguments import Arguments
from holdfast._core.events import Event, Topic
from holdfast._core.extension import BACKOFF, EXPIRES_AT, EXPIRES_IN, HEADERS, Extension, headers_in, pack_numbers
from holdfast._core.jobs import Outcome, Request, State, Update, Work, new_id
from holdfast._core.lifecycle import newest_generation
from holdfast._core.options import (
    DEFAULT_WAIT_S,
    OPTIONS,
    Seconds,
    UsingOptions,
    check_names,
    given_fields,
    to_at,
    to_headers,
    to_update,
)
from holdfast._core.replies import CancelResult, Enqueued, Placed
from holdfast.errors import DuplicateJob, JobForgotten, JobNotFound, OptionError
from holdfast.storage.validation import check_ids, clean_id

if TYPE_CHECKING:
    from holdfast._client.sync import SyncUsing
    from holdfast._client.task import Definition

AT_MOST_ONCE = {"max_retries": 0, "max_stalls": 0, "max_timeouts": 0}
"""Limits of a task with `delivery="at_most_once"`."""

NO_HEADERS = b"{}"

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class RequestTemplate:
    """A request without its payload: made once for each task, and for each `task.using(…)`."""

    def __init__(
        self,
        queue: str,
        options: Mapping[str, Any],
        *,
        arguments: Arguments | None = None,
        update: Update | None = None,
        defaults: Mapping[str, Any] = {},
        at_most_once: bool = False,
        result_ttl_ms: int | None = None,
    ) -> None:
        """Check the options. The other parameters are those of the task, if there is one: `defaults` are stored with
        every request."""
        fields = {**defaults, **given_fields(options)}
        if "delay_ms" in fields and "run_at" in fields:
            raise OptionError("delay and run_at are mutually exclusive: pass only one")
        if at_most_once:
            limits = [name for name in AT_MOST_ONCE if fields.get(name)]
            if limits:
                raise OptionError(f"{queue} runs a job at most once: {', '.join(limits)} must be 0")
            fields.update(AT_MOST_ONCE)
        id, on_conflict = fields.get("id"), fields.get("on_conflict")
        if id is not None and not isinstance(id, str | bytes):
            raise OptionError(f"id must be text or bytes, not {id!r:.60} ({type(id).__name__})")
        fields["extension"] = _extension_of(fields)
        work: dict[str, Any] = {name: fields[name] for name in Work.__struct_fields__ if name in fields}
        self.queue = queue
        self.arguments = arguments
        self.id = None if id is None else checked_id(queue, id)
        """The id that the caller chose; None for an id from the arguments, or a new one."""
        self.raises = on_conflict == "raise"
        """Whether a duplicate raises `DuplicateJob`."""
        self.result_ttl_ms = fields.get("result_ttl_ms", result_ttl_ms)
        """The `result_ttl` of the request, else that of the task; None if neither has one. Only errors show it."""
        self.wait_s = to_wait_s(options["wait"]) if "wait" in options else DEFAULT_WAIT_S
        """How long `call` waits in seconds; None waits without a limit."""
        self.request = Request(
            id="",
            work=Work(None, **work),
            run_at=fields.get("run_at"),
            delay_ms=fields.get("delay_ms"),
            update=update if on_conflict is None else to_update(on_conflict),
        )
        """The request, without its id and its payload."""

    @property
    def returns(self) -> Any:
        """Type of the result. It is read late, because an annotation may name a class that is defined later."""
        return Any if self.arguments is None else self.arguments.returns


def checked_id(queue: str, id: str | bytes) -> str:
    text = clean_id(id)
    check_ids(queue, [text])
    return text


def _extension_of(fields: Mapping[str, Any]) -> Extension:
    """Return the options of a request that have a tag. Their length counts from the time at which the job is due."""
    entries: list[tuple[int, bytes]] = []
    delays_ms, expires, run_at = fields.get("backoff"), fields.get("expires"), fields.get("run_at")
    if callable(delays_ms):
        raise OptionError("a function as backoff belongs to the task: pass seconds or a list of them")
    if delays_ms is not None:
        entries.append((BACKOFF, pack_numbers(*delays_ms)))
    if isinstance(expires, datetime):
        entries.append((EXPIRES_AT, pack_numbers(to_at("expires", expires))))
    elif expires is not None and run_at is not None:
        entries.append((EXPIRES_AT, pack_numbers(run_at + 1000 * expires)))
    elif expires is not None:
        entries.append((EXPIRES_IN, pack_numbers(fields.get("delay_ms", 0) + expires)))
    if fields.get("headers", NO_HEADERS) != NO_HEADERS:
        entries.append((HEADERS, fields["headers"]))
    return tuple(entries)


def bind(template: RequestTemplate, payload: bytes, codec: str, id: str | None) -> BoundRequest[Any]:
    """Return a request that is ready to be sent. Without an id it is a new job."""
    request = template.request
    work = replace(request.work, payload=payload, codec=codec)
    custom_id = id is not None
    return BoundRequest(template, replace(request, id=id if custom_id else new_id(), work=work, custom_id=custom_id))


class Using(Generic[P, R]):
    """A task with options for the requests made through it."""

    if not TYPE_CHECKING:
        __getattr__ = familiar.answer("a task", familiar.OF_A_TASK)

    def __init__(self, definition: Definition, options: Mapping[str, Any]) -> None:
        self._session = definition.session
        self._definition = definition
        self._options = options
        self._template = definition.request_template(options)

    def using(self, **options: Unpack[UsingOptions]) -> Using[P, R]:
        """Return the same task with options for its requests: `task.using(delay=60).enqueue(…)`."""
        check_names("using", UsingOptions, options)
        return Using(self._definition, {**self._options, **options})

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundRequest[R]:
        """Return a request that is not sent yet, for `app.enqueue_many` and `app.enqueue_in`."""
        definition, template, codecs = self._definition, self._template, self._session.codecs
        arguments = definition.arguments
        given = arguments.by_name(args, kwargs)
        codec = codecs.get("raw") if arguments.raw else definition.codec
        payload = arguments.encode(codecs, codec, given)
        id = definition.make_id(given) if template.id is None and definition.make_id is not None else template.id
        return bind(template, payload, codec.name, id)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a job. It is stored when this returns."""
        return await enqueue(self._session, self.bind(*args, **kwargs))

    async def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Enqueue a job and wait for its result. A remembered result returns at once. Raises like `Handle.result`."""
        return cast("R", await call(self._session, self.bind(*args, **kwargs)))

    def id_for(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Return the id that `unique` or `singleton` makes from these arguments: `queue.cancel(task.id_for(url))`."""
        definition = self._definition
        if definition.make_id is None:
            raise OptionError(f"{definition.name} makes no id from its arguments: pass unique=… or singleton=…")
        return definition.make_id(definition.arguments.by_name(args, kwargs))

    def handle(self, id: str | bytes) -> Handle[R]:
        """Return the handle of a job that was requested before, in any process: `await task.handle(id).result()`."""
        named = Request(id=checked_id(self._definition.name, id), work=Work(None), custom_id=True)
        return Handle(self._session, BoundRequest(self._template, named), None)

    @property
    def sync(self) -> SyncUsing[P, R]:
        """The blocking version of this task, for code without an event loop."""
        from holdfast._client.sync import SyncUsing

        return SyncUsing(self._session, self)


class BoundRequest(Generic[R_co]):
    """A request with encoded arguments that is ready to be sent: the result of `task.bind(…)` or `queue.bind(…)`."""

    __slots__ = ("queue", "request", "template")

    def __init__(self, template: RequestTemplate, request: Request) -> None:
        self.template = template
        self.queue = template.queue
        self.request = request

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def headers(self) -> dict[str, str]:
        """A copy of the headers."""
        return headers_in(self.request.work.extension)

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add headers, for hooks of `app.before_enqueue`. A new value replaces the old value of a key."""
        work = self.request.work
        entries = [entry for entry in work.extension if entry[0] != HEADERS]
        data = to_headers("headers", {**self.headers, **headers})
        if data != NO_HEADERS:
            entries.append((HEADERS, data))
        self.request = replace(self.request, work=replace(work, extension=tuple(sorted(entries))))

    def check(self, reply: Enqueued) -> None:
        """Raise `JobNotFound`, or `DuplicateJob` if the request has `on_conflict="raise"`."""
        if reply.placed is None:
            raise JobNotFound(f"job {self.id!r} in {self.queue} does not exist, or completed and dropped its payload")
        if self.template.raises and reply.placed in (Placed.DUPLICATE, Placed.COMPLETED, Placed.FAILED):
            raise DuplicateJob(f"job {self.id!r} in {self.queue} already exists ({reply.state})", ids=[self.id])

    def __repr__(self) -> str:
        return f"<request for job {self.id!r} in {self.queue}>"


class Handle(Generic[R_co]):
    """A requested job: its id, its queue, and its result."""

    __slots__ = ("_cached", "_session", "_template", "generation", "id", "placed", "queue")

    if not TYPE_CHECKING:
        __getattr__ = familiar.answer("a handle", familiar.OF_A_HANDLE)

    def __init__(self, session: Session, bound: BoundRequest[R_co], reply: Enqueued | None) -> None:
        """Raises like `BoundRequest.check`. There is no reply to a request in a transaction of the caller."""
        if reply is not None:
            bound.check(reply)
        self._session = session
        self.queue = bound.queue
        self.id = bound.request.id
        self.placed: Placed | None = None if reply is None else reply.placed
        """What the request did. None if it was sent in a transaction of the caller, and for `task.handle`."""
        self.generation = 0 if reply is None else reply.generation
        self._cached: Outcome | None = None if reply is None else reply.outcome
        self._template = bound.template

    async def result(self, *, wait: Seconds | None = DEFAULT_WAIT_S) -> R_co:
        """Return the result of the job. Waits up to `wait` seconds for it: None waits without a limit, 0 checks once.

        Raises `JobFailed`, `JobCancelled`, `JobForgotten`, or `WaitTimeout`, after which the job continues.
        """
        wait_s = 0.0 if self._session.eager else to_wait_s(wait)
        outcome = self._cached
        if outcome is None:
            if not self.generation:  # It was sent in a transaction of the caller, or this is `task.handle`.
                (job,) = await self._session.storage.get(self.queue, [self.id])
                if job is None:
                    raise JobForgotten(
                        f"job {self.id!r} in {self.queue} has no record: it is forgotten, or was never requested"
                        " (was the transaction committed?)"
                    )
                self.generation = newest_generation(job)
            outcome = await waiters.wait(
                self._session.storage,
                self.queue,
                self.id,
                self.generation,
                wait_s=wait_s,
                result_ttl_ms=self._template.result_ttl_ms,
            )
        return cast("R_co", value_of(self._session, self.queue, self.id, outcome, self._template.returns))

    async def state(self) -> State | None:
        """Return the state of the job; None if it does not exist, or is forgotten."""
        (job,) = await self._session.storage.get(self.queue, [self.id])
        return None if job is None else job.state

    async def info(self) -> JobInfo | None:
        """Return the stored state of the job, as `queue.get` does; None if it does not exist, or is forgotten."""
        (job,) = await self._session.storage.get(self.queue, [self.id])
        return None if job is None else info_of(self._session, self.queue, job)

    async def cancel(self) -> CancelResult:
        """Cancel the job: `CANCELLED` (truthy) if it waited, `ASKED` if it runs, `FINISHED` or `MISSING`."""
        (reply,) = await self._session.storage.cancel(self.queue, [self.id])
        return reply

    async def set_priority(self, priority: int) -> bool:
        """Change the priority of the job, and nothing else. Returns False if it has ended or does not exist. The
        retries of a running job have the new priority."""
        number = OPTIONS["priority"].convert(priority)
        (changed,) = await self._session.storage.prioritize(self.queue, [self.id], number)
        return changed

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events of this job from now on. Some may be lost, so do not wait for a certain one."""
        async with self._session.storage.subscribe(Topic(self.queue, "all", self.id)) as events:
            async for event in events:
                if event.happened:
                    yield event

    def __repr__(self) -> str:
        return f"<handle of job {self.id!r} in {self.queue}, {self.placed}>"


def handles_of(session: Session, replies: Iterable[tuple[BoundRequest[R], Enqueued | None]]) -> list[Handle[R]]:
    """Return the handles of requests that were sent together. Raises `DuplicateJob` with all ids that were refused."""
    handles: list[Handle[R]] = []
    refused: list[DuplicateJob] = []
    for bound, reply in replies:
        try:
            handles.append(Handle(session, bound, reply))
        except DuplicateJob as error:
            refused.append(error)
    if not refused:
        return handles
    more = "" if len(refused) == 1 else f"; {len(refused) - 1} more were refused"
    raise DuplicateJob(f"{refused[0]}{more}", ids=[id for error in refused for id in error.ids], handles=handles)


def call_hooks(session: Session, bounds: Iterable[BoundRequest[Any]]) -> None:
    """Call the `before_enqueue` hooks of an app with requests that are about to be sent. A hook that raises refuses
    all of them."""
    for bound in bounds:
        for hook in session.before_enqueue:
            hook(bound)


def enqueue(session: Session, bound: BoundRequest[R]) -> Coroutine[Any, Any, Handle[R]]:
    if session.before_enqueue:
        call_hooks(session, [bound])
    return send(session, bound)


async def send(session: Session, bound: BoundRequest[R]) -> Handle[R]:
    (reply,) = await session.storage.enqueue(bound.queue, [bound.request])
    return Handle(session, bound, reply)


async def call(session: Session, bound: BoundRequest[Any]) -> Any:
    template = bound.template
    if session.eager:  # The run is over when the request is stored, so its time is no wait.
        kept = replace(bound.request, keep_ms=waiters.KEEP_FOREVER_MS)
        handle: Handle[Any] = await enqueue(session, BoundRequest(template, kept))
        return await handle.result()
    if session.before_enqueue:
        call_hooks(session, [bound])
    reply, outcome = await waiters.ask(
        session.storage, bound.queue, bound.request, wait_s=template.wait_s, check=bound.check
    )
    return value_of(session, bound.queue, reply.id, outcome, template.returns)
