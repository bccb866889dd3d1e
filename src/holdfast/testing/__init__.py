"""Test an app: its jobs are in memory, the test moves the clock, and a worker runs the ready jobs on demand.

>>> async def test_a_reminder_is_sent_after_a_day():
...     with rehearse(app) as jobs:
...         await remind.using(delay=86_400).enqueue("ada")
...         assert await jobs.drain() == []
...         await jobs.advance(days=1)
...         jobs.assert_enqueued(remind, who="ada")

With `eager(app)` instead, a job runs before its `enqueue` returns. Tests that are not async use `jobs.sync`. With
pytest, fixtures of the same names do the same without the `with`: `jobs = rehearse(app)`. Test cases of unittest have
the mixin `RehearsalMixin`.
"""

from holdfast.testing.case import RehearsalMixin
from holdfast.testing.eager import EagerRehearsal, eager
from holdfast.testing.rehearsal import Rehearsal, SyncRehearsal, rehearse
from holdfast.testing.requests import RehearsedRequest

__all__ = ["EagerRehearsal", "Rehearsal", "RehearsalMixin", "RehearsedRequest", "SyncRehearsal", "eager", "rehearse"]
