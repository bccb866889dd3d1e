"""Holdfast by itself: each of its set-ups and the limits go through the same steps as beside the peers, in minutes."""

from __future__ import annotations

from benchmarks.peers.report import Page
from benchmarks.peers.run import folder, options, run
from benchmarks.peers.systems import SYSTEMS

PAGE = Page("ours", "Holdfast by itself", "./dev bench")


def main() -> None:
    asked = options(PAGE, __doc__).parse_args()
    run(PAGE, [system for system in SYSTEMS if not system.packages], asked, folder(asked))


if __name__ == "__main__":
    main()
