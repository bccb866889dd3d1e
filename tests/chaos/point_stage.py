"""The process that runs the programs of point_jobs.py with their faults. It reads cases and writes verdicts, as lines.

Everything is imported once, with its points; there is no event loop and no thread. Each case is a fork, which forks the
victim, waits for its end, and then finishes the work as a healthy process and checks it. A case costs two forks instead
of two starts of Python.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import io
import logging
import os
import select
import shutil
import signal
import sqlite3
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, cast

import msgspec

from tests.chaos import points
from tests.chaos.points import Action, Plan, Side

SHORTER: dict[str, dict[str, Any]] = {
    "_core.events": {"POLL_INTERVAL_S": 0.1},
    "_worker.settler": {"TRY_AGAIN_S": (0.02, 0.5), "GIVE_UP_S": 1.0},
    "_client.waiters": {"ASK_AGAIN_S": 0.1},
    "storage.redis.notify": {"QUIET_S": 0.2},
}
"""Shorter pauses: nothing happens during them."""
BEGIN_S = 1_800_000_000.0
"""The constant time of the victim's clock."""
LATER_S = 1_000.0
"""How much later the clock of the healthy process is."""
VICTIM_S = 12.0
HEALER_S = 20.0
"""A process that takes longer hangs."""
SETTLE_S = 1.0
"""How long open tasks may take to end after the program."""


class Case(msgspec.Struct, frozen=True):
    """A program on a storage, and the fault at a point. Without a point, the run reports the points that it reaches."""

    storage: str
    program: str
    point: str = ""
    side: Side = "before"
    action: Action = "crash"
    hit: int = 1

    def __str__(self) -> str:
        return f"{self.storage}:{self.program}:{self.point}:{self.side}:{self.action}:{self.hit}"

    @property
    def extra(self) -> int:
        """How often a job may be started once more than usual. A cut costs no run: nothing is lost by it."""
        stops = 2 * (self.program == "stop")  # It stops two workers while jobs run.
        return stops + (bool(self.point) and self.action != "cut")

    @property
    def crashes(self) -> bool:
        return bool(self.point) and self.action == "crash"

    @property
    def orderly(self) -> bool:
        """Does the victim come to an end that it could prepare for? Not if it is stopped for the third time."""
        return not self.point or self.action == "cut" or (self.action == "stop" and self.program != "stop")


class Place(msgspec.Struct, frozen=True):
    """Where a case has its jobs, and room for its files."""

    url: str
    namespace: str
    folder: str


class Verdict(msgspec.Struct):
    """What came of a case."""

    fired: bool = False
    problems: list[str] = []
    raised: list[str] = []
    reached: dict[str, int] = {}
    """How often each point was reached, by `point:side`."""


class Order(msgspec.Struct, frozen=True):
    number: int
    case: Case
    place: Place


class CaseVerdict(msgspec.Struct):
    number: int
    verdict: Verdict


# The victim

OWN = {("handler.py", "perform"), ("point_stage.py", "_run"), ("point_jobs.py", "_take_all")}
"""Coroutines whose tasks are cancelled alone. No others are."""


class Breakable(sqlite3.Connection):
    """A connection whose next commits fail, if that was asked for: nothing is changed by them then."""

    broken = 0

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if Breakable.broken and sql == "COMMIT":
            Breakable.broken -= 1
            super().execute("ROLLBACK")
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return super().execute(sql, *args)


