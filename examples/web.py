"""A web app with a worker inside: jobs run in the process that serves the requests, and survive its restart.

    pip install '.[web]'    in a clone of Holdfast
    uvicorn web:app

    curl -X POST localhost:8000/reports -d '{"city": "Oslo"}'      202, and where the report will be
    curl 'localhost:8000/reports/ID?wait'                          the report, or 202 if it is not ready within 5 s
    curl 'localhost:8000/shout?text=hello'                         request and response: the endpoint waits for a job

Slow reports, or reports that need CPU, should run in another process: remove the worker from `lifespan` and start
`holdfast worker web:jobs` beside the app. Nothing else changes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from holdfast import Holdfast, JobFailed, JobNotFound, PermanentError, WaitTimeout

jobs = Holdfast()


@dataclass
class Report:
    city: str
    letters: int


@jobs.task(timeout=30, max_retries=3, result_ttl=3600)
async def report(city: str) -> Report:
    if not city:
        raise PermanentError("a report is about a city")  # no retry would help
    await asyncio.sleep(0.3)  # some service that is slow
    return Report(city, len(city))


@jobs.task(timeout=5, max_retries=0)
async def shout(text: str) -> str:
    return f"{text.upper()}!"


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    async with jobs, jobs.worker():  # when the app stops, jobs may finish for 25 s; the rest goes back to its queue
        yield


async def ask_for_report(request: Request) -> JSONResponse:
    try:
        city = str(json.loads(await request.body())["city"])
    except (ValueError, KeyError, TypeError):
        return JSONResponse({"error": 'send {"city": "…"}'}, 400)
    handle = await report.enqueue(city)
    return JSONResponse({"id": handle.id, "url": f"/reports/{handle.id}"}, 202)


async def get_report(request: Request) -> JSONResponse:
    id = request.path_params["id"]
    wait = 5 if "wait" in request.query_params else 0
    try:
        return JSONResponse(asdict(await jobs.queue(report.name).result(id, type=Report, wait=wait)))
    except WaitTimeout:
        return JSONResponse({"id": id, "state": "not ready"}, 202)
    except JobNotFound:
        return JSONResponse({"error": f"there is no report {id}"}, 404)
    except JobFailed as failed:
        return JSONResponse({"error": failed.error.message, "attempts": failed.attempts}, 500)


async def shout_back(request: Request) -> JSONResponse:
    try:
        return JSONResponse({"text": await shout.using(wait=5).call(request.query_params.get("text", ""))})
    except WaitTimeout:
        return JSONResponse({"error": "no worker ran the job in time"}, 504)


app = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/reports", ask_for_report, methods=["POST"]),
        Route("/reports/{id}", get_report),
        Route("/shout", shout_back),
    ],
)
