"""Tasks: a function, its options, and the requests made through it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

import msgspec

from holdfast._client import request
from holdfast._client.policy import queue_config
from holdfast._client.request import BoundRequest, Handle, RequestTemplate
from holdfast._client.session import Session
from holdfast._core.arguments import Arguments, id_maker, name_of
from holdfast._core.codec import Codec
from holdfast._core.jobs import Update
from holdfast._core.options import (
    OPTIONS,
    HandlerOptions,
    TaskOptions,
    UsingOptions,
    Where,
    check_names,
)
from holdfast._worker.handler import Failure, Handler
from holdfast.errors import OptionError
from holdfast.storage.validation import FAILED_SUFFIX

if TYPE_CHECKING:
    from holdfast._client.sync import SyncUsing

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
F = TypeVar("F", bound=Callable[[Failure], object])


class Using(Generic[P, R]):
    """A task with options for the requests made through it."""

    def __init__(self, session: Session, definition: Definition, options: Mapping[str, Any]) -> None:
        self._session = session
        self._definition = definition
        self._options = options
        self._template = definition.request_template(options)

    def using(self, **options: Unpack[UsingOptions]) -> Using[P, R]:
        """The same task, with options for its requests: `id, on_conflict, delay, run_at, priority, result_ttl,
        dedup_ttl, timeout, max_retries, max_stalls, max_timeouts, wait`."""
        check_names("using", Where.USING, options)
        return Using(self._session, self._definition, {**self._options, **options})

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundRequest[R]:
        """A request that is not sent yet: for `app.enqueue_many` and `app.enqueue_in`."""
        definition, template = self._definition, self._template
        given = definition.arguments.by_name(args, kwargs)
        codec = definition.codec()
        payload = definition.arguments.encode(self._session.codecs, codec, given)
        id = template.id
        if id is None and definition.make_id is not None:
            id = definition.make_id(given)
        return request.bind(template, payload, codec.name, id)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Request a run. When this returns, the job is stored."""
        return await request.enqueue(self._session, self.bind(*args, **kwargs))

    async def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Request a run and wait for its result; a cached result returns at once. Raises as `Handle.result` does."""
        return cast("R", await request.call(self._session, self.bind(*args, **kwargs)))

    @property
    def sync(self) -> SyncUsing[P, R]:
        """The same verbs, blocking: for code that has no event loop."""
        from holdfast._client.sync import SyncUsing

        return SyncUsing(self._session, self)


class Task(Using[P, R], Generic[P, R, C]):
    """A function that can be requested: `enqueue`, `call`, `using`, `bind`. Called plainly, it runs here."""

    def __init__(self, session: Session, definition: Definition) -> None:
        super().__init__(session, definition, {})
        self.name = definition.name
        """Name of the queue of this task."""
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
        """Register a handler for jobs of this task that failed for good. It runs at least once, as a separate job that
        is stored in the same step as the failure. It takes a `Failure`; its options are listed in docs/api.md."""

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
    """A task as its app knows it: the function, its options, its handlers."""

    def __init__(
        self, session: Session, function: Callable[..., Any], name: str, options: TaskOptions, *, stub: bool = False
    ) -> None:
        self._session = session
        self.stub = stub
        """The function is in another program; here is only its signature."""
        self.name = name
        self.arguments = Arguments(name, function)
        unique, singleton = options.get("unique"), options.get("singleton")
        if unique is not None and singleton is not None:
            raise OptionError(
                f"{name}: unique and singleton cannot be combined. unique ignores a duplicate request, singleton runs"
                " the newest one afterwards. Choose one"
            )
        template = unique if singleton is None else singleton
        self.make_id = None if template is None else id_maker(self.arguments, template)
        """Makes the id of a job from its arguments; None if the task has neither `unique` nor `singleton`."""
        self._update = None if singleton is None else Update()
        priority = OPTIONS["priority"]
        self._priority = priority.convert(options.get("priority", priority.default))
        self._codec_name = options.get("codec")
        if self._codec_name is not None:
            session.codecs.get(self._codec_name)
        self.handler = self._make_handler(self.arguments, Where.TASK, options, self._codec_name)
        self.fail_handler: Handler | None = None

    def request_template(self, options: Mapping[str, Any]) -> RequestTemplate:
        """What the requests made with these options have in common."""
        return request.request_template(
            self.name,
            self._returns,
            options,
            update=self._update,
            priority=self._priority,
            at_most_once=self.handler.config.policy.at_most_once,
        )

    def _returns(self) -> Any:
        return self.arguments.returns

    def codec(self) -> Codec:
        """The codec that writes the arguments."""
        if self.arguments.raw:
            return self._session.codecs.get("raw")
        return self._session.codecs.default if self._codec_name is None else self._session.codecs.get(self._codec_name)

    def add_fail_handler(self, function: Callable[[Failure], object], options: HandlerOptions) -> None:
        check_names(f"on_failure of {self.name}", Where.FAIL_HANDLER, options)
        if self.fail_handler is not None:
            raise OptionError(f"{self.name} has a fail handler already")
        arguments = Arguments(self.name + FAILED_SUFFIX, function)
        if len(arguments.signature.parameters) != 1:
            raise OptionError(f"the fail handler of {self.name} takes one parameter, a Failure")
        self.fail_handler = self._make_handler(arguments, Where.FAIL_HANDLER, options, None)
        self.fail_handler.fails_for = self.arguments
        config = self.handler.config
        policy = msgspec.structs.replace(config.policy, follows_up=True)
        self.handler.config = msgspec.structs.replace(config, policy=policy)

    def _make_handler(
        self, arguments: Arguments, place: Where, options: Mapping[str, Any], codec_name: str | None
    ) -> Handler:
        codecs = self._session.codecs
        config = queue_config(arguments.name, place, options)
        return Handler(config, arguments, codecs, codecs.default.name if codec_name is None else codec_name)
