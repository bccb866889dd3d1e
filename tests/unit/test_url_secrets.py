"""No part of a password is shown for a malformed storage URL: not in an error, a repr or a log line."""

from __future__ import annotations

import logging
import random
import traceback

import pytest

from holdfast import Holdfast
from holdfast.errors import HoldfastError, OptionError
from holdfast.storage.urls import redact

SCHEMES = [
    *(
        "redis",
        "rediss",
        "valkey",
        "valkeys",
        "redis+sentinel",
        "redis+cluster",
        "sqlite",
        "memory",
        "REDIS",
        "postgres",
    ),
    *("redis ", "http", "amqp+ssl", "", "1redis"),
]
PIECES = ["hunter", "SECRET"]
BREAKS = ["/", "?", "#", ":", "@", "%", "[", "]", "&", "=", "\\", " ", "//", "://", "@@", "%zz", ":0", "\n"]
FILE = "{scheme}:///user:{secret}@host/0"
SHAPES = [
    FILE,
    "{scheme}://user:{secret}@host:6379/0",
    "{scheme}://:{secret}@host",
    "{scheme}://{secret}@host/jobs.db",
    "{scheme}://user:{secret}:6379/0",
    "{scheme}://user:{secret}/0",
    "{scheme}:user:{secret}@host",
    "{scheme}:/user:{secret}@host/0",
    "user:{secret}@host:6379",
    "{scheme}://host:6379/0?password={secret}",
    "{scheme}://host/0?timeout=1&password={secret}&db=x",
    "{scheme}://host,user:{secret}@other:1/service/0",
]
MANY = 200


def malformed() -> list[str]:
    """URLs with a password that has characters which should have been quoted."""
    rng = random.Random(7)
    urls: list[str] = []
    while len(urls) < MANY:
        secret = PIECES[0] + rng.choice(BREAKS) + PIECES[1] + rng.choice(["", *BREAKS])
        scheme, shape = rng.choice(SCHEMES), rng.choice(SHAPES)
        looks_like_host = "@" in secret and "@" not in shape
        if (scheme, shape) != ("sqlite", FILE) and not looks_like_host:  # The first is the path of a file.
            urls.append(shape.format(scheme=scheme, secret=secret))
    return urls


@pytest.mark.parametrize("url", malformed())
def test_no_part_of_a_password_is_shown(
    url: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = [redact(url)]
    try:
        shown.append(repr(Holdfast(url)))
    except HoldfastError as error:
        shown += [str(error), repr(error), *traceback.format_exception(error)]
    shown += [caplog.text, *capsys.readouterr()]
    assert not [text for text in shown for piece in PIECES if piece in text]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:////srv/my jobs (1).db?synchronous=full", "sqlite:////srv/my jobs (1).db?synchronous=full"),
        ("redis://host:6379/0?timeout=2.5", "redis://host:6379/0?timeout=2.5"),
        ("redis+sentinel://one:26379,[::1]:26379/main/0", "redis+sentinel://one:26379,[::1]:26379/main/0"),
        ("memory://name", "memory://name"),
        ("jobs.db", "jobs.db"),
        ("redis://ada:pw@host:1/0", "redis://***@host:1/0"),
        ("redis://host?timeout=1&password=pw&db=1", "redis://host?timeout=1&password=***"),
        ("redis://user:pw/0", "redis://***"),
        ("user:pw@host", "***"),
    ],
)
def test_url_is_shown_as_far_as_it_has_no_password(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize("url", ["sqlite:jobs.db", "sqlite:/srv/jobs.db", "sqlite://jobs.db"])
def test_sqlite_url_needs_three_slashes(url: str) -> None:
    with pytest.raises(OptionError, match="does not name a file: use sqlite:///"):
        Holdfast(url)
