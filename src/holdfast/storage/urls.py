"""Storage URLs: `connect` makes the storage that a URL names."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from holdfast._core.clock import Clock
from holdfast.errors import OptionError
from holdfast.storage.base import Storage

DEFAULT_URL = "sqlite:///holdfast.db"


def connect(
    url: str = DEFAULT_URL, *, namespace: str = "hf", clock: Clock | None = None, max_payload: int | None = None
) -> Storage:
    """Return the storage that a URL names, not yet open.

    `sqlite:///file.db` is relative, `sqlite:////srv/file.db` absolute, both take `?synchronous=full`.
    `memory://name` is shared within the process, `memory://` is private to the returned object.
    `redis://host:6379/0`, `rediss://`, `valkey://`, `valkeys://`, `redis+sentinel://host:26379,other/SERVICE/0` and
    `redis+cluster://host:6379,other` take redis-py's options, `?timeout=10` and `?eviction=allow`.
    """
    parts = _split(url)
    options: dict[str, Any] = {"namespace": namespace, "clock": clock}
    if max_payload is not None:
        options["max_payload"] = max_payload
    opener = _SCHEMES.get(parts.scheme)
    if opener is None:
        raise OptionError(f"{redact(url)!r:.120} has an unknown scheme: use one of {', '.join(_SCHEMES)}")
    return opener(url, parts, options)


_SECRET_OPTION = re.compile(
    r"([?&][^=&]*(?:pass|pwd|secret|token|auth|cred|api_?key)[^=&]*=).*", re.IGNORECASE | re.DOTALL
)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(?=:/)", re.IGNORECASE)
_HOST = r"(?:[\w.%-]*|\[[\da-f:.]+\])(?::\d*)?"
_WELL_FORMED = re.compile(
    rf"sqlite:///[^?#@]*(?:\?\w+=\w*)*"  # A path may have any character.
    rf"|[a-z][a-z0-9+.-]*://(?:\*\*\*@)?{_HOST}(?:,{_HOST})*(?:/[\w.-]*)*(?:\?\w+=[^&#@]*(?:&\w+=[^&#@]*)*)?"
    r"|[\w./-]*",
    re.IGNORECASE,
)


def redact(url: str) -> str:
    """Return a URL without anything that could be a password. Of a malformed one only the scheme is left, because any
    other part may belong to a password with characters that should have been quoted."""
    scheme = _SCHEME.match(url)
    _, at, tail = url.rpartition("@")
    shown = f"{scheme[0] if scheme else ''}://***@{tail}" if at else url
    shown = _SECRET_OPTION.sub(r"\1***", shown)
    if _WELL_FORMED.fullmatch(shown) and (scheme or not at):
        return shown
    return f"{scheme[0]}://***" if scheme else "***"


def _split(url: str) -> SplitResult:
    if not isinstance(url, str):
        raise OptionError(f"a storage URL must be text like {DEFAULT_URL!r}, not {type(url).__name__}")
    try:
        return urlsplit(url)
    except ValueError:  # Its message quotes parts of the URL.
        raise OptionError(f"{redact(url)!r:.120} is not a URL: use one like {DEFAULT_URL!r}") from None


def _sqlite(url: str, parts: SplitResult, options: dict[str, Any]) -> Storage:
    path = unquote(parts.path[1:])
    if url[len(parts.scheme) :][:4] != ":///" or not path or path == ":memory:" or "\0" in path:
        raise OptionError(
            f"{redact(url)!r:.120} does not name a file:"
            " use sqlite:///jobs.db (relative), sqlite:////srv/jobs.db (absolute) or memory://"
        )
    asked = _query(url, parts, {"synchronous"})
    from holdfast.storage.local.sqlite import SqliteStorage

    return SqliteStorage(path, **asked, **options)


_shared: dict[tuple[str, object], Storage] = {}


def _memory(url: str, parts: SplitResult, options: dict[str, Any]) -> Storage:
    _query(url, parts, set())
    name = parts.netloc + parts.path
    key = (name, options["namespace"])
    if name and key in _shared:
        return _shared[key]
    from holdfast.storage.local.memory import MemoryStorage

    storage = MemoryStorage(name, **options)
    return _shared.setdefault(key, storage) if name else storage  # Another thread may have added it first.


def _redis(url: str, parts: SplitResult, options: dict[str, Any]) -> Storage:
    if find_spec("redis") is None or find_spec("hiredis") is None:
        raise OptionError(f"{redact(url)!r:.120} needs the redis extra: pip install 'holdfast[redis]'")
    from holdfast.storage.redis import open_url

    return open_url(url, redact(url), **options)


def _query(url: str, parts: SplitResult, known: set[str]) -> dict[str, Any]:
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = asked.keys() - known
    if unknown or parts.fragment:
        allowed = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise OptionError(f"{redact(url)!r:.120} has an unknown option: {allowed}")
    return asked


_REDIS_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "redis+sentinel", "redis+cluster")
_SCHEMES: dict[str, Callable[[str, SplitResult, dict[str, Any]], Storage]] = {
    "sqlite": _sqlite,
    "memory": _memory,
    **dict.fromkeys(_REDIS_SCHEMES, _redis),
}
