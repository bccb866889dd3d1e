"""A mixin for the test cases of unittest and of frameworks that derive from it."""

from __future__ import annotations

import unittest
from typing import Any, ClassVar

from holdfast._client.app import Holdfast
from holdfast.testing.eager import EagerRehearsal
from holdfast.testing.rehearsal import Rehearsal


class RehearsalMixin(unittest.TestCase):
    """A test case whose `app` is rehearsed during each test. Name it before other test cases:
    `class ReminderTest(RehearsalMixin, TestCase)`."""

    app: ClassVar[Holdfast[Any]]
    """The app to rehearse. Each test class sets it."""
    eager: ClassVar[bool] = False
    """Whether jobs run before their `enqueue` returns."""
    jobs: Rehearsal
    """The rehearsal of the present test."""

    def setUp(self) -> None:
        super().setUp()
        self.jobs = self.enterContext(EagerRehearsal(self.app) if self.eager else Rehearsal(self.app))
