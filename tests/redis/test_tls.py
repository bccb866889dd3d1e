"""Over TLS: a real handshake in front of a real server. The certificate is for localhost, and for these tests only."""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast._core.events import Topic
from holdfast._core.jobs import Request, Work
from holdfast._core.replies import Placed
from holdfast.errors import StorageUnavailable
from holdfast.storage import audit, connect
from tests.servers import shared

FOLDER = Path(__file__).parent / "tls"
CERTIFICATE = FOLDER / "certificate.pem"


@asynccontextmanager
async def tls_in_front_of(port: int) -> AsyncIterator[int]:
    """A port that speaks TLS and hands on what it hears to the server."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE, FOLDER / "key.pem")
    writers: list[asyncio.StreamWriter] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server, from_server = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, from_server))
        await asyncio.gather(pipe(reader, from_server), pipe(to_server, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.05)  # For the last goodbyes.


@pytest.fixture
async def tls_port() -> AsyncIterator[int]:
    server = shared("valkey")
    assert server is not None
    async with tls_in_front_of(server.port) as port:
        yield port


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
async def test_jobs_and_hints_travel_over_tls(tls_port: int, scheme: str) -> None:
    url = f"{scheme}://localhost:{tls_port}/0?ssl_ca_certs={CERTIFICATE}"
    async with connect(url, namespace=uuid.uuid4().hex) as storage, storage.subscribe(Topic("q")) as events:
        (reply,) = await storage.enqueue("q", [Request("a", Work(bytes(300_000)))])
        assert reply.placed is Placed.NEW
        async with asyncio.timeout(10):
            assert (await anext(events)).id == "a"
        (job,) = (await storage.claim("q", 1, worker="w", lease_ms=1000)).jobs
        assert job.payload == bytes(300_000)
        assert (await audit(storage, "q")).problems == []


async def test_untrusted_certificate_is_refused(tls_port: int) -> None:
    with pytest.raises(StorageUnavailable, match="certificate"):
        async with connect(f"rediss://localhost:{tls_port}?timeout=1"):
            pass
