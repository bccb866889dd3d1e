"""Every planted bug changes a text that is in the package. Otherwise `./dev plant` fails, which takes minutes."""

from __future__ import annotations

import pytest

from tools.plant import BUGS, PACKAGE, ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_text_of_a_planted_bug_is_in_the_package_once(bug: Bug) -> None:
    assert (ROOT / PACKAGE / bug.file).read_text().count(bug.old) == 1
