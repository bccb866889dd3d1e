"""Planted bugs: breaks the package in known ways, one at a time, and checks that a test fails.

    python tools/plant.py [NAME...]

Each bug is an edit of a Lua or Python file, made in a copy of the tree, with the tests that should catch it. Tests of
storages run on Valkey. Names that begin with F- are flaws of earlier queue systems. The run fails if a bug survives, if
an edit no longer applies, or if a test fails without any bug.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = "src/holdfast"
LIMIT_S, BASELINE_LIMIT_S = 120, 900
"""How long the tests of one bug may take, and all tests without a bug."""
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "--timeout",
    "30",
    "--storage",
    "valkey",
)

CALLS = "test_redis_calls"
LINES = "test_redis_lines"
RETENTION, BRIEF, RETRY_POLICY = "test_retention", "test_brief", "unit/test_retry_policy"
LEASES, UPDATES, ORDER, REMEMBERING = "test_leases", "test_updates", "test_order", "test_remembering"
WORK_QUEUE, TRANSITIONS, CLOCK, WAITERS = "test_seeds_work_queue", "test_transitions", "test_clock", "test_waiters"
CRASHES, LOCALE, HALF_STEPS = "redis/test_crashes", "redis/test_locale", "redis/test_half_steps"
TROUBLE, NOTIFY, ARGUMENTS = "redis/test_trouble::test_", "redis/test_notify::test_", "test_redis_arguments"


class Bug(NamedTuple):
    """One edit of a file, what it breaks, and the test files that should fail: of tests/storage unless a name has a
    folder. A name with `::` is one test."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


HOLDS = "return job and job.run and job.run.fence == fence and job.run.worker == worker"
RESEND = "        for command in self._pending:\n            self._write(command, raw)\n"

