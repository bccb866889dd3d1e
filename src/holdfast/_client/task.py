"""Tasks: a function, its options, its fail handler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

import msgspec
from msgspec.structs import replace

from holdfast._client.request import RequestTemplate, Using
from holdfast._client.session import Session
from holdfast._core.arguments import Arguments, id_maker, name_of
from holdfast._core.jobs import Update
from holdfast._core.options import HandlerOptions, TaskOptions, all_fields, check_names, given_fields
from holdfast._core.retry_policy import Policy, QueueConfig, RetryRules
from holdfast._core.tasks import IdRule, describe_task, signature_hash
from holdfast._worker.handler import Failure, Handler
from holdfast.errors import OptionError
from holdfast.storage.validation import FAILED_SUFFIX

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
F = TypeVar("F", bound=Callable[[Failure], object])


STORED = ("priority", "expires")
"""Options of a task that are stored with each of its requests. Workers read the other options from the task."""


class Task(Using[P, R], Generic[P, R, C]):
    """A function whose runs can be requested: `enqueue`, `call`, `using`, `bind`. A direct call runs it here."""

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition, {})
        self.name = definition.name
        """Name of the task and of its queue."""
        self.__wrapped__ = definition.arguments.function
        self.__doc__ = definition.arguments.function.__doc__
        self.__name__ = name_of(definition.arguments.function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        if self._definition.stub:
            raise OptionError(f"{self.name} is a stub, and its function is in another program: use enqueue or call")
        return cast("C", self._definition.arguments.function(*args, **kwargs))

    @overload
    def on_failure(self, function: F, /) -> F: ...
    @overload
    def on_failure(self, /, **options: Unpack[HandlerOptions]) -> Callable[[F], F]: ...
    def on_failure(self, function: Any = None, /, **options: Any) -> Any:
        """Register a handler for failed jobs of this task. It takes a `Failure`, and runs at least once, as a job that
        is stored in the same step as the failure. The API reference lists the options."""
        register = functools.partial(self._definition.add_fail_handler, cast("HandlerOptions", options))
        return register if function is None else register(function)

    def __repr__(self) -> str:
        return f"<task {self.name}>"


class TaskDecorator(Protocol):
    """The type of `@app.task(…)`."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R, R]: ...


class Definition:
    """A task as its app has it: the function, its options, its handler and its fail handler."""

    def __init__(
        self, session: Session, function: Callable[..., Any], name: str, options: TaskOptions, *, stub: bool = False
    ) -> None:
        self.session = session
        self.stub = stub
        """The function is in another program; only its signature is used here."""
        self.name = name
        self.arguments = Arguments(name, function)
        unique, singleton = options.get("unique"), options.get("singleton")
        if unique is not None and singleton is not None:
            raise OptionError(
                f"{name}: unique and singleton are mutually exclusive: pass only one. unique ignores a duplicate"
                " request, singleton runs the newest request afterwards"
            )
        template = unique if singleton is None else singleton
        self.make_id = None if template is None else id_maker(self.arguments, template, session.codecs.hooks)
        """Makes the id of a job from its arguments; None if the task has neither `unique` nor `singleton`."""
        defaults = given_fields({name: value for name, value in options.items() if name in STORED})
        codecs, codec_name = session.codecs, options.get("codec")
        self.codec = codecs.default if codec_name is None else codecs.get(codec_name)
        """Encodes arguments and results."""
        rule: IdRule = "unique" if unique is not None else "none" if singleton is None else "singleton"
        facts = describe_task(self.arguments, rule, template)
        note = msgspec.json.encode(facts, enc_hook=codecs.hooks.encode).decode()
        config = replace(
            queue_config(name, TaskOptions, options), signature=signature_hash(self.arguments.signature), note=note
        )
        self.handler = Handler(config, self.arguments, codecs, self.codec.name)
        self.handler.rules = retry_rules(options)
        self.handler.make_id = self.make_id
        self.fail_handler: Handler | None = None
        self.request_template = functools.partial(
            RequestTemplate,
            name,
            arguments=self.arguments,
            update=None if singleton is None else Update(),
            defaults=defaults,
            at_most_once=config.policy.at_most_once,
            result_ttl_ms=config.policy.result_ttl_ms,
        )
        """Makes the template of requests with the given options."""

    def add_fail_handler(self, options: HandlerOptions, function: F) -> F:
        check_names(f"on_failure of {self.name}", HandlerOptions, options)
        if self.stub:
            raise OptionError(f"{self.name} is a stub: register on_failure in the program that has the function")
        if self.fail_handler is not None:
            raise OptionError(f"{self.name} already has a fail handler: register only one")
        queue, codecs = self.name + FAILED_SUFFIX, self.session.codecs
        arguments = Arguments(queue, function)
        if len(arguments.signature.parameters) != 1:
            raise OptionError(f"the fail handler of {self.name} must have one parameter, a Failure")
        config = queue_config(queue, HandlerOptions, options)
        self.fail_handler = Handler(config, arguments, codecs, codecs.default.name)
        self.fail_handler.rules = retry_rules(options)
        self.fail_handler.fails_for = self.arguments
        config = self.handler.config
        self.handler.config = replace(config, policy=replace(config.policy, follows_up=True))
        return function


def queue_config(queue: str, place: type[Any], options: Mapping[str, Any]) -> QueueConfig:
    """Return how the jobs of a queue are run: the options, and the defaults of the TypedDict `place` for the others."""
    fields = all_fields(place, options)
    shortest, longest = fields["min_backoff_ms"], fields["max_backoff_ms"]
    if shortest > longest:
        if "min_backoff" in options and "max_backoff" in options:
            raise OptionError(f"max_backoff ({longest / 1000:g} s) is less than min_backoff ({shortest / 1000:g} s)")
        given = shortest if "min_backoff" in options else longest  # The default of the other one does not fit.
        fields.update(min_backoff_ms=given, max_backoff_ms=given)
    at_most_once = fields["delivery"] == "at_most_once"
    exclusive = fields["singleton"] is not None
    on_storage_loss = fields["on_storage_loss"] or ("kill" if exclusive else "hold")
    fields.update(at_most_once=at_most_once, exclusive=exclusive, dies_with_storage=on_storage_loss == "kill")
    fields["delays_ms"] = () if fields["backoff"] is None or callable(fields["backoff"]) else fields["backoff"]
    policy = Policy(**{name: fields[name] for name in Policy.__struct_fields__ if name in fields})
    limits = {name: fields[name] for name in QueueConfig.__struct_fields__ if name in fields}
    return QueueConfig(queue=queue, policy=policy, **limits)


def retry_rules(options: Mapping[str, Any]) -> RetryRules:
    """Return what the options of a task or a fail handler say about exceptions."""
    fields = all_fields(HandlerOptions, options)
    function: Any = fields["backoff"] if callable(fields["backoff"]) else None
    return RetryRules(fields["retry_on"], fields["no_retry_on"] or (), function)