class Victim:
    """A process that runs one program, while something happens to it."""

    def __init__(self, order: Order) -> None:
        self._case, self._place = order.case, order.place
        self.verdict = Verdict()
        self._log = io.StringIO()

    def live(self) -> None:
        logging.basicConfig(stream=self._log, level=logging.ERROR, force=True)
        points.points.fire = self._fire
        if self._case.point:
            case = self._case
            points.points.plan = Plan(case.point, case.side, case.action, case.hit)
        asyncio.run(self._main())
        self.verdict.fired = points.points.fired
        self.verdict.reached = {f"{point}:{side}": hits for (point, side), hits in points.points.reached.items()}

    def _fire(self, plan: Plan) -> None:
        if plan.action == "stop":
            self._program.stopping = True
            self._loop.call_soon_threadsafe(self._task.cancel)
        elif plan.action == "cut":
            self._break(1)
        elif plan.action == "cancel":
            self._cancel(asyncio.current_task())
        else:
            points.do(plan)

    def _cancel(self, task: asyncio.Task[Any] | None) -> None:
        """A program cancels what is its own; a worker, its runs. Tasks that no other part knows are cancelled with all
        others, as at the end of a program."""
        code = getattr(task.get_coro(), "cr_code", None) if task is not None else None
        if task is not None and code is not None and (Path(code.co_filename).name, code.co_name) in OWN:
            task.cancel()
            return
        self._program.stopping = True
        self._loop.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            if task is not self._main_task:
                task.cancel()

    def _break(self, times: int) -> None:
        """SQLite refuses a number of commits; a connection to a server breaks once."""
        if self._case.storage == "sqlite":
            Breakable.broken = times
        elif times:
            points.cut_sockets(int(self._place.url.rpartition(":")[2]))

    async def _main(self) -> None:
        from tests.chaos import point_jobs

        self._main_task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._complain)
        self._program = (
            fleet_program(self._place) if self._case.program == "fleet" else make_program(self._place, BEGIN_S)
        )
        self._program.notes.break_storage = self._break
        self._task = asyncio.create_task(_run(point_jobs.PROGRAMS[self._case.program], self._program))
        await asyncio.wait([self._task], timeout=VICTIM_S)
        if not self._task.done():
            self.verdict.problems.append(f"the program hangs:\n{_stacks()}")
            return
        self._note_end()
        await self._look_for_leftovers()
        self.verdict.raised += self._program.raised

    def _note_end(self) -> None:
        """A program may be ended by what happened to it, but only by that."""
        if self._task.cancelled():
            self.verdict.raised.append("it was cancelled")
            if self._case.action not in ("cancel", "late", "stop"):
                self.verdict.problems.append("the program was cancelled without a reason")
            return
        error = self._task.exception()
        if error is None:
            return
        self.verdict.raised.append(f"it raised {error!r}")
        if not _is_expected(error, self._case):
            text = "".join(traceback.format_exception(error))
            self.verdict.problems.append(f"the program ended with {error!r}\n{text}\n{self._log.getvalue()[-3000:]}")

    async def _look_for_leftovers(self) -> None:
        left = _leftovers()
        for _ in range(round(SETTLE_S / 0.01)):
            if not left:
                break
            await asyncio.sleep(0.01)
            left = _leftovers()
        self.verdict.problems += [f"left behind: {what}" for what in left]
        gc.collect()

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = "" if error is None else "".join(traceback.format_exception(error))
        self.verdict.problems.append(f"not handled: {context['message']}\n{text}")


async def _run(program: Any, of: Any) -> None:
    await program(of)


def _is_expected(error: BaseException, case: Case) -> bool:
    from holdfast import HoldfastError

    if isinstance(error, BaseExceptionGroup):
        parts = cast("tuple[BaseException, ...]", cast("Any", error).exceptions)
        return all(_is_expected(part, case) for part in parts)
    if isinstance(error, HoldfastError):
        return bool(case.point)
    return isinstance(error, asyncio.CancelledError) and case.action in ("cancel", "late", "stop")


