"""Requests: a task binds arguments to a `BoundRequest`, which is sent; a `Handle` stands for the job."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, cast

import msgspec
from msgspec.structs import replace

from holdfast._client import waiters
from holdfast._client.session import Session
from holdfast._client.waiters import to_wait_s, value_of
from holdfast._core.arguments import Arguments
from holdfast._core.events import Event, Topic
from holdfast._core.jobs import DEFAULT_PRIORITY, Outcome, Request, State, Update, Work, new_id
from holdfast._core.options import DEFAULT_WAIT_S, Seconds, UsingOptions, check_names, given_fields, to_update
from holdfast._core.replies import CancelResult, Enqueued, Placed
from holdfast.errors import DuplicateJob, JobForgotten, JobNotFound, OptionError
from holdfast.storage.validation import batches, clean_id

if TYPE_CHECKING:
    from holdfast._client.sync import SyncUsing
    from holdfast._client.task import Definition

AT_MOST_ONCE = {"max_retries": 0, "max_stalls": 0, "max_timeouts": 0}
"""Limits of a task that promises to run a job at most once."""
CALLS_AT_ONCE = 4
"""Concurrent enqueue calls per queue in `enqueue_many`: the next batch is encoded while another one runs."""

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class RequestTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """All of a request but its payload: made once for each task, and for each `task.using(…)`."""

    queue: str
    arguments: Arguments | None
    """None for a queue without a task."""
    id: str | None
    """The id that the caller chose."""
    raises: bool
    """A duplicate raises `DuplicateJob`."""
    wait_s: float | None
    """How long `call` waits; None is without a limit."""
    request: Request
    """A request without its id and its payload."""

    @property
    def returns(self) -> Any:
        """Type of the result, which annotations may name before it is defined."""
        return Any if self.arguments is None else self.arguments.returns


def request_template(
    queue: str,
    options: Mapping[str, Any],
    *,
    arguments: Arguments | None = None,
    update: Update | None = None,
    priority: int = DEFAULT_PRIORITY,
    at_most_once: bool = False,
) -> RequestTemplate:
    """Check the options of a request. `arguments`, `update`, `priority` and `at_most_once` are those of the task."""
    fields = given_fields(options)
    if "delay_ms" in fields and "run_at" in fields:
        raise OptionError("delay and run_at are mutually exclusive: pass only one")
    if at_most_once:
        limits = [name for name in AT_MOST_ONCE if fields.get(name)]
        if limits:
            raise OptionError(f"{queue} runs a job at most once: {', '.join(limits)} cannot be more than 0")
        fields.update(AT_MOST_ONCE)
    id, on_conflict = fields.get("id"), fields.get("on_conflict")
    if id is not None and not isinstance(id, str | bytes):
        raise OptionError(f"id is text or bytes, not {id!r:.60} ({type(id).__name__})")
    work: dict[str, Any] = {name: fields[name] for name in Work.__struct_fields__ if name in fields}
    work.setdefault("priority", priority)
    return RequestTemplate(
        queue=queue,
        arguments=arguments,
        id=None if id is None else clean_id(id),
        raises=on_conflict == "raise",
        wait_s=to_wait_s(options["wait"]) if "wait" in options else DEFAULT_WAIT_S,
        request=Request(
            id="",
            work=Work(None, **work),
            run_at=fields.get("run_at"),
            delay_ms=fields.get("delay_ms"),
            update=update if on_conflict is None else to_update(on_conflict),
        ),
    )


def bind(template: RequestTemplate, payload: bytes, codec: str, id: str | None) -> BoundRequest[Any]:
    """One request, ready to be sent. Without an id, each request is a new job."""
    request = template.request
    work = replace(request.work, payload=payload, codec=codec)
    custom_id = id is not None
    return BoundRequest(template, replace(request, id=id if custom_id else new_id(), work=work, custom_id=custom_id))


class Using(Generic[P, R]):
    """A task with options for the requests made through it."""

    def __init__(self, definition: Definition, options: Mapping[str, Any]) -> None:
        self._session = definition.session
        self._definition = definition
        self._options = options
        self._template = definition.request_template(options)

    def using(self, **options: Unpack[UsingOptions]) -> Using[P, R]:
        """The same task, with options for its requests: `id, on_conflict, delay, run_at, priority, result_ttl,
        dedup_ttl, timeout, max_retries, max_stalls, max_timeouts, wait`."""
        check_names("using", UsingOptions, options)
        return Using(self._definition, {**self._options, **options})

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundRequest[R]:
        """A request that is not sent yet: for `app.enqueue_many` and `app.enqueue_in`."""
        definition, template, codecs = self._definition, self._template, self._session.codecs
        arguments = definition.arguments
        given = arguments.by_name(args, kwargs)
        codec = codecs.get("raw") if arguments.raw else definition.codec
        payload = arguments.encode(codecs, codec, given)
        id = template.id
        if id is None and definition.make_id is not None:
            id = definition.make_id(given)
        return bind(template, payload, codec.name, id)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Request a run. When this returns, the job is stored."""
        return await enqueue(self._session, self.bind(*args, **kwargs))

    async def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Request a run and wait for its result; a cached result returns at once. Raises as `Handle.result` does."""
        return cast("R", await call(self._session, self.bind(*args, **kwargs)))

    @property
    def sync(self) -> SyncUsing[P, R]:
        """The same verbs, blocking: for code that has no event loop."""
        from holdfast._client.sync import SyncUsing

        return SyncUsing(self._session, self)


class BoundRequest(Generic[R_co]):
    """One request, ready to be sent: `task.bind(…)` or `queue.bind(…)`. Its arguments are encoded already."""

    __slots__ = ("queue", "request", "template")

    def __init__(self, template: RequestTemplate, request: Request) -> None:
        self.template = template
        self.queue = template.queue
        self.request = request

    @property
    def id(self) -> str:
        return self.request.id

    def check(self, reply: Enqueued) -> None:
        """Raise `JobNotFound`, or `DuplicateJob` if the caller asked for it."""
        if reply.placed is None:
            raise JobNotFound(f"there is no job {self.id!r} in {self.queue} whose payload could be used again")
        if self.template.raises and reply.placed in (Placed.DUPLICATE, Placed.COMPLETED):
            raise DuplicateJob(f"job {self.id!r} in {self.queue} is there already ({reply.state})")

    def __repr__(self) -> str:
        return f"<a request for job {self.id!r} in {self.queue}>"


class Handle(Generic[R_co]):
    """A job that was requested."""

    __slots__ = ("_cached", "_session", "_template", "generation", "id", "placed", "queue")

    def __init__(self, session: Session, bound: BoundRequest[R_co], reply: Enqueued | None) -> None:
        self._session = session
        self.queue = bound.queue
        self.id = bound.request.id
        self.placed: Placed | None = None if reply is None else reply.placed
        """What the request did: new, updated, deferred, duplicate or completed. None if a transaction of the caller
        has yet to decide it."""
        self.generation = 0 if reply is None else reply.generation
        self._cached: Outcome | None = None if reply is None else reply.outcome
        self._template = bound.template

    async def result(self, *, wait: Seconds | None = DEFAULT_WAIT_S) -> R_co:
        """The value that the job returned. Waits up to `wait` seconds (default 30; None waits without a limit; 0 checks
        once).

        Raises `JobFailed` with the cause as data, `JobCancelled`, `JobForgotten`, or `WaitTimeout`; the job goes on.
        """
        wait_s = to_wait_s(wait)
        outcome = self._cached
        if outcome is None:
            if self.placed is None and not self.generation:
                self.generation = await self._newest_generation()
            outcome = await waiters.wait(self._session.storage, self.queue, self.id, self.generation, wait_s=wait_s)
        return cast("R_co", value_of(self._session, self.queue, self.id, outcome, self._template.returns))

    async def _newest_generation(self) -> int:
        """The newest generation of the job: a request that was sent in a caller's transaction has no reply."""
        (job,) = await self._session.storage.get(self.queue, [self.id])
        if job is None:
            raise JobForgotten(f"job {self.id!r} in {self.queue} has no record: was the transaction committed?")
        return job.generation if job.run is None or job.run.next is None else job.run.next.generation

    async def state(self) -> State | None:
        """The state of the job's record; None if the record does not exist (any more)."""
        (job,) = await self._session.storage.get(self.queue, [self.id])
        return None if job is None else job.state

    async def cancel(self) -> CancelResult:
        """Stop the job: `CANCELLED` (and truthy) if it was waiting, `ASKED` if it runs and its worker is asked to stop
        it."""
        (reply,) = await self._session.storage.cancel(self.queue, [self.id])
        return reply

    async def events(self) -> AsyncIterator[Event]:
        """What happens to this job from now on. Hints: some may be lost, so never wait for one alone."""
        async with self._session.storage.subscribe(Topic(self.queue, "all", self.id)) as events:
            async for event in events:
                if event.happened:
                    yield event

    def __repr__(self) -> str:
        return f"<handle of job {self.id!r} in {self.queue}, {self.placed}>"


