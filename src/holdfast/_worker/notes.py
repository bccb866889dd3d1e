"""Notes by which workers and commands exchange facts: about a task, a question for a stack, and the answer to it."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

import msgspec

from holdfast.storage import Storage

TASK_MS, QUESTION_MS, ANSWER_MS = 365 * 86_400_000, 30_000, 60_000
"""How long the notes are kept. Workers write those of their tasks at each start and reload."""
TASK_NOTE = "task:"
"""Before the name of a queue, the name of the note about its task: a `TaskNote`."""
LOOK_S = 0.2
"""Interval at which a caller looks for the answer."""


class StackQuestion(msgspec.Struct, frozen=True):
    """Asks a worker for the stack of a run. The fence identifies the run in its queue."""

    queue: str
    fence: int
    answer_to: str
    """Name of the note for the answer."""


def question_for(worker: str) -> str:
    """Name of the note with the question to a worker. A new question replaces one that is not answered yet."""
    return f"ask:{worker.encode('unicode_escape').decode()}"[:250]


def read_question(note: bytes) -> StackQuestion | None:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(note, type=StackQuestion)
    return None  # It is of another release.


async def ask_for_stack(storage: Storage, worker: str, queue: str, fence: int, *, wait_s: float) -> str | None:
    """Return the stack of a run; empty if the worker does not execute it. None if the worker does not answer."""
    question = StackQuestion(queue, fence, f"answer:{secrets.token_hex(8)}")
    await storage.write_notes({question_for(worker): msgspec.json.encode(question)}, ttl_ms=QUESTION_MS)
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while True:
                (answer,) = await storage.read_notes([question.answer_to])
                if answer is not None:
                    return answer.decode()
                await asyncio.sleep(LOOK_S)
    return None