BUGS = [
    # Flaws of earlier queue systems
    Bug(
        "F-Q1",
        "an update of a running job makes it due again: two runs overlap",
        "storage/redis/lua/lifecycle.lua",
        "  if job.run then return update_running(job, request, time, at) end\n",
        "  if job.run then job.run, job.changed = nil, true end\n",
        (UPDATES,),
    ),
    Bug(
        "F-Q2",
        "a deferred request never becomes due if its update does not change run_at",
        "storage/redis/lua/lifecycle.lua",
        "following.generation, following, following, previous)\n",
        "following.generation, following, following, previous)\n"
        "    if following.takes_run_at ~= TAKES then promoted.run_at = 8e15 end\n",
        (UPDATES,),
    ),
    Bug(
        "F-Q3",
        "every sweep raises once a lease has no record",
        "storage/redis/lua/leases.lua",
        "    if not entry.job or not entry.job.run or entry.job.outcome then\n",
        "    if false then\n",
        (LINES,),
    ),
    Bug(
        "F-Q8",
        "any worker can settle any lease",
        "storage/redis/lua/lifecycle.lua",
        HOLDS,
        "return job and job.run",
        (LEASES,),
    ),
    Bug(
        "F-Q9",
        "the next heartbeat of a worker deletes the request to evict it",
        "storage/redis/lua/workers.lua",
        "    if expires_at > WALL then evict = asked end",
        "    if expires_at > WALL then evict = 0 end",
        ("test_order", "test_refusals"),
    ),
    Bug(
        "F-Q10",
        "jobs with the same run_at are ordered by id instead of arrival",
        "storage/redis/lua/transaction.lua",
        "pack('>I8', job.arrival) .. job.id",
        "pack('>I8', 0) .. job.id",
        (ORDER,),
    ),
    Bug(
        "F-Q16",
        "the client's clock decides when leases expire",
        "storage/redis/__init__.py",
        "Calls(self._servers, self._client, self._clock, self._timeout_s)",
        "Calls(self._servers, self._client, __import__('holdfast')._core.clock.SystemClock(), self._timeout_s)",
        (CALLS,),
    ),
    Bug(
        "F-P2",
        "an empty result is stored as no result",
        "storage/redis/codec.py",
        "numbers = (1, item.fence, item.result_ttl_ms, item.dedup_ttl_ms, body is not None, int(item.brief))",
        "numbers = (1, item.fence, item.result_ttl_ms, item.dedup_ttl_ms, bool(body), int(item.brief))",
        ("test_seeds_platformatic", REMEMBERING, TRANSITIONS),
    ),
    Bug(
        "F-P2 b",
        "an outcome without a result counts as missing",
        "storage/redis/__init__.py",
        "            if 0 <= index < len(enqueued) and outcome:\n",
        "            if 0 <= index < len(enqueued) and outcome and codec.decode_outcome(outcome).result is not None:\n",
        ("test_seeds_platformatic", REMEMBERING),
    ),
    Bug(
        "F-P3",
        "the time to live of one result expires all records of the queue",
        "storage/redis/lua/verbs.lua",
        "        record_change(tx, entry, after, kind, then_kind, outcome)\n        replies[at] = '1'\n",
        "        record_change(tx, entry, after, kind, then_kind, outcome)\n        replies[at] = '1'\n"
        "        call('PEXPIRE', QUEUE .. ':jobs', (settlement.result_ttl_ms or 60000) + 1)\n",
        (REMEMBERING,),
    ),
    Bug(
        "F-P6",
        "a claim removes the job from its index and writes no lease",
        "storage/redis/lua/fast.lua",
        "  append(list_of(writes, 'runs'), id, pack(LEASE, 0, fence, lease_ms, until_at, #worker) .. worker)\n",
        "",
        (LEASES,),
    ),
    Bug(
        "F-P6 b",
        "as above, for a job that was retried",
        "storage/redis/lua/transaction.lua",
        "if job.run and job.run.changed then append",
        "if job.run and job.run.changed and entry.ran then append",
        (LEASES,),
    ),
    Bug(
        "F-P8",
        "ids in events are cut at the first colon",
        "storage/redis/codec.py",
        "        id = clean_id(message[at : at + id_size])\n",
        '        id = clean_id(message[at : at + id_size].split(b":")[0])\n',
        (CALLS, WAITERS),
    ),
    Bug(
        "F-P9",
        "a cancelled job stays in the waiting index and runs beside its successor",
        "storage/redis/lua/transaction.lua",
        "if entry.key and (entry.key ~= key or entry.member ~= member) then",
        "if entry.key and key ~= ':cancelled' and (entry.key ~= key or entry.member ~= member) then",
        (TRANSITIONS, "test_seeds_platformatic"),
    ),
    Bug(
        "F-P13",
        "a worker's earlier lease can settle its later lease",
        "storage/redis/lua/lifecycle.lua",
        HOLDS,
        "return job and job.run and job.run.worker == worker",
        (LEASES,),
    ),
    Bug(
        "F-P14",
        "stalls are not counted: a job that crashes its process runs without end",
        "storage/redis/lua/lifecycle.lua",
        "  job.stalls = job.stalls + 1\n",
        "",
        (LEASES,),
    ),
    Bug(
        "F-P16",
        "when one listener leaves, the others get no events",
        "storage/redis/notify.py",
        "        if self._channels[channel] <= 0:\n",
        "        if True:\n",
        (CALLS,),
    ),
    Bug(
        "F-P16 b",
        "when one waiting worker leaves, the others get no wake tokens",
        "storage/redis/notify.py",
        "        if self._keys[key] <= 0:\n",
        "        if True:\n",
        (CALLS,),
    ),
    Bug(
        "F-P22",
        "an enqueue deletes no expired records: they accumulate",
        "storage/redis/lua/enqueue.lua",
        "  transaction.sweep_forgotten(tx, FORGET_PER_ITEM * #ids)\n",
        "",
        (REMEMBERING, "test_seeds_platformatic_storage", RETENTION),
    ),
    Bug(
        "retention a",
        "an enqueue deletes two expired records, however many it adds: they accumulate under bulk load",
        "storage/redis/lua/enqueue.lua",
        "FORGET_PER_ITEM * #ids",
        "FORGET_PER_ITEM",
        (RETENTION,),
    ),
    Bug(
        "retention b",
        "a settle deletes no expired records: they accumulate beside a busy worker",
        "storage/redis/lua/verbs.lua",
        "  transaction.sweep_forgotten(tx, FORGET_PER_ITEM * #ids, #ids)\n",
        "",
        (RETENTION,),
    ),
    Bug(
        "retention c",
        "the time of the next record to delete is set too late: it is never deleted",
        "storage/redis/lua/transaction.lua",
        "score_at(tx.queue .. index, deleted)",
        "score_at(tx.queue .. index, deleted + 1)",
        (RETENTION, REMEMBERING),
    ),
    Bug(
        "brief a",
        "a queue keeps any number of brief outcomes",
        "storage/redis/lua/transaction.lua",
        "if state == BRIEF and #ids < surplus then",
        "if false then",
        (BRIEF,),
    ),
    Bug(
        "brief b",
        "the oldest brief outcomes are forgotten though a waiter has asked to keep them",
        "storage/redis/lua/lifecycle.lua",
        "  if job.outcome.state == BRIEF then job.outcome.state = COMPLETED end\n",
        "",
        (BRIEF,),
    ),
    Bug(
        "brief c",
        "an outcome that a waiting caller has asked for is brief",
        "storage/redis/lua/lifecycle.lua",
        "not job.keep_ms and job.keep_until_at == 0",
        "not job.keep_ms",
        (BRIEF,),
    ),
    Bug(
        "brief d",
        "the run that ended a job is not among its attempts",
        "storage/redis/lua/record.lua",
        "    if job.outcome.started_at > 0 then job.attempts = job.attempts + 1 end\n",
        "",
        (BRIEF, REMEMBERING, RETENTION),
    ),
    Bug(
        "brief e",
        "all brief outcomes of a call are kept as long as the first one",
        "storage/redis/lua/fast.lua",
        " or sub(head, LENGTHS_AT) ~= form.head then",
        " then",
        (BRIEF,),
    ),
    Bug(
        "brief f",
        "a job that completes behind another one of its call loses the mark of a chosen id",
        "storage/redis/lua/fast.lua",
        "(flags % (2 * CUSTOM_ID) >= CUSTOM_ID and CUSTOM_ID or 0)",
        "0",
        (BRIEF,),
    ),
    Bug(
        "F-P22 b",
        "expired records leave their index but are not deleted",
        "storage/redis/lua/transaction.lua",
        "  if writes.removed then call('HDEL', queue .. ':jobs', unpack(writes.removed)) end\n",
        "",
        (REMEMBERING,),
    ),
    Bug(
        "F-P23",
        "a failed job can be cancelled, which deletes its error",
        "storage/redis/lua/lifecycle.lua",
        "  if job.outcome then return job, 'f' end\n  if not job.run then",
        "  if job.outcome and job.outcome.state ~= FAILED then return job, 'f' end\n  if not job.run then",
        (TRANSITIONS, "test_seeds_platformatic"),
    ),
    Bug(
        "F-M2",
        "a new lease has expired already: the next sweep takes it back",
        "storage/redis/lua/fast.lua",
        "stamp(tx.time), tx.now + 1000 * lease_ms\n",
        "stamp(tx.time), tx.now\n",
        (WORK_QUEUE,),
    ),
    Bug(
        "F-M2 b",
        "as above, for a job that was retried",
        "storage/redis/lua/lifecycle.lua",
        "fence = stamp(time), lease_ms = lease_ms, until_at = ",
        "fence = stamp(time), lease_ms = lease_ms, until_at = 0 * ",
        (LINES,),
    ),
    Bug(
        "F-M3",
        "a new job has a record but no index entry",
        "storage/redis/lua/transaction.lua",
        "    if entry.key ~= key or entry.member ~= member or entry.score ~= score then\n",
        "    if entry.key and (entry.key ~= key or entry.member ~= member or entry.score ~= score) then\n",
        (WORK_QUEUE,),
    ),
    Bug(
        "F-M4",
        "a worker that lost its lease can complete the job while it waits again",
        "storage/redis/lua/lifecycle.lua",
        HOLDS,
        "return job and (not job.run or job.run.fence == fence and job.run.worker == worker)",
        (LEASES, WORK_QUEUE),
    ),
    Bug(
        "F-M5",
        "a job that moves within its index has two entries",
        "storage/redis/lua/transaction.lua",
        "if entry.key and (entry.key ~= key or entry.member ~= member) then",
        "if entry.key and entry.key ~= key then",
        (UPDATES,),
    ),
    Bug(
        "F-M6",
        "an earlier holder can complete the current lease",
        "storage/redis/lua/lifecycle.lua",
        HOLDS,
        "return job and job.run and job.run.fence >= fence",
        (LEASES,),
    ),
    Bug(
        "F-W1",
        "a sweep of one worker takes back the leases of all workers",
        "storage/redis/lua/leases.lua",
        "      if ok and run.worker == worker and #found < limit then",
        "      if ok and #found < limit then",
        (LEASES,),
    ),
    Bug(
        "F-W2",
        "a released job loses its place in the order",
        "storage/redis/lua/lifecycle.lua",
        "  if settlement.kind == RELEASE then ",
        "  if settlement.kind == RELEASE then job.arrival, job.run_at = stamp(time), now ",
        (LEASES,),
    ),
    Bug(
        "F-W6",
        "the id of a cancelled job can never be used again",
        "storage/redis/lua/lifecycle.lua",
        "  if job.outcome then return enqueue_on_finished(job, request, time, at) end\n",
        "  if job.outcome and job.outcome.state == CANCELLED then return job, DUPLICATE, job.generation, 5 end\n"
        "  if job.outcome then return enqueue_on_finished(job, request, time, at) end\n",
        (TRANSITIONS, "test_seeds_worqr"),
    ),
    # Newer options of tasks, deletion
    Bug(
        "expiry a",
        "a job starts after its time is over",
        "_core/retry_policy.py",
        "if until_at is None or fence_of(job) < until_at:",
        "if True:",
        (RETRY_POLICY,),
    ),
    Bug(
        "expiry b",
        "a step back of the clock moves the time after which a job is not started",
        "_core/retry_policy.py",
        "[at + job.skew for at in",
        "[at for at in",
        (RETRY_POLICY,),
    ),
    Bug(
        "remembered failure a",
        "the id of a job that expired without a run cannot be used again",
        "_core/retry_policy.py",
        ' and error.kind != "expired" else 0',
        " else 0",
        (RETRY_POLICY,),
    ),
    Bug(
        "remembered failure b",
        "the id of a remembered failure runs again",
        "storage/redis/lua/lifecycle.lua",
        "  if settlement.dedup_ttl_ms > 0 then outcome.dedup_at",
        "  if false then outcome.dedup_at",
        (UPDATES, REMEMBERING),
    ),
    Bug(
        "remembered failure c",
        "a failure that is kept for longer cannot be run again",
        "storage/redis/lua/lifecycle.lua",
        "(job.outcome.state == COMPLETED or job.outcome.dedup_at > 0) and until_at or 0",
        "until_at",
        (UPDATES, REMEMBERING),
    ),
    Bug(
        "retry rules a",
        "exceptions of no_retry_on are retried",
        "_core/retry_policy.py",
        "        if isinstance(error, self.no_retry_on):\n            return True\n",
        "",
        (RETRY_POLICY,),
    ),
    Bug(
        "retry rules b",
        "exceptions that retry_on does not name are retried",
        "_core/retry_policy.py",
        "is_wrong_call(error) if self.retry_on is None else not isinstance(error, self.retry_on)",
        "is_wrong_call(error)",
        (RETRY_POLICY,),
    ),
    Bug(
        "delays a",
        "after the last delay of a list the first one is used",
        "_core/retry_policy.py",
        "delays[min(count, len(delays) - 1)]",
        "delays[count % len(delays)]",
        (RETRY_POLICY,),
    ),
    Bug(
        "delays b",
        "the delays of a task override those of its request",
        "_core/retry_policy.py",
        "numbers_in(job.work.extension, BACKOFF) or policy.delays_ms",
        "policy.delays_ms or numbers_in(job.work.extension, BACKOFF)",
        (RETRY_POLICY,),
    ),
    Bug(
        "retention d",
        "a call deletes only as many expired records as it adds: a backlog of them never shrinks",
        "storage/redis/lua/keyspace.lua",
        "SWEEP_ON_CLAIM, FORGET_PER_ITEM, MAX_BRIEF = 10, 2,",
        "SWEEP_ON_CLAIM, FORGET_PER_ITEM, MAX_BRIEF = 10, 1,",
        (RETENTION,),
    ),
    Bug(
        "delete a",
        "a queue with running jobs is deleted",
        "storage/redis/lua/verbs.lua",
        "  if left > 0 then return left end\n",
        "",
        (ORDER, TRANSITIONS, BRIEF),
    ),
    Bug(
        "delete b",
        "brief outcomes are not purged: their queue cannot be deleted",
        "storage/redis/lua/verbs.lua",
        "      if state == COMPLETED then indexes[#indexes + 1] = INDEXES[BRIEF] end\n",
        "",
        (BRIEF,),
    ),
    # The protocol of calls
    Bug(
        "number not compared",
        "a call whose reply was lost is made twice",
        "storage/redis/lua/calls.lua",
        "    if number == last then\n",
        "    if false then\n",
        (CALLS, CRASHES),
    ),
    Bug(
        "reply not kept",
        "a call whose reply was lost is made twice: the first reply is not stored",
        "storage/redis/lua/calls.lua",
        "  call('SET', key, pack(NUMBER, number)",
        "  local _ = select('#', key, pack(NUMBER, number)",
        (CALLS, CRASHES),
    ),
    Bug(
        "lower number accepted",
        "a delayed copy of a call is applied after later calls",
        "storage/redis/lua/calls.lua",
        "    if number < last then return {err = 'HOLDFAST_SUPERSEDED'} end\n",
        "",
        (CALLS, CRASHES),
    ),
    Bug(
        "fence of a repeated claim not compared",
        "a repeated claim returns leases that other workers hold by then",
        "storage/redis/lua/verbs.lua",
        "    if raw and run and sub(run, FENCE_AT, LEASE_MS_AT - 1) == fence then\n",
        "    if raw and run then\n",
        (CALLS, CRASHES),
    ),
    Bug(
        "calls are kept for ever",
        "every client leaves keys that never expire",
        "storage/redis/lua/calls.lua",
        ", 'PX', CALL_KEPT_MS)",
        ")",
        (LEASES,),
    ),
    Bug(
        "floors are kept for ever",
        "every deleted queue leaves a key that never expires",
        "storage/redis/lua/verbs.lua",
        ", 'PX', FLOOR_KEPT_MS)",
        ")",
        (REMEMBERING, ORDER, TRANSITIONS, "test_plans", "test_refusals"),
    ),
    Bug(
        "a new number for every attempt",
        "a call whose reply was lost is made twice",
        "storage/redis/connection.py",
        RESEND,
        "        for command in self._pending:\n"
        "            if command.sent_at and command.args[0] == 'FCALL' and command.args[6]:\n"
        "                command.args = (*command.args[:6], int(command.args[6]) + 1000, *command.args[7:])\n"
        "            self._write(command, raw)\n",
        (CRASHES,),
    ),
    Bug(
        "resent in reverse",
        "after a reconnect, calls are sent in the wrong order",
        "storage/redis/connection.py",
        RESEND,
        f"        self._pending = deque(reversed(self._pending))\n{RESEND}",
        (CRASHES,),
    ),
    Bug(
        "not resent",
        "calls in flight are lost when the connection breaks",
        "storage/redis/connection.py",
        RESEND,
        RESEND.replace("self._pending:", "[each for each in self._pending if not each.sent_at]:"),
        (CRASHES,),
    ),
    Bug(
        "library not loaded again",
        "a restarted server refuses all calls",
        "storage/redis/connection.py",
        "            if library is not None and str(reply)",
        "            if library is None and str(reply)",
        (CALLS,),
    ),
    Bug(
        "no allow-oom",
        "no job of a full server can be claimed or settled",
        "storage/redis/script.py",
        ", flags = {'allow-oom'}}",
        "}",
        (CALLS,),
    ),
    Bug(
        "enqueue with allow-oom",
        "a full server accepts jobs beyond its memory limit",
        "storage/redis/script.py",
        "{function_name = NAME .. '_enqueue', callback = calls.run}",
        "{function_name = NAME .. '_enqueue', callback = calls.run, flags = {'allow-oom'}}",
        (CALLS,),
    ),
    Bug(
        "replies cut at the wrong place",
        "callers whose calls are sent together get each other's replies",
        "storage/redis/calls.py",
        "            start += call.count\n",
        "            start += 1\n",
        (CALLS,),
    ),
    Bug(
        "every caller gets the first replies",
        "as above",
        "storage/redis/__init__.py",
        "        return [_SETTLED[code] for code in reply[1][start : start + len(batch)]]\n",
        "        return [_SETTLED[code] for code in reply[1][: len(batch)]]\n",
        (CALLS,),
    ),
    Bug(
        "verbs overtake each other",
        "calls of one client to one queue are executed out of order",
        "storage/redis/calls.py",
        "                if not fits or call.verb != first.verb or call.options != first.options:\n",
        "                if call.verb != first.verb:\n                    self._waiting.rotate(-1)\n"
        "                if not fits or call.verb != first.verb or call.options != first.options:\n",
        (CALLS,),
    ),
    Bug(
        "options of another caller",
        "calls with different options are sent as one call",
        "storage/redis/calls.py",
        "call.verb != first.verb or call.options != first.options:",
        "call.verb != first.verb:",
        (CALLS, UPDATES, LEASES),
    ),
    # Fast paths
    Bug(
        "plain: fence not compared",
        "a worker's earlier lease can complete its later lease if no result is kept",
        "storage/redis/lua/fast.lua",
        "    and sub(head, SETTLED_FENCE_AT, SETTLED_FENCE_END) == sub(run, FENCE_AT, FENCE_END)\n",
        "",
        (LEASES, WORK_QUEUE, LINES),
    ),
    Bug(
        "plain: worker not compared",
        "any worker that knows the fence can complete a job if no result is kept",
        "storage/redis/lua/fast.lua",
        "    and sub(run, HOLDER_AT, HOLDER_AT - 1 + #holder) == holder\n",
        "",
        (LEASES, WORK_QUEUE, LINES),
    ),
    Bug(
        "plain: next not looked for",
        "an update that arrived during the run is lost",
        "storage/redis/lua/fast.lua",
        " and band(byte(run), NEXT) == 0",
        "",
        (UPDATES, TRANSITIONS, LINES),
    ),
    Bug(
        "plain: time to live not looked at",
        "results are not remembered",
        "storage/redis/lua/fast.lua",
        " and sub(head, LENGTHS_AT, LENGTHS_END) == NO_TTLS",
        "",
        (REMEMBERING,),
    ),
    Bug(
        "plain: claimed and still in the line",
        "a job is leased twice",
        "storage/redis/lua/fast.lua",
        "  append(list_of(writes.zrem, index), member)\n",
        "",
        (LEASES,),
    ),
    Bug(
        "plain: long records",
        "counts and waiters of a record are ignored",
        "storage/redis/lua/fast.lua",
        "PLAIN[flags] = LIVE[flags] and flags % 2 ~= LONG",
        "PLAIN[flags] = LIVE[flags]",
        (LEASES, WAITERS, REMEMBERING),
    ),
    Bug(
        "plain: enqueue with a waiter",
        "a caller that enqueues and waits gets no notification",
        "storage/redis/lua/fast.lua",
        "if request.keep_ms > 0 then\n    flags = flags + LONG",
        "if false then\n    flags = flags + LONG",
        (WAITERS, REMEMBERING, CALLS),
    ),
    Bug(
        "plain: enqueue for later",
        "a delay is ignored",
        "storage/redis/lua/fast.lua",
        "FAST and when == NOW and has_payload",
        "FAST and has_payload",
        (ORDER,),
    ),
    Bug(
        "plain: an id twice in one batch",
        "an id has two index entries",
        "storage/redis/lua/enqueue.lua",
        "raws[at] and true or met[id] ~= nil or ",
        "raws[at] and true or ",
        (ORDER, UPDATES, TRANSITIONS),
    ),
    Bug(
        "quick: a retried job",
        "the number of jobs in retry is wrong",
        "storage/redis/lua/fast.lua",
        "  if #raw < LONG_BYTES or sub(raw, RETRIES_AT, RETRIES_END) ~= NO_RETRIES then return false end\n",
        "  if #raw < LONG_BYTES then return false end\n",
        (
            LEASES,
            REMEMBERING,
            TRANSITIONS,
        ),
    ),
    Bug(
        "quick: a stale entry",
        "a job that was delayed is claimed at once through its old index entry",
        "storage/redis/lua/fast.lua",
        "return wall_at == 0 and pack('>I8', arrival) == sub(member, 1, ARRIVAL_BYTES)",
        "return wall_at == 0",
        (
            UPDATES,
            LINES,
            ORDER,
        ),
    ),
    Bug(
        "quick: an absolute time",
        "a job with an absolute run_at is claimed early after the clock stepped back",
        "storage/redis/lua/fast.lua",
        "return wall_at == 0 and pack(",
        "return pack(",
        (CLOCK,),
    ),
    Bug(
        "quick: keep time",
        "an outcome is not kept for the requested time",
        "storage/redis/lua/fast.lua",
        "retries + keep_ms + error_size + previous_size > 0",
        "retries + error_size + previous_size > 0",
        (
            REMEMBERING,
            WAITERS,
        ),
    ),
    Bug(
        "quick: the outcome before",
        "the outcome of a generation is lost when the next one ends",
        "storage/redis/lua/fast.lua",
        "retries + keep_ms + error_size + previous_size > 0",
        "retries + keep_ms + error_size > 0",
        (
            UPDATES,
            WAITERS,
            TRANSITIONS,
        ),
    ),
    Bug(
        "quick: attempts",
        "a finished record has lost the number of its runs",
        "storage/redis/lua/fast.lua",
        "wall_at, attempts, 0, stalls, timeouts, 0",
        "wall_at, 0, 0, stalls, timeouts, 0",
        (
            LEASES,
            REMEMBERING,
            TRANSITIONS,
        ),
    ),
    Bug(
        "quick: options of a finished record",
        "a finished job that is enqueued again has lost its options",
        "storage/redis/lua/fast.lua",
        " .. pack('<I4', #packed) .. packed .. terms)",
        " .. pack('<I4', #packed) .. packed)",
        (
            UPDATES,
            REMEMBERING,
            TRANSITIONS,
            LINES,
        ),
    ),
    Bug(
        "quick: no notification",
        "waiters get no notification when the job ends",
        "storage/redis/lua/fast.lua",
        "record_event(tx, KIND.COMPLETED, id, generation, run_at, waiters, outcome)",
        "record_event(tx, KIND.COMPLETED, id, generation, run_at, '', outcome)",
        (WAITERS,),
    ),
    # Wake-ups, counts, time, lists
    Bug(
        "no token for new work",
        "waiting workers are not woken",
        "storage/redis/lua/transaction.lua",
        "    if tx.ready then wake(tx) end\n",
        "",
        (CALLS,),
    ),
    Bug(
        "no token for what a claim leaves",
        "only the first batch of many due jobs is claimed at once",
        "storage/redis/lua/verbs.lua",
        "  if run_at and run_at <= tx.now then transaction.wake(tx) end\n",
        "",
        (CALLS,),
    ),
    Bug(
        "a token for each job",
        "a long queue wakes workers once for each job",
        "storage/redis/lua/transaction.lua",
        "  if redis.pcall('LLEN', tx.queue .. ':wake') == 0 then ",
        "  if true then ",
        (CALLS,),
    ),
    Bug(
        "many waiters",
        "the fifth waiting client gets the outcome a second late",
        "storage/redis/__init__.py",
        '(f"to:{self._client}", "to:*")',
        '(f"to:{self._client}",)',
        (CALLS,),
    ),
    Bug(
        "totals are not counted",
        "the totals of a queue stay 0",
        "storage/redis/lua/transaction.lua",
        "  meta[TOTALS + kind] = meta[TOTALS + kind] + 1\n",
        "",
        (TRANSITIONS,),
    ),
    Bug(
        "the queue's time is not kept",
        "the queue's clock steps back with the server's clock",
        "storage/redis/lua/clock.lua",
        "  time[LAST_AT] = max(WALL + time[SKEW], time[LAST_AT])\n",
        "  time[LAST_AT] = WALL + time[SKEW]\n",
        (CLOCK,),
    ),
    Bug(
        "stamps may be given out twice",
        "two leases within one microsecond have the same fence",
        "storage/redis/lua/clock.lua",
        "  time[LAST_STAMP] = max(time[LAST_AT], time[LAST_STAMP] + 1)\n",
        "  time[LAST_STAMP] = max(time[LAST_AT], time[LAST_STAMP])\n",
        (CLOCK, LEASES),
    ),
    Bug(
        "stamps of a deleted queue",
        "a queue that is created again reuses fences",
        "storage/redis/lua/metadata.lua",
        "tonumber(call('GET', queue .. ':floor') or 0)",
        "0",
        (CLOCK, ORDER, REMEMBERING),
    ),
    Bug(
        "not listed again",
        "a queue that another client deleted is created again but not listed",
        "storage/redis/lua/transaction.lua",
        "  if tx.opened == 1 then transaction.relist('SADD', tx.queue) end\n",
        "",
        (ORDER, CALLS, REMEMBERING),
    ),
    Bug(
        "order of the locale",
        "lists miss jobs on a server whose locale orders strings otherwise than by their bytes",
        "storage/redis/lua/reads.lua",
        "is_behind(call('ZRANGE', key, middle, middle)[1], member)",
        "call('ZRANGE', key, middle, middle)[1] > member",
        (LOCALE,),
    ),
    Bug(
        "permissions not checked",
        "a user who may not delete fields leaves half a completion",
        "storage/redis/lua/calls.lua",
        "    check_permissions() -- Once per client and verb, or every ten minutes.\n",
        "",
        (HALF_STEPS,),
    ),
    Bug(
        "message refuses a verb",
        "a settle whose message may not be published is written and then fails",
        "storage/redis/lua/transaction.lua",
        "    redis.pcall('SPUBLISH', tx.queue .. ':to:'",
        "    call('SPUBLISH', tx.queue .. ':to:'",
        (HALF_STEPS,),
    ),
    Bug(
        "companion too late",
        "a job fails although its companion queue is refused",
        "storage/redis/lua/verbs.lua",
        "  local companion, companion_ids = transaction.open(QUEUE .. '/failed'), {}\n",
        "  transaction.close(tx)\n  local companion, companion_ids = transaction.open(QUEUE .. '/failed'), {}\n",
        (HALF_STEPS,),
    ),
    Bug(
        "age instead of silence",
        "a reply that takes longer than 5 s on the wire never gets through",
        "storage/redis/connection.py",
        "        if moved > self._moved:\n",
        "        if False:\n",
        (TROUBLE + "large_payload_passes_a_link_that_needs_longer_than_the_timeout",),
    ),
    Bug(
        "later commands as a sign of life",
        "a call to a frozen server waits while later calls leave",
        "storage/redis/connection.py",
        "min(self._raw.sent, first.ends_at)",
        "self._raw.sent",
        (TROUBLE + "call_to_a_frozen_server_ends_though_later_calls_leave",),
    ),
    Bug(
        "repetition in another batch",
        "a settlement whose reply was lost is reported as lost though it was applied",
        "storage/redis/calls.py",
        'elif before is not None and verb == "settle":',
        "elif before is not None and False:",
        (TROUBLE + "settlement_repeated_in_another_batch_counts_as_done_once",),
    ),
    Bug(
        "library asked for every time",
        "a user without FUNCTION LOAD costs four commands per call",
        "storage/redis/connection.py",
        "            self._uses_scripts = True\n",
        "            command.use_script()\n",
        (TROUBLE + "user_without_function_permission_is_served_by_scripts",),
    ),
    Bug(
        "one channel for all databases",
        "events of a queue appear in every database of the server",
        "storage/redis/lua/transaction.lua",
        "tx.queue .. ':events' .. DATABASE, table.concat",
        "tx.queue .. ':events', table.concat",
        (NOTIFY + "databases_of_a_server_do_not_share_events",),
    ),
    Bug(
        "time not noted by a claim",
        "a step back of the clock stretches delays of a quiet queue",
        "storage/redis/lua/transaction.lua",
        "  elseif clock.needs_note(tx.time, tx.noted_at, tx.noted_skew) then\n",
        "  elseif tx.time[SKEW] ~= tx.noted_skew then\n",
        (CLOCK,),
    ),
    Bug(
        "time not noted by a poll",
        "a step back of the clock stretches delays of a queue that nobody claims",
        "storage/redis/lua/reads.lua",
        "    if needs_note and not is_ready and",
        "    if false and",
        (CLOCK,),
    ),
    Bug(
        "ids not checked",
        "an empty id is stored, which no client accepts",
        "storage/redis/lua/arguments.lua",
        "if id == '' or #id > longest then",
        "if false then",
        (ARGUMENTS,),
    ),
    Bug(
        "times not checked",
        "a run_at of 2**53 is stored, and the record cannot be read",
        "storage/redis/lua/enqueue.lua",
        "  elseif at > (when",
        "  elseif false and at > (when",
        (ARGUMENTS,),
    ),
    Bug(
        "terms not checked",
        "options that no client can read are stored",
        "storage/redis/lua/arguments.lua",
        "and pcall(read_terms, packed)",
        "",
        (ARGUMENTS,),
    ),
    Bug(
        "settlement not checked",
        "an outcome is kept until a time that no client can read",
        "storage/redis/lua/verbs.lua",
        "  elseif fence > NEVER or first > MAX_MS or",
        "  elseif false and",
        (ARGUMENTS,),
    ),
    Bug(
        "queue name not checked",
        "a queue is created under a name that no client accepts",
        "storage/redis/lua/metadata.lua",
        "  arguments.queue(queue)\n",
        "",
        (ARGUMENTS,),
    ),
    Bug(
        "expired workers stay",
        "records of dead workers accumulate",
        "storage/redis/lua/workers.lua",
        "    call('HDEL', QUEUE .. ':workers', expired)\n",
        "",
        (ORDER, "test_refusals", CALLS),
    ),
    Bug(
        "garbled records are not noticed",
        "bytes that are not a record become a job",
        "storage/redis/lua/record.lua",
        "  if band(flags, MARK) ~= MARK or priority > 9 or ",
        "  if ",
        (LINES,),
    ),
    Bug(
        "stamps that no clock has shown",
        "one damaged stamp moves the queue's stamps into the far future",
        "storage/redis/lua/record.lua",
        " or max(generation, run_at) > NEVER then",
        " then",
        (LINES,),
    ),
    Bug(
        "deferred request keeps its priority",
        "a new priority is lost when the deferred request begins",
        "storage/redis/lua/lifecycle.lua",
        "  if job.run and job.run.next then job.run.next.priority, job.run.changed = priority, true end\n",
        "",
        (ORDER,),
    ),
    Bug(
        "garbled for the client only",
        "one record that the client cannot decode makes the whole claim raise",
        "storage/redis/__init__.py",
        "            except codec.UNREADABLE:\n                garbled += (",
        "            except ZeroDivisionError:\n                garbled += (",
        (LINES,),
    ),
]