def _leftovers() -> list[str]:
    tasks = [repr(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]
    return tasks + [f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("holdfast")]


def _stacks() -> str:
    """Where every task of this loop is."""
    text = io.StringIO()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.print_stack(file=text)
    return text.getvalue()


def fleet_program(place: Place) -> Any:
    """Its children cannot share a clock that is moved: it has the real one."""
    names = ("HOLDFAST_POINT_URL", "HOLDFAST_POINT_NAMESPACE", "HOLDFAST_POINT_NOTES")
    os.environ.update(zip(names, (place.url, place.namespace, f"{place.folder}/notes"), strict=True))
    from tests.chaos import point_fleet

    return point_fleet.program


def make_program(place: Place, now: float) -> Any:
    from holdfast._core.clock import ManualClock
    from tests.chaos.point_jobs import Notes, Program

    notes = Notes(Path(place.folder, "notes"))
    return Program.at(place.url, place.namespace, ManualClock(now), notes)


# The healer, and judge


def run_case(order: Order) -> Verdict:
    """In its own process, without threads: it forks the victim."""
    Path(order.place.folder).mkdir(parents=True)
    verdict = _victimise(order)
    try:
        verdict.problems += asyncio.run(_heal_and_judge(order))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        verdict.problems.append(f"what was left cannot be finished: {text}")
    if not verdict.problems:
        shutil.rmtree(order.place.folder, ignore_errors=True)  # A child of the victim may still be at it.
    return verdict


def _victimise(order: Order) -> Verdict:
    file = Path(order.place.folder, "verdict")
    pid = os.fork()
    if pid == 0:
        try:
            victim = Victim(order)
            victim.live()
            file.write_bytes(msgspec.json.encode(victim.verdict))
            os._exit(0)
        except BaseException:
            file.write_bytes(msgspec.json.encode(Verdict(problems=[f"the victim broke: {traceback.format_exc()}"])))
            os._exit(1)
    status = _reap(pid, VICTIM_S + 5)
    if status is None:
        return Verdict(problems=["the victim hangs, and not in its event loop"])
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return Verdict(fired=True)
    if not file.exists():
        return Verdict(problems=[f"the victim ended with status {status}"])
    return msgspec.json.decode(file.read_bytes(), type=Verdict)


def _reap(pid: int, seconds: float) -> int | None:
    """The status of a process; None if it had to be killed."""
    end = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([end], [], [], seconds)
    finally:
        os.close(end)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return status if ready else None


async def _heal_and_judge(order: Order) -> list[str]:
    from tests.chaos import point_jobs

    began = time.time() if order.case.program == "fleet" else BEGIN_S
    program = make_program(order.place, began + LATER_S)
    clock: Any = program.clock
    async with asyncio.timeout(HEALER_S):
        await point_jobs.heal(program, clock.advance)
        case = order.case
        return await point_jobs.judge(program, case.extra, orderly=case.orderly, crashed=case.crashes)


# The stage


def serve(at_once: int) -> None:
    """Take orders from standard input until it ends, and work on a number of them at a time."""
    orders = [msgspec.json.decode(line, type=Order) for line in sys.stdin]
    orders.reverse()
    going: dict[int, tuple[int, int]] = {}
    while orders or going:
        while orders and len(going) < at_once:
            order = orders.pop()
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                _be_a_case(order, writing)
            os.close(writing)
            going[reading] = (pid, order.number)
        ready, _, _ = select.select(list(going), [], [])
        for reading in ready:
            pid, number = going.pop(reading)
            _tell(reading, pid, number)


def _be_a_case(order: Order, writing: int) -> None:
    logging.disable(logging.CRITICAL)
    try:
        verdict = run_case(order)
    except BaseException:
        verdict = Verdict(problems=[f"the case broke: {traceback.format_exc()}"])
    with os.fdopen(writing, "wb") as end:
        end.write(msgspec.json.encode(verdict))
    os._exit(0)


def _tell(reading: int, pid: int, number: int) -> None:
    with os.fdopen(reading, "rb") as end:
        data = end.read()
    os.waitpid(pid, 0)
    verdict = msgspec.json.decode(data, type=Verdict) if data else Verdict(problems=["the case ended without a word"])
    sys.stdout.buffer.write(msgspec.json.encode(CaseVerdict(number, verdict)) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    points.install(SHORTER)
    sqlite3.connect = functools.partial(sqlite3.connect, factory=Breakable)  # type: ignore[assignment]
    for name in ("holdfast.storage.redis", "holdfast.storage.local.sqlite", "tests.chaos.point_jobs"):
        importlib.import_module(name)

    gc.collect()
    gc.freeze()
    serve(int(sys.argv[1]))


if __name__ == "__main__":
    main()
