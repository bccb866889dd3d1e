"""What was enqueued in a rehearsal: a memory storage that remembers requests, and what a test expects of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from inspect import Parameter
from typing import Any, cast

import msgspec

from holdfast._client.request import RequestTemplate, Using
from holdfast._core.clock import Clock
from holdfast._core.codec import canonical
from holdfast._core.extension import BACKOFF, EXPIRES_AT, EXPIRES_IN, headers_in
from holdfast._core.jobs import DEFAULT_PRIORITY, Request
from holdfast._core.options import OPTIONS, from_at
from holdfast._core.replies import Enqueued, Placed
from holdfast._core.type_hooks import WITHOUT_HOOKS, TypeHooks
from holdfast.errors import OptionError
from holdfast.storage.local.memory import MemoryStorage

MAX_SHOWN = 10
"""Maximum number of requests that a failed assertion lists."""
PLACED = (Placed.NEW, Placed.UPDATED, Placed.DEFERRED)
"""What a request does that lets a job run."""
TAGS = {"backoff": (BACKOFF,), "expires": (EXPIRES_IN, EXPIRES_AT)}
"""Options that are entries of the field `extension`, and their tags. Headers are compared one by one."""


class RehearsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was enqueued in a rehearsal, also if its job has ended since. Duplicates are left out."""

    queue: str
    id: str
    arguments: Any
    """The arguments by name, as the handler gets them; the payload if the queue has no task here."""
    run_at: datetime
    """When the job was due."""
    delay: float
    """Seconds from the request until `run_at`."""
    priority: int

    def __str__(self) -> str:
        by_name = _by_name(self.arguments)
        given = f"{self.arguments!r:.200}" if by_name is None else show_arguments(by_name)
        delay = f", due after {self.delay:g} s" if self.delay > 0 else ""
        priority = f", priority {self.priority}" if self.priority != DEFAULT_PRIORITY else ""
        return f"{self.queue}({given}){delay}{priority}"


class SeenRequest(msgspec.Struct, frozen=True):
    """A request as it was sent, and the wall time of the clock at that moment."""

    queue: str
    request: Request
    at: int


class RehearsalStorage(MemoryStorage):
    """Jobs in memory. Remembers each request that lets a job run."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.seen: list[SeenRequest] = []

    async def _enqueue(self, queue: str, jobs: Sequence[Request]) -> list[Enqueued]:
        replies = await super()._enqueue(queue, jobs)
        now = self._clock.now_us()
        self.seen += [
            SeenRequest(queue, request, now)
            for request, reply in zip(jobs, replies, strict=True)
            if reply.placed in PLACED
        ]
        return replies


class Expectation:
    """What an assertion is about: a task or a queue by its name, options of the request, some arguments by name."""

    def __init__(self, task: Using[..., Any] | str, arguments: Mapping[str, object]) -> None:
        self._arguments = arguments
        self._options: Mapping[str, Any] = {}
        self._hooks = WITHOUT_HOOKS
        if isinstance(task, str):
            self._template = RequestTemplate(task, {})
        else:
            self._template = task._template  # pyright: ignore[reportPrivateUsage]
            self._options = task._options  # pyright: ignore[reportPrivateUsage]
            self._hooks = task._session.codecs.hooks  # pyright: ignore[reportPrivateUsage]
        self.queue = self._template.queue
        self._check_names()

    def __str__(self) -> str:
        using = f" with {show_arguments(self._options)}" if self._options else ""
        return f"{self.queue}({show_arguments(self._arguments)}){using}"

    def _check_names(self) -> None:
        """Refuse an argument that the task does not have: an assertion that it was not enqueued would always hold."""
        if self._template.arguments is None:
            return
        parameters = self._template.arguments.signature.parameters
        if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for name in self._arguments:
            if name not in parameters:
                raise OptionError(f"{self.queue} has no parameter {name!r}: it has {', '.join(parameters) or 'none'}")

    def matches(self, seen: SeenRequest, arguments: Any) -> bool:
        if seen.queue != self.queue or not all(self._has_option(name, seen.request) for name in self._options):
            return False
        by_name = _by_name(arguments) or {}
        return all(
            name in by_name and _is_same(by_name[name], value, self._hooks) for name, value in self._arguments.items()
        )

    def _has_option(self, name: str, request: Request) -> bool:
        """Whether a request has an option that `task.using(…)` gives. It may have more headers: hooks add some."""
        wanted, field = self._template.request, OPTIONS[name].field
        entries, wanted_entries = request.work.extension, wanted.work.extension
        if name == "id":
            return request.id == self._template.id
        if name == "delay":
            return request.run_at is None and (request.delay_ms or 0) == (wanted.delay_ms or 0)
        if name == "headers":
            return headers_in(wanted_entries).items() <= headers_in(entries).items()
        if name in TAGS:
            return not any(tag in TAGS[name] for tag, _ in {*entries} ^ {*wanted_entries})
        return all(
            getattr(sent, field) == getattr(expected, field)
            for sent, expected in ((request, wanted), (request.work, wanted.work))
            if field in sent.__struct_fields__
        )


def describe(seen: SeenRequest, arguments: Any) -> RehearsedRequest:
    request = seen.request
    run_at = seen.at if request.run_at is None else request.run_at
    due_at = run_at + 1000 * (request.delay_ms or 0)
    return RehearsedRequest(
        queue=seen.queue,
        id=request.id,
        arguments=arguments,
        run_at=from_at(due_at),
        delay=max(0.0, (due_at - seen.at) / 1e6),
        priority=request.work.priority,
    )


def show_arguments(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r:.100}" for name, value in arguments.items())


def show(requests: Sequence[RehearsedRequest]) -> str:
    """One line for each request, at most `MAX_SHOWN`."""
    lines = [f"\n  {request}" for request in requests[:MAX_SHOWN]]
    if len(requests) > MAX_SHOWN:
        lines.append(f"\n  and {len(requests) - MAX_SHOWN} more")
    return "".join(lines)


def _by_name(arguments: Any) -> dict[str, Any] | None:
    """The arguments, unless they are a payload that is not an object."""
    return cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else None


def _is_same(found: object, wanted: object, hooks: TypeHooks) -> bool:
    """Whether two values are equal, also if only their JSON is: a tuple may have become a list."""
    with suppress(TypeError, ValueError, RecursionError):  # An array of NumPy compares to an array, not to a bool.
        if found == wanted:
            return True
    with suppress(TypeError, ValueError, RecursionError):
        return canonical(found, hooks) == canonical(wanted, hooks)
    return False
