"""What everybody who takes part in a run must know, and the checker too."""

from __future__ import annotations

import os
from pathlib import Path

NAMESPACE = "chaos"
HISTORY = "CHAOS_HISTORY"
"""Names the folder of the history, in the environment of everybody who takes part."""
CLOCK = "CHAOS_CLOCK"
"""Names a file of eight bytes: by how many microseconds the clock of a SQLite file is off."""
CLOCK_KEY = "chaos:clock"
"""The same on a server: what its copy of the library adds to its time."""
RATE = "CHAOS_RATE"
"""How many jobs a second a producer asks for, if they are done."""

LEASE_S = 3.0
DAY_S = 86_400
BLOCK_S = 5.5
"""How long a handler blocks its event loop: longer than a lease and a half."""
QUEUES = ("work", "plain", "thread", "question", "single", "block", "periodic", "pulled")
SINGLETONS = frozenset({"single", "periodic"})
SERVED_INLINE = ("plain", "question", "block", "periodic")
"""By workers that cannot kill a run, too."""
WAYS = {"ok": 95, "throw": 3, "permanent": 1, "fork": 0.1, "leak": 0.1}
WAYS |= {"hang": 0.06, "spin": 0.06, "crash": 0.08, "poison": 0.05}
"""What jobs do, and how often."""
MILD = {"ok": 96, "throw": 3, "permanent": 1}
"""The same where a run cannot be killed."""
DEADLY = frozenset({"hang", "spin", "crash", "poison"})
"""What costs a run its process, and its neighbours theirs."""


def ending() -> Path:
    """The file that says that nothing more is asked for."""
    return Path(os.environ[CLOCK] + ".ending")
