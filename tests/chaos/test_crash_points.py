"""A crash, a cancel, a stop and a broken connection at every await of the package: nothing is lost, nothing runs for
no reason, no caller waits for ever, nothing is left behind.

The points are made by points.py, the programs are in point_jobs.py, point_stage.py forks and judges. What happens:

- `crash`: the process is killed on the spot;
- `cancel`: the task there is cancelled, if that is one which a program or a worker cancels, else all tasks are, as at a
  program's end;
- `late`: a cancel comes in the same moment as the answer that is awaited, and the answer is lost;
- `stop`: who runs the program, or the worker, is cancelled;
- `cut`: the connections to the server break, and replies to what was sent are lost; SQLite cannot commit once.

Then a healthy process finishes what is left, on a clock that is past all leases, and everything is judged: see `judge`.

All of them take minutes: `HOLDFAST_POINTS=all`. The default run has one of each point, with storage, side and action in
turn, and all that are `late`. `HOLDFAST_POINTS=CASE` runs one case alone, by the name that its failure has, such as
`HOLDFAST_POINTS=valkey:work:_worker.settler.Settler._send#2:after:crash:1`: storage, program, point, side, action, and
at which of the times that the point is reached.
"""

from __future__ import annotations

import dis
import fnmatch
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType

import msgspec
import pytest

from tests import servers
from tests.chaos import points
from tests.chaos.point_stage import Case, CaseVerdict, Order, Place, Verdict
from tests.chaos.points import Action
from tests.storage import keyspace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cases are forks, and cut what /proc shows them")

ROOT = Path(__file__).parents[2]
STORAGES = ("sqlite", "valkey")
PROGRAMS = ("work", "call", "pull", "cancel", "stop", "stalled", "operate", "troubled", "fleet")
"""The cheap ones first: a point is tried in the first program that reaches it."""
ACTIONS: tuple[Action, ...] = ("crash", "cancel", "late", "stop", "cut")
AT_ONCE = 4
"""Cases in work at a time: most of one is waiting."""
ASKED = os.environ.get("HOLDFAST_POINTS", "")
MANY_HITS = (1, 2, 5)
"""Which of the times a point is reached, when all are run."""

UNREACHED = {
    "_client.session.Session.*_for_blocking_calls#*": "blocking calls open another storage: tests/app/test_sync.py",
    "_client.request.call#[12]": "calls in an eager rehearsal: tests/app/test_eager.py",
    "_worker.claimer.Claimer._listen#3": "the storage breaks in the moment of a subscription",
    "_worker.notes.ask_for_stack#*": "a command asks for a stack and changes no job",
    "_worker.signals.*": "signals to `holdfast worker`: tests/worker",
    "_worker.source_watch.*": "source files change: tests/unit/test_source_watch.py",
    "_worker.telemetry.HookDispatcher.call#2": "hooks on threads are for child processes",
    "_worker.processes.pool.Pool.open#3": "the app does not load: there is no job yet",
    "_worker.processes.pool.Pool.reload#1": "a signal to `holdfast worker` loads the code again",
    "_worker.processes.pool.Pool._roll#*": "the same",
    "_worker.processes.os_process.Process.kill_and_wait#3": "a child left its own processes behind",
    "storage.base.Storage.[a-z]*#1": "opens a lazy storage, which only child processes have",
    "storage.base.Storage.__aexit__#[23]*": "the same",
    "storage.base.Storage._ensure_open#*": "the same",
    "storage.local.engine.LocalStorage._ready#2": "a queue in which nothing happens for a minute",
    "storage.base.audit#2": "an audit of more than a page",
    "storage.local.sqlite.SqliteStorage._open#2": "the file cannot be opened: there is no job yet",
    "storage.redis.server_info.describe#3": "a server that writes a log",
    "storage.redis.server_info._setting#1": "the same",
    "storage.redis.RedisStorage._open#3": "a server that is refused: there is no job yet",
    "storage.redis.RedisStorage._claim#[34]": "a claim that got no answer within its time: tests/redis/test_trouble.py",
    "storage.redis.RedisStorage._read_claim#1": "a record that cannot be read",
    "storage.redis.raw.ConnectOptions.credentials#1": "a credential provider: tests/redis/test_login.py",
    "storage.redis.raw.open_connection#2": "a unix socket: tests/redis/test_login.py",
    "storage.redis.topology.ask_first#*": "sentinels and clusters: tests/redis/test_sentinel.py, test_cluster.py",
    "storage.redis.topology.SentinelServers.*": "sentinels: tests/redis/test_sentinel.py",
    "storage.redis.topology.ClusterServers.*": "a cluster: tests/redis/test_cluster.py",
    "storage.redis.RedisStorage._ready#1": "a cluster",
    "storage.redis.calls.Calls._routed#[23]": "a cluster",
    "storage.redis.calls._call_importing#*": "a cluster",
    "storage.redis.calls.Calls._wait_to_retry#*": "a cluster",
    "storage.redis.notify.PubSubListener._find_and_open#1": "a cluster",
    "storage.redis.RedisStorage._list#1": "a cluster",
    "storage.redis.RedisStorage._drop#[234]": "what follows a drop in a cluster",
}
"""Points that no program reaches without a fault, or none reaches for sure, and why."""


