"""The pytest fixture `rehearse`. See holdfast.testing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from holdfast._client.app import Holdfast
from holdfast.testing import Rehearsal


@pytest.fixture
def rehearse() -> Iterator[Callable[[Holdfast[Any]], Rehearsal]]:
    """Put an app on memory and a clock of its own until the test ends: `jobs = rehearse(app)`."""
    with ExitStack() as stack:
        yield lambda app: stack.enter_context(Rehearsal(app))
