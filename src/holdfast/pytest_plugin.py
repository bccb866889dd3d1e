"""The pytest fixtures `rehearse` and `eager`. See holdfast.testing.

Every pytest run in an environment with Holdfast loads this module, so it imports the package only inside the fixtures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from holdfast._client.app import Holdfast
    from holdfast.testing import EagerRehearsal, Rehearsal


@pytest.fixture
def rehearse() -> Iterator[Callable[[Holdfast[Any]], Rehearsal]]:
    """Use an app in memory, with a clock that the test moves, until the test ends: `jobs = rehearse(app)`."""
    from holdfast.testing import Rehearsal

    with ExitStack() as stack:
        yield lambda app: stack.enter_context(Rehearsal(app))


@pytest.fixture
def eager() -> Iterator[Callable[[Holdfast[Any]], EagerRehearsal]]:
    """Run each job of an app before its `enqueue` returns, until the test ends: `jobs = eager(app)`."""
    from holdfast.testing import EagerRehearsal

    with ExitStack() as stack:
        yield lambda app: stack.enter_context(EagerRehearsal(app))
