"""What the log says of runs: exceptions with their tracebacks, and the job of a line that a handler writes."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest

from holdfast import Holdfast, JobFailed, PermanentError, Retry, current_job, job_log_filter
from holdfast._worker.logs import JsonLines, TextLines
from tests.app.conftest import until

pytestmark = pytest.mark.storages("memory")

App = Holdfast[Any]
own = logging.getLogger("shop.orders")


def raised_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.exc_info]


async def test_retried_exception_is_a_warning_with_its_traceback(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.task(name="t", min_backoff=0)
    async def fails_once() -> str:
        if current_job().attempt == 1:
            raise ValueError("no luck")
        return "done"

    async with app.worker():
        assert await fails_once.using(id="job-1", wait=10).call() == "done"
    (record,) = raised_in(caplog)
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "job-1 of t raised, attempt 1: it runs again"
    assert record.exc_info is not None
    kind, error, shown = record.exc_info
    assert (kind, str(error)) == (ValueError, "no luck")
    assert shown is not None
    assert shown.tb_frame.f_code.co_name == "fails_once"  # No frames of the package.


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_exception_that_fails_its_job_is_an_error(app: App, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    if kind == "async":

        @app.task(name="t")
        async def fails() -> None:
            raise PermanentError("no such user")

    else:

        @app.task(name="t")
        def fails() -> None:
            raise PermanentError("no such user")

    async with app.worker():
        with pytest.raises(JobFailed):
            await fails.using(wait=10).call()
    (record,) = raised_in(caplog)
    assert (record.levelno, record.getMessage().split(": ")[-1]) == (logging.ERROR, "the job fails")
    assert "in fails" in logging.Formatter().format(record)


async def test_retry_that_a_handler_asks_for_is_not_a_warning(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.task(name="t")
    async def asks() -> str:
        if current_job().attempt == 1:
            raise Retry("later", delay=0)
        return "done"

    async with app.worker():
        assert await asks.using(wait=10).call() == "done"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


class Lines(logging.Handler):
    """Keeps the lines of two formatters for the records that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.json: list[dict[str, Any]] = []
        self.addFilter(job_log_filter)

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(TextLines().format(record))
        self.json.append(json.loads(JsonLines().format(record)))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO)
    found = Lines()
    logging.getLogger().addHandler(found)
    yield found
    logging.getLogger().removeHandler(found)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_line_of_a_handler_has_its_job(app: App, lines: Lines, kind: str) -> None:
    if kind == "async":

        @app.task(name="t")
        async def work() -> None:
            own.warning("out of %s", "paper")

    else:

        @app.task(name="t")
        def work() -> None:
            own.warning("out of %s", "paper")

    own.warning("before")
    async with app.worker():
        await work.using(id="job\n1", wait=10).call()
    before, line = (found for found in lines.json if found["logger"] == own.name)
    assert "id" not in before
    assert (line["queue"], line["id"], line["attempt"], line["message"]) == ("t", "job\\n1", 1, "out of paper")
    (text,) = [found for found in lines.text if "paper" in found]
    assert text.endswith("out of paper [job\\n1 of t, attempt 1]")


async def test_event_line_names_its_job_once(app: App, lines: Lines) -> None:
    @app.task(name="t")
    async def work() -> None:
        raise PermanentError("no such user")

    async with app.worker():
        with pytest.raises(JobFailed):
            await work.using(id="job-1", wait=10).call()
        await until(lambda: any(line.get("event") == "failed" for line in lines.json))
    shown = [text for text in lines.text if "job-1" in text]
    assert [text.split("\n")[0].count("job-1") for text in shown] == [1, 1]
    (raised,) = [line for line in lines.json if "traceback" in line]
    assert raised["id"] == "job-1"
    assert "PermanentError: no such user" in raised["traceback"]


async def test_times_of_json_lines_are_rfc_3339_with_a_zone(lines: Lines) -> None:
    own.warning("now")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", lines.json[-1]["at"])
