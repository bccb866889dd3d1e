"""A job that enqueues its own next run, and survives stops, kills and a second start: `python periodic.py`.

Stop it with ^C and start it again: the next run is in the storage. Start it in two terminals: each run happens once.
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


@app.task(singleton="backup")  # one id, so at most one job runs or waits
async def backup(due: datetime) -> None:
    # Enqueue the next run first, then work: if this run fails or its worker dies, the next run is stored already. The
    # request waits for this run to end. Runs that were missed while no worker ran are not made up for.
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
        print(f"planned: {handle.placed}", flush=True)  # new, or duplicate if a run is stored already
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