ONCE_BROKEN = (
    "sqlite:work:storage.local.sqlite.SqliteStorage._close_file#1:before:cancel:1",
    "sqlite:work:storage.local.sqlite.SqliteStorage._close_file#1:after:cancel:1",
    "valkey:operate:storage.redis.RedisStorage._call_and_list#3:before:crash:1",
)
"""Cases that left something behind: a thread; a queue that was on no list."""


# The points themselves


def awaits_in(code: CodeType) -> set[tuple[object, ...]]:
    """Where the compiler put an await, which the source may not show. What it wrote twice counts once."""
    found: set[tuple[object, ...]] = set()
    for step in dis.get_instructions(code):
        if step.opname in ("GET_AWAITABLE", "GET_ANEXT"):
            found.add((step.opname, step.arg, step.positions))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= awaits_in(constant)
    return found


@pytest.mark.parametrize("module", points.modules())
def test_every_await_has_its_own_crash_point(module: str) -> None:
    path = points.modules()[module]
    _, names = points.rewrite(module, path.read_bytes(), str(path))
    assert len(names) == len(set(names))
    assert len(names) == len(awaits_in(compile(path.read_bytes(), path, "exec")))


def test_every_excluded_module_and_point_exists() -> None:
    root = next(iter(points.modules().values())).parent
    for name in points.OFF_PATH:
        path = root.joinpath(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), name
    for pattern in UNREACHED:
        assert any(fits(name, pattern) for name in points.names()), f"no point is named like {pattern}"


