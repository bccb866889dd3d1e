"""Storage URLs: `connect` makes the storage that a URL names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from importlib.util import find_spec
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
    options: dict[str, object] = {"namespace": namespace, "clock": clock}
    if max_payload is not None:
        options["max_payload"] = max_payload
    opener = _SCHEMES.get(parts.scheme)
    if opener is None:
        raise OptionError(f"{redact(url)!r:.120} has no scheme that is known: use one of {', '.join(_SCHEMES)}")
    return opener(url, parts, options)


def redact(url: str) -> str:
    """Return a URL as it may be shown: without anything that could be a password, also if it is not well formed."""
    head, at, tail = url.rpartition("@")
    if at:
        scheme, slashes, _ = head.partition("://")
        url = f"{scheme if slashes else ''}{slashes}***@{tail}"
    return re.sub(r"(?i)((?:pass|pwd|secret|token|auth|cred|api_?key)[^=&]*=)[^&#]*", r"\1***", url)


def _split(url: str) -> SplitResult:
    if not isinstance(url, str):
        raise OptionError(f"a storage URL is text like {DEFAULT_URL!r}, not {type(url).__name__}")
    try:
        return urlsplit(url)
    except ValueError as error:
        raise OptionError(f"{redact(url)!r:.120} is not a URL ({error}): use one like {DEFAULT_URL!r}") from None


def _sqlite(url: str, parts: SplitResult, options: dict[str, object]) -> Storage:
    path = unquote(parts.path[1:])
    if parts.netloc or not path or path == ":memory:" or "\0" in path:
        raise OptionError(
            f"{redact(url)!r:.120} names no file:"
            " use sqlite:///jobs.db (relative), sqlite:////srv/jobs.db (absolute) or memory://"
        )
    asked = _query(url, parts, {"synchronous"})
    module = importlib.import_module("holdfast.storage.local.sqlite")
    storage: Storage = module.SqliteStorage(path, **asked, **options)
    return storage


_shared: dict[tuple[str, object], Storage] = {}


def _memory(url: str, parts: SplitResult, options: dict[str, object]) -> Storage:
    _query(url, parts, set())
    name = parts.netloc + parts.path
    key = (name, options["namespace"])
    if name and key in _shared:
        return _shared[key]
    module = importlib.import_module("holdfast.storage.local.memory")
    storage: Storage = module.MemoryStorage(name, **options)
    return _shared.setdefault(key, storage) if name else storage  # Another thread may have been quicker.


def _redis(url: str, parts: SplitResult, options: dict[str, object]) -> Storage:
    if find_spec("redis") is None or find_spec("hiredis") is None:
        raise OptionError(f"{redact(url)!r:.120} needs the redis extra: pip install 'holdfast[redis]'")
    module = importlib.import_module("holdfast.storage.redis")
    storage: Storage = module.open_url(url, redact(url), **options)
    return storage


def _query(url: str, parts: SplitResult, known: set[str]) -> dict[str, str]:
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = asked.keys() - known
    if unknown or parts.fragment:
        allowed = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise OptionError(f"{redact(url)!r:.120} has an option that is not known: {allowed}")
    return asked


_SCHEMES: dict[str, Callable[[str, SplitResult, dict[str, object]], Storage]] = {
    "sqlite": _sqlite,
    "memory": _memory,
    "redis": _redis,
    "rediss": _redis,
    "valkey": _redis,
    "valkeys": _redis,
    "redis+sentinel": _redis,
    "redis+cluster": _redis,
}