left_out: list[str] = []
"""Tests that fail without any bug, so they cannot show that a bug is caught."""


class Verdict(NamedTuple):
    bug: Bug
    caught_by: str
    """The first test that failed, or '' if none did."""
    trouble: str
    seconds: float


def main() -> int:
    wanted = [bug for bug in BUGS if not sys.argv[1:] or bug.name in sys.argv[1:]]
    with tempfile.TemporaryDirectory(prefix="holdfast-plant-") as scratch:
        copies: SimpleQueue[Path] = SimpleQueue()
        workers = min(2, os.cpu_count() or 1)
        for n in range(workers):
            copies.put(copy(Path(scratch) / str(n)))

        def run(bug: Bug) -> Verdict:
            folder = copies.get()
            try:
                verdict = plant(folder, bug)
            finally:
                copies.put(folder)
            print(line(verdict), flush=True)
            return verdict

        folder = copies.get()
        tests = {path_of(name) for bug in wanted for name in bug.tests}
        failed, seconds = pytest(folder, tests, "--maxfail=1000000", limit_s=BASELINE_LIMIT_S)
        if failed:  # They run once more, alone: some measure time on a machine that others use.
            failed, _ = pytest(folder, set(failed), "--maxfail=1000000", limit_s=BASELINE_LIMIT_S)
        copies.put(folder)
        left_out.extend(failed)
        for test in failed:
            print(f"{test} fails without any bug: left out")
        print(f"the tests without any bug: {seconds:.0f} s", flush=True)
        with ThreadPoolExecutor(workers) as pool:
            verdicts = list(pool.map(run, wanted))
    bad = [verdict for verdict in verdicts if not verdict.caught_by]
    print(f"{len(verdicts)} planted, {len(verdicts) - len(bad)} caught")
    for verdict in bad:
        print(line(verdict))
    return 1 if bad or left_out else 0