def fits(point: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(point, pattern)


# Running cases


class Theatre:
    """Runs cases in a process of their own."""

    def __init__(self, folder: Path) -> None:
        server = servers.shared("valkey")
        assert server is not None
        self._server = server
        self._folder = folder

    def play(self, cases: Sequence[Case]) -> list[Verdict]:
        orders = [Order(number, case, self._place(case)) for number, case in enumerate(cases)]
        stage = subprocess.run(
            [sys.executable, "-m", "tests.chaos.point_stage", str(AT_ONCE)],
            input=b"".join(msgspec.json.encode(order) + b"\n" for order in orders),
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        answers = [msgspec.json.decode(line, type=CaseVerdict) for line in stage.stdout.splitlines()]
        assert stage.returncode == 0, stage.stderr.decode()[-5000:]
        verdicts = {one.number: one.verdict for one in answers}
        for order in orders:
            if order.case.storage == "valkey":
                verdicts[order.number].problems += keyspace.clear(self._server, order.place.namespace)
        return [verdicts[order.number] for order in orders]

    def _place(self, case: Case) -> Place:
        name = f"point-{uuid.uuid4().hex[:12]}"
        folder = self._folder / name
        url = f"sqlite:///{folder}/jobs.db" if case.storage == "sqlite" else self._server.url
        return Place(url, name, str(folder))


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Theatre:
    return Theatre(tmp_path_factory.mktemp("points"))


class Rehearsal:
    """What every program reaches, on every storage, while nothing happens to it."""

    def __init__(self, theatre: Theatre) -> None:
        cases = [Case(storage, program) for storage in STORAGES for program in PROGRAMS]
        self.verdicts = dict(zip(cases, theatre.play(cases), strict=True))

    @property
    def reached(self) -> set[str]:
        return {key.rpartition(":")[0] for verdict in self.verdicts.values() for key in verdict.reached}

    def cases(self) -> list[Case]:
        """Everything that can happen, once each: in the order of points."""
        where: dict[tuple[str, str], str] = {}
        for case, verdict in self.verdicts.items():
            for key in verdict.reached:
                where.setdefault((key, case.storage), case.program)
        found = [case for (key, storage), program in sorted(where.items()) for case in _all_at(key, storage, program)]
        return sorted(found, key=lambda case: (case.point, ACTIONS.index(case.action), case.side, case.storage))

    def spread(self) -> list[Case]:
        """One for each point, and the few that are late. They take turns, so that storages, sides and actions all have
        their share."""
        by_point: dict[str, list[Case]] = {}
        for case in self.cases():
            if case.action != "late":
                by_point.setdefault(case.point, []).append(case)
        late = [case for case in self.cases() if case.action == "late"]
        return [cases[7 * turn % len(cases)] for turn, cases in enumerate(by_point.values())] + late

    def everything(self) -> Iterator[Case]:
        for case in self.cases():
            hits = self.verdicts[Case(case.storage, case.program)].reached[f"{case.point}:{case.side}"]
            yield from (msgspec.structs.replace(case, hit=hit) for hit in MANY_HITS if hit <= hits)


def _all_at(key: str, storage: str, program: str) -> Iterator[Case]:
    point, _, side = key.rpartition(":")
    for action in ACTIONS:
        if (action == "late") == (side == "during"):
            yield msgspec.convert(
                {"storage": storage, "program": program, "point": point, "side": side, "action": action}, Case
            )


@pytest.fixture(scope="module")
def rehearsal(theatre: Theatre) -> Rehearsal:
    return Rehearsal(theatre)


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[Case]:
    if ASKED not in ("", "all"):
        return [parse(ASKED)]
    rehearsal: Rehearsal = request.getfixturevalue("rehearsal")
    return list(rehearsal.everything()) if ASKED == "all" else rehearsal.spread()


def parse(text: str) -> Case:
    storage, program, point, side, action, hit = text.split(":")
    fields = {"storage": storage, "program": program, "point": point, "side": side, "action": action, "hit": int(hit)}
    return msgspec.convert(fields, Case)


@pytest.fixture(scope="module")
def played(theatre: Theatre, chosen: list[Case]) -> dict[Case, Verdict]:
    return dict(zip(chosen, theatre.play(chosen), strict=True))


def complaints(played: Mapping[Case, Verdict]) -> str:
    """Every case that went wrong, and how to see it again."""
    text: list[str] = []
    for case, verdict in played.items():
        if verdict.problems:
            what = f"{case.action} {case.side} {case.point}" if case.point else "no fault"
            text.append(f"{what} ({case.program} on {case.storage}):")
            text += [f"  {line}" for problem in verdict.problems for line in problem.splitlines()]
            alone = f"HOLDFAST_POINTS='{case}' pytest" if case.point else "pytest -k without"
            text.append(f"  alone: {alone} {Path(__file__).relative_to(ROOT)}\n")
    return "\n".join(text)


# What must be so


@pytest.mark.timeout(300)
def test_programs_work_without_a_fault(rehearsal: Rehearsal) -> None:
    assert not (text := complaints(rehearsal.verdicts)), text


def test_every_crash_point_is_reached(rehearsal: Rehearsal) -> None:
    missing = [name for name in points.names() if name not in rehearsal.reached]
    assert [name for name in missing if not any(fits(name, pattern) for pattern in UNREACHED)] == [], missing


@pytest.mark.suite("slow")
@pytest.mark.timeout(3600 if ASKED == "all" else 300)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("storage", STORAGES)
def test_jobs_survive_a_fault_at_every_crash_point(played: dict[Case, Verdict], storage: str, action: Action) -> None:
    here = {case: verdict for case, verdict in played.items() if (case.storage, case.action) == (storage, action)}
    assert not (text := complaints(here)), text
    unmet = [str(case) for case, verdict in here.items() if not verdict.fired]
    assert len(unmet) <= len(here) / 10, f"points that were reached before, and not this time: {unmet}"


@pytest.mark.parametrize("case", ONCE_BROKEN)
def test_crash_point_that_failed_before_stays_fixed(theatre: Theatre, case: str) -> None:
    (verdict,) = theatre.play([parse(case)])
    assert verdict.fired
    assert verdict.problems == []
