"""A site for `gunicorn --preload`: its app is made and used before gunicorn forks its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.worker.scene import make_app, note

app = make_app()
note("acknowledged", job=app.sync.queue("q").enqueue({}, id="at-import").id)


def site(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    handle = app.sync.queue("q").enqueue({}, id=environ["PATH_INFO"].strip("/"))
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(handle.placed).encode()]