def copy(folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".venv*", ".redis-py", ".git", "__pycache__", ".hypothesis", "*.db", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


def plant(folder: Path, bug: Bug) -> Verdict:
    file = folder / PACKAGE / bug.file
    sound = file.read_text()
    if sound.count(bug.old) != 1:
        return Verdict(bug, "", f"the text to change is there {sound.count(bug.old)} times", 0)
    try:
        file.write_text(sound.replace(bug.old, bug.new))
        failed, seconds = pytest(folder, set(map(path_of, bug.tests)), *(f"--deselect={test}" for test in left_out))
    finally:
        file.write_text(sound)
    caught_by = failed[0].rpartition("/")[2].replace(".py::", ": ") if failed else ""
    return Verdict(bug, caught_by, "" if caught_by else "SURVIVED", seconds)


def path_of(name: str) -> str:
    """The path of a test file or test that a bug names."""
    file, colons, test = name.partition("::")
    return f"tests/{file if '/' in file else f'storage/{file}'}.py{colons}{test}"


def pytest(folder: Path, tests: set[str], *options: str, limit_s: float = LIMIT_S) -> tuple[list[str], float]:
    """Run these test files or tests. Returns the tests that failed and the seconds that it took."""
    env = {**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*PYTEST, *options, *sorted(tests)]
    began = time.monotonic()
    try:
        run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return [f"a time-out of {limit_s:.0f} s"], time.monotonic() - began
    seconds = time.monotonic() - began
    if run.returncode == 0:
        return [], seconds
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return sorted(set(failed)) or [f"pytest ended with {run.returncode}"], seconds


def line(verdict: Verdict) -> str:
    bug = verdict.bug
    return f"{bug.name:38} {bug.breaks:88} {verdict.caught_by or verdict.trouble} ({verdict.seconds:.0f} s)"


if __name__ == "__main__":
    sys.exit(main())
