"""A job's life on a SQLite file, told as it happens: ./dev demo

Enqueue, claim, settle, a lease taken back from a worker that died, and a clean audit. Takes about two seconds.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.jobs import Complete, Request, Settled, Update, Work, new_id
from holdfast.storage import audit, connect
from holdfast.waiters import wait

QUEUE = "emails"
LEASE_MS = 600

DOOMED_WORKER = """
import asyncio, sys
from holdfast.storage import connect

async def main():
    async with connect(sys.argv[1]) as storage:
        claim = await storage.claim("emails", 1, worker="doomed", lease_ms=600)
        print(claim.jobs[0].id, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def say(text: str) -> None:
    print(text, flush=True)


async def main(url: str) -> int:
    async with connect(url) as storage:
        say(f"a queue named {QUEUE!r} in {storage!r}\n")

        say("1. enqueue three jobs; the same id again is kept, not doubled")
        for to in ("ada", "grace", "ada"):
            work = Work(f'{{"to": "{to}"}}'.encode())
            (reply,) = await storage.enqueue(QUEUE, [Request(f"welcome-{to}", work, named=True)])
            say(f"   welcome-{to:<6} {reply.placed}")
        await storage.enqueue(QUEUE, [Request(new_id(), Work(b'{"to": "alan"}'), delay_ms=200)])
        say("   (one more, due in 200 ms)")

        say("\n2. another process claims a job and is killed")
        doomed = await asyncio.create_subprocess_exec(sys.executable, "-c", DOOMED_WORKER, url, stdout=subprocess.PIPE)
        assert doomed.stdout is not None
        held = (await doomed.stdout.readline()).decode().strip()
        doomed.kill()
        await doomed.wait()
        say(f"   process {doomed.pid} held {held} and is gone")

        say("\n3. a worker claims what is due, and takes back what the dead one held")
        results = asyncio.create_task(wait(storage, QUEUE, held, 0, wait_s=10))
        done = 0
        while done < 3:
            claim = await storage.claim(QUEUE, 10, worker="survivor", lease_ms=LEASE_MS)
            for job in claim.jobs:
                result = Complete(job.id, job.fence or 0, b'"sent"', result_ttl_ms=60_000)
                (settled,) = await storage.settle(QUEUE, [result], worker="survivor")
                assert settled is Settled.OK
                done += 1
                say(f"   {job.id:<24} attempt {job.attempts}, {job.stalls} stalls: completed")
            pauses = [at - claim.now for at in (claim.next_run_at, claim.next_sweep_at) if at is not None]
            await asyncio.sleep(max(0.0, min(pauses, default=0) / 1_000_000))
        say(f"   whoever waited for {held} was told: {(await results).result!r}")

        say("\n4. an update while a job runs is not lost: it follows the run")
        await storage.enqueue(QUEUE, [Request("sync-ada", Work(b"1"), named=True)])
        (running,) = (await storage.claim(QUEUE, 1, worker="survivor", lease_ms=LEASE_MS)).jobs
        (reply,) = await storage.enqueue(QUEUE, [Request("sync-ada", Work(b"2"), update=Update(), named=True)])
        say(f"   sync-ada runs with payload {running.payload!r}; an update is {reply.placed}")
        await storage.settle(QUEUE, [Complete("sync-ada", running.fence or 0)], worker="survivor")
        (again,) = (await storage.claim(QUEUE, 1, worker="survivor", lease_ms=LEASE_MS)).jobs
        await storage.settle(QUEUE, [Complete("sync-ada", again.fence or 0)], worker="survivor")
        say(f"   it completed, and ran again with payload {again.payload!r}")

        found = await audit(storage, QUEUE)
        stats = (await storage.snapshot()).queues[0]
        say(f"\n5. audit: {found.checked} records checked, {len(found.problems)} problems")
        say("   totals: " + ", ".join(f"{count} {kind}" for kind, count in stats.totals.items()))
        return 1 if found.problems else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(main(f"sqlite:///{Path(folder) / 'holdfast.db'}")))
