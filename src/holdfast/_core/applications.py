"""Compares the applications that serve the queues of a namespace, from what workers announce."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from holdfast._core.replies import WorkerFacts
from holdfast._core.tasks import SIGNATURE_CHARS

MAX_SIGNED = 1_000
"""Most queues of a worker whose signatures it announces."""


class Application(NamedTuple):
    """An application as a worker announces it. Empty if that is not known."""

    target: str = ""
    """The app, as module:name."""
    source: str = ""
    """The name of its project, else the file of its module."""

    def __str__(self) -> str:
        return f"{self.target} ({self.source})"


class Comparison(NamedTuple):
    warnings: list[str]
    """Queues that different applications serve."""
    versions: list[str]
    """Queues that one application serves with different parameters, as during a deploy."""


def compare_applications(workers: Iterable[WorkerFacts], only: Collection[str] | None = None) -> Comparison:
    """Compare what workers announced, for all queues or `only` these."""
    by_queue: dict[str, dict[Application, set[str]]] = defaultdict(lambda: defaultdict(set))
    for facts in workers:
        application = Application(str(facts.get("app", "")), str(facts.get("source", "")))
        queues, signatures = facts.get("queues"), str(facts.get("signatures", ""))
        if application.target and isinstance(queues, list):
            for at, queue in enumerate(queues):
                if only is not None and queue not in only:
                    continue
                start = at * SIGNATURE_CHARS
                by_queue[queue][application].add(signatures[start : start + SIGNATURE_CHARS].strip())
    shared: dict[str, list[str]] = defaultdict(list)
    changed: dict[str, list[str]] = defaultdict(list)
    for queue, applications in sorted(by_queue.items()):
        if len(applications) > 1:
            shared[" and ".join(sorted(map(str, applications)))].append(queue)
        for application, signatures_of in applications.items():
            if len(signatures_of - {""}) > 1:
                changed[str(application)].append(queue)
    return Comparison(
        [
            f"different applications serve {_some(queues)}: {who}. Each runs jobs of the other: give each application"
            " its own namespace"
            for who, queues in shared.items()
        ],
        [
            f"two versions of {who} serve {_some(queues)} with different parameters: a deploy is not finished"
            for who, queues in changed.items()
        ],
    )


def _some(queues: list[str]) -> str:
    others = len(queues) - 1
    return f"queue {queues[0]}" + (f" and {others} more queue{'' if others == 1 else 's'}" if others else "")