async def enqueue(session: Session, bound: BoundRequest[R]) -> Handle[R]:
    """Send one request."""
    (reply,) = await session.storage.enqueue(bound.queue, [bound.request])
    bound.check(reply)
    return Handle(session, bound, reply)


async def call(session: Session, bound: BoundRequest[Any]) -> Any:
    """Send one request and wait for its result."""
    template = bound.template
    reply, outcome = await waiters.ask(
        session.storage, bound.queue, bound.request, wait_s=template.wait_s, check=bound.check
    )
    return value_of(session, bound.queue, reply.id, outcome, template.returns)


async def enqueue_many(session: Session, requests: Iterable[BoundRequest[R]]) -> list[Handle[R]]:
    """Send requests in as few calls as possible, those of one queue in order; the handles are in the order given. If
    some requests cannot be sent, others may have been."""
    bounds = _checked(requests)
    queues: dict[str, list[int]] = defaultdict(list)
    for index, bound in enumerate(bounds):
        queues[bound.queue].append(index)
    storage = session.storage
    replies: dict[int, Enqueued] = {}

    async def send(queue: str, batch: list[int]) -> None:
        answers = await storage.enqueue(queue, [bounds[index].request for index in batch])
        replies.update(zip(batch, answers, strict=True))

    async def send_queue(queue: str, indexes: list[int]) -> None:
        waiting = batches(indexes, lambda index: _size(bounds[index]))
        while now := list(itertools.islice(waiting, CALLS_AT_ONCE)):
            _raise_first(await asyncio.gather(*(send(queue, batch) for batch in now), return_exceptions=True))

    sending = (send_queue(queue, indexes) for queue, indexes in queues.items())
    _raise_first(await asyncio.gather(*sending, return_exceptions=True))
    for index, bound in enumerate(bounds):
        bound.check(replies[index])
    return [Handle(session, bound, replies[index]) for index, bound in enumerate(bounds)]


