"""What docs/frameworks.md shows for Django does what the page says. Django keeps settings in its process, so each test
runs a program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.suite("usual")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()

SETTINGS = """
SECRET_KEY = "x"
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}
"""


def from_page(marker: str) -> str:
    """The fragment of the page that has this text."""
    (code,) = (code for code in re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL) if marker in code)
    return str(code)


def run(folder: Path, program: str) -> list[str]:
    (folder / "shop").mkdir(exist_ok=True)
    (folder / "shop" / "settings.py").write_text(SETTINGS)
    setup = from_page("django.setup()").replace("Holdfast()", 'Holdfast("sqlite:///shop.db")')
    done = subprocess.run(
        [sys.executable, "-c", setup + program], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


CONNECTIONS = """
import asyncio

from django.db import connection

from holdfast import JobFailed


@app.task(name="query", max_retries=0)
def query(breaks: bool) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    if breaks:
        connection.connection.close()  # as a database that restarts
    return 1


async def main():
    async with app, app.worker():
        for breaks in (True, False):
            try:
                print(await query.call(breaks))
            except JobFailed as error:
                print(error.error.type)
            await asyncio.sleep(0.2)  # The thread is idle again, and gets the next run.


asyncio.run(main())
"""


def test_a_thread_gets_a_new_connection_after_its_old_one_broke(tmp_path: Path) -> None:
    assert run(tmp_path, CONNECTIONS) == ["1", "ProgrammingError"]
    assert run(tmp_path, from_page("def fresh_connections") + CONNECTIONS) == ["1", "1"]


TRANSACTIONS = """
from contextlib import suppress

from django.db import connection, transaction


@app.task(name="welcome")
def welcome(user: str) -> None: ...


def sign_up(name, fails):
    with transaction.atomic():
        IN_THE_TRANSACTION
        if fails:
            raise LookupError(name)


class User:
    def __init__(self, id):
        self.id = id

    def save(self):
        pass


welcome.sync.enqueue("first")
with suppress(LookupError):
    sign_up("ada", True)
sign_up("bob", False)
for job in app.queue("welcome").sync.jobs():
    print(app.queue("welcome").sync.get(job.id).payload["user"])
"""


def test_a_view_that_is_rolled_back_leaves_no_job(tmp_path: Path) -> None:
    on_commit = from_page("on_commit").strip()
    inside = from_page("transaction.atomic").partition("user.save()")[2].strip()
    for name, code in {"on_commit": on_commit, "inside": inside}.items():
        body = f"user = User(name); {code}"
        folder = tmp_path / name
        folder.mkdir()
        assert run(folder, TRANSACTIONS.replace("IN_THE_TRANSACTION", body)) == ["first", "bob"]
