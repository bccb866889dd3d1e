"""What an app offers to those who run it: its handlers, hooks and lifespan, and where its jobs are.

`holdfast.Holdfast` is such an app. A child process knows no more of it than this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from holdfast._worker.handler import AppHooks, Handler
from holdfast._worker.telemetry import OnEvent


class AppParts(NamedTuple):
    """The parts of an app."""

    handlers: list[Handler]
    hooks: AppHooks
    on_event: list[OnEvent]
    lifespan: Callable[[], AbstractAsyncContextManager[object]] | None
    url: str | None
    """The URL of its storage; None if the app was given an open storage instead."""
    namespace: str
    max_payload: int | None


class RunnableApp(ABC):
    """An app that a worker can run. Its methods are for `app_parts` and `open_lazily`, not for users."""

    @abstractmethod
    def _parts(self) -> AppParts:
        """The parts of this app."""

    @abstractmethod
    def _open_lazily(self) -> AbstractAsyncContextManager[object]:
        """Open this app, and its storage only when it is first used."""


def app_parts(app: RunnableApp) -> AppParts:
    """The parts of an app."""
    return app._parts()  # pyright: ignore[reportPrivateUsage]


def open_lazily(app: RunnableApp) -> AbstractAsyncContextManager[object]:
    """Open an app, and its storage only when it is first used."""
    return app._open_lazily()  # pyright: ignore[reportPrivateUsage]
