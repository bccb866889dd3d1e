"""Names that other job queues use: an access raises an AttributeError that gives the name in Holdfast.

The classes define `__getattr__` only at run time. Type checkers do not see it, so they report every unknown name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_ENQUEUE = "use enqueue(…), or enqueue_many of the app for many requests"
_OPTIONS = "use using(delay=…, …).enqueue(…)"
_SCHEDULE = "there are no schedules: let the task enqueue its next run with using(delay=…), see examples/periodic.py"
_HANDLE = "use result(wait=…)"

OF_A_TASK = {
    **dict.fromkeys(("delay", "send", "submit", "kiq", "defer", "push", "enqueue_job", "queue"), _ENQUEUE),
    **dict.fromkeys(("apply_async", "send_with_options", "enqueue_in", "enqueue_at", "configure"), _OPTIONS),
    **dict.fromkeys(("apply", "call_local", "fn"), "call the task itself, task(…), to run the function here"),
    **dict.fromkeys(("s", "si", "signature", "message"), "use bind(…)"),
    **dict.fromkeys(("map", "starmap", "chunks"), "use app.enqueue_many(task.bind(…) for …)"),
    **dict.fromkeys(("retry",), "raise Retry(…) in the handler, or use app.queue(task.name).retry(id)"),
}
OF_AN_APP = {
    **dict.fromkeys(("periodic_task", "cron", "periodic", "schedule", "add_periodic_task", "scheduled_job"), _SCHEDULE),
    **dict.fromkeys(("actor", "job", "shared_task", "register", "function"), "use @app.task"),
    **dict.fromkeys(("send_task", "enqueue", "send"), "use task.enqueue(…) or app.queue(name).enqueue(…)"),
    **dict.fromkeys(("get_queue", "Queue"), "use app.queue(name)"),
    **dict.fromkeys(("AsyncResult", "get_result"), "use task.handle(id) or app.queue(name).get(id)"),
    **dict.fromkeys(("run", "start", "work", "worker_main"), "use app.run_worker(), or the command holdfast worker"),
    **dict.fromkeys(("connect", "close", "open"), "use async with app; of app.sync, which opens itself, use close()"),
}
OF_A_QUEUE = {
    **dict.fromkeys(("put", "push", "add", "send", "submit", "dispatch", "enqueue_job"), "use enqueue(payload)"),
    **dict.fromkeys(("pop", "dequeue", "receive", "reserve", "get_nowait"), "use lease(wait=…) or leased(wait=…)"),
    **dict.fromkeys(("empty", "clear", "flush"), "use purge()"),
    **dict.fromkeys(("count", "size", "qsize", "length"), "use stats()"),
}
OF_A_HANDLE = {
    **dict.fromkeys(("get", "wait", "join", "return_value", "value"), _HANDLE),
    **dict.fromkeys(("ready", "done", "status", "get_status", "successful", "is_finished"), "use state()"),
    **dict.fromkeys(("revoke", "abort"), "use cancel()"),
    **dict.fromkeys(("task_id", "job_id", "message_id"), "use id"),
}


def answer(what: str, words: Mapping[str, str]) -> Callable[[Any, str], NoReturn]:
    """Return a `__getattr__` that gives the name in Holdfast for these words. `what` names the object, with an
    article."""

    def missing(self: object, name: str) -> NoReturn:
        hint = f": {words[name]}" if name in words else ""
        raise AttributeError(f"{what} has no attribute {name!r}{hint}", name=name, obj=self)

    return missing