def enqueue_in(session: Session, transaction: object, requests: Iterable[BoundRequest[R]]) -> list[Handle[R]]:
    """Enqueue inside a transaction of the caller. Consecutive requests for one queue are sent together."""
    bounds = _checked(requests)
    storage = session.transaction_storage
    sent: list[tuple[BoundRequest[R], Enqueued | None]] = []
    for queue, group in itertools.groupby(bounds, lambda bound: bound.queue):
        for batch in batches(group, _size):
            replies = storage.enqueue_in(transaction, queue, [bound.request for bound in batch])
            sent += zip(batch, replies, strict=True)
    for bound, reply in sent:
        if reply is not None:
            bound.check(reply)
    return [Handle(session, bound, reply) for bound, reply in sent]


def _raise_first(results: Sequence[BaseException | None]) -> None:
    for error in results:
        if error is not None:
            raise error


def _checked(requests: Iterable[BoundRequest[R]]) -> list[BoundRequest[R]]:
    bounds = list(requests)
    for bound in bounds:
        if not isinstance(bound, BoundRequest):
            raise OptionError(f"a request is what task.bind(…) or queue.bind(…) gives, not {bound!r:.60}")
    return bounds


def _size(bound: BoundRequest[Any]) -> int:
    return len(bound.request.work.payload or b"")
