"""Types of a user travel by `app.codec_hooks`: from the producer to the handler, and back as a result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from holdfast import Failure, Holdfast, current_job
from tests.app.conftest import until


class Celsius(float): ...


@pytest.fixture
async def app(app: Holdfast[Any]) -> Holdfast[Any]:
    app.codec_hooks(Path, encode=str, decode=Path)
    return app


@pytest.mark.parametrize("codec", ["json", "msgpack"])
@pytest.mark.storages("memory", "sqlite", "valkey")
async def test_a_type_with_hooks_is_an_argument_and_a_result(app: Holdfast[Any], codec: str) -> None:
    @app.task(name="t", codec=codec)
    async def parents(path: Path, more: list[Path]) -> list[Path]:
        return [path.parent, *(each.parent for each in more)]

    async with app.worker():
        handle = await parents.enqueue(Path("/a/b"), [Path("/c/d")])
        assert await handle.result(wait=10) == [Path("/a"), Path("/c")]
    assert await app.queue("t").result(handle.id, type=list[Path]) == [Path("/a"), Path("/c")]


@pytest.mark.parametrize("codec", ["json", "msgpack"])
@pytest.mark.storages("memory")
async def test_numpy_scalars_and_arrays_travel_with_hooks(app: Holdfast[Any], codec: str) -> None:
    """The hooks are those of docs/tasks.md."""
    app.codec_hooks(np.generic, encode=lambda value: value.item())  # type: ignore[type-abstract]
    app.codec_hooks(np.ndarray, encode=np.ndarray.tolist, decode=np.array)

    @app.task(name="t", codec=codec)
    async def scale(values: np.ndarray, factor: float, times: int) -> np.ndarray:
        assert (type(values), type(factor), type(times)) == (np.ndarray, float, int)
        return values * factor * times

    async with app.worker():
        factor, times = cast("float", np.float32(0.5)), cast("int", np.int64(4))
        scaled = await scale.call(np.array([1.5, 2.0]), factor, times)
        assert isinstance(scaled, np.ndarray)
        assert scaled.tolist() == [3.0, 4.0]


@pytest.mark.storages("memory")
async def test_a_type_with_hooks_is_part_of_an_id(app: Holdfast[Any]) -> None:
    @app.task(name="t", unique="file:{path}")
    async def work(path: Path) -> None: ...

    assert (await work.enqueue(Path("/a/b"))).id == "file:%2Fa%2Fb" == work.id_for(Path("/a/b"))


@pytest.mark.storages("memory")
async def test_a_fail_handler_gets_arguments_with_hooks(app: Holdfast[Any]) -> None:
    seen: list[Any] = []

    @app.task(name="t", max_retries=0)
    async def fails(path: Path) -> None:
        raise ValueError

    @fails.on_failure
    async def note(failure: Failure) -> None:
        seen.append(failure.payload.path)

    async with app.worker():
        await fails.enqueue(Path("/a"))
        await until(lambda: seen)
    assert seen == [Path("/a")]


@pytest.mark.storages("memory")
async def test_a_subclass_of_float_is_accepted_everywhere(make_app: Callable[..., Holdfast[Any]]) -> None:
    async with make_app() as app:

        @app.task(name="t", unique="at:{limit}")
        async def work(value: Celsius, limit: float = Celsius(1.5)) -> list[float]:
            current_job().progress(Celsius(0.5))
            return [Celsius(value + 1), limit]

        async with app.worker():
            assert await work.using(wait=10).call(Celsius(1)) == [2.0, 1.5]
            assert await work.using(wait=10).call(Celsius(1), Celsius(2)) == [2.0, 2.0]
