import asyncio

from holdfast import Holdfast

app = Holdfast()  # without a URL: one SQLite file, ./holdfast.db


@app.task
async def greet(name: str) -> str:
    return f"Hello, {name}!"


async def main() -> None:
    async with app, app.worker():
        handle = await greet.enqueue("world")
        print(await handle.result())


if __name__ == "__main__":
    asyncio.run(main())
