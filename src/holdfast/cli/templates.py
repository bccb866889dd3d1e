"""The ids of `unique` and `singleton` tasks for commands that enqueue: from the code, or from a note of a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import msgspec

from holdfast._client.app import Holdfast
from holdfast._client.settings import find_settings
from holdfast._core.tasks import IdRule, TaskNote, id_from_note
from holdfast._worker.app_loader import app_parts, import_app
from holdfast._worker.notes import TASK_NOTE
from holdfast.cli.common import look_here
from holdfast.errors import OptionError

LOOK_S = 0.2
"""Interval at which a command looks whether a worker has started."""


def template_options(command: Any) -> Any:
    """Add the options of `identify` to a command."""
    target = click.option(
        "--app",
        "target",
        metavar="MODULE:APP",
        help="App of the task, for its unique or singleton id.  [default: app in [tool.holdfast], else as workers say]",
    )
    plain = click.option("--no-template", is_flag=True, help="Give the job a new id, whatever ids its task has.")
    return target(plain(command))


async def identify(
    app: Holdfast[None], queue: str, payload: object, target: str | None, *, patience_s: float
) -> dict[str, Any]:
    """Return the options that the task adds to a request: its id, and on_conflict. Raises OptionError if no code and no
    worker has said within `patience_s` whether the task has `unique` or `singleton`."""
    named = app.queue(queue)
    target = target or find_settings().app
    if target is not None:
        look_here()
        handlers = {handler.queue: handler for handler in app_parts(import_app(target, Holdfast)).handlers}
        if queue in handlers:
            handler = handlers[queue]
            data, codec = handler.codecs.encode_any(f"the payload for {queue}", payload)
            note = msgspec.json.decode(handler.config.note or '{"rule": "none"}', type=TaskNote)
            return _options(note.rule, handler.id_of(codec, data))
    give_up_at = asyncio.get_running_loop().time() + patience_s
    while True:
        (stored,) = await app.storage.read_notes([TASK_NOTE + queue])
        if stored is not None:
            note = msgspec.json.decode(stored, type=TaskNote)
            return _options(note.rule, id_from_note(queue, note, payload))
        if (await named.stats()).totals.get("claimed"):
            return {}
        if asyncio.get_running_loop().time() >= give_up_at:
            raise OptionError(
                f"no worker has served {queue}, so it is not known whether its task has unique or singleton ids: start"
                " a worker first, or pass --app MODULE:APP, --id, or --no-template for a new id"
            )
        await asyncio.sleep(LOOK_S)


def _options(rule: IdRule, id: str | None) -> dict[str, Any]:
    if id is None:
        return {}
    return {"id": id, "on_conflict": "update"} if rule == "singleton" else {"id": id}
