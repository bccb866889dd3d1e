"""A job that asks for its own next run, and goes on whatever is stopped, killed or started twice: `python periodic.py`.

Start it, stop it with ^C, start it again: the plan is in the storage. Start it in two terminals: each run happens once.
`EVERY=60 python periodic.py` runs once a minute. `holdfast cancel periodic.backup backup` ends it, between two runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from datetime import UTC, datetime, timedelta

from holdfast import Holdfast, current_job

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
EVERY = timedelta(seconds=float(os.environ.get("EVERY", "2")))

app = Holdfast()


@app.task(singleton="backup")  # one id, so there is never more than one that runs or waits
async def backup(due: datetime) -> None:
    # First the next run, then the work: should this run fail or its worker die, the next one is planned already. A
    # request that meets the running job waits for it to end. What was missed meanwhile is not made up for.
    await backup.using(run_at=(following := next_after(due))).enqueue(following)
    print(f"{due:%H:%M:%S} backup by {os.getpid()}, attempt {current_job().attempt}", flush=True)


def next_after(due: datetime) -> datetime:
    """The first full interval that is after both `due` and now."""
    after = max(due, datetime.now(UTC))
    return EPOCH + EVERY * ((after - EPOCH) // EVERY + 1)


async def main() -> None:
    async with app, app.worker():
        first = next_after(EPOCH)
        handle = await backup.using(run_at=first, on_conflict="keep").enqueue(first)
        print(f"planned: {handle.placed}", flush=True)  # new, or a duplicate of what is planned already
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
