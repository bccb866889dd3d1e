"""CPU work in child processes, with progress that the producer shows: `python thumbnails.py`.

It draws pictures (PPM, a very simple format) into ./pictures and makes a small one of each. It is plain Python, so it
takes a few seconds.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from holdfast import Holdfast, current_job

FOLDER = Path("pictures")
NAMES = ["dawn", "noon", "dusk"]
WIDTH, HEIGHT, SHRINK = 2400, 1600, 8

app = Holdfast()


@app.task(timeout=120, size=100)  # a child has 100 units: it works on one of these at a time
def thumbnail(picture: str, small: str) -> int:
    """Make a small picture. It is not async, so it runs on a thread of a child. Jobs carry file names only."""
    width, height, pixels = read_ppm(Path(picture))
    out = bytearray()
    for y in range(0, height, SHRINK):
        for x in range(0, width, SHRINK):
            out += mean_colour(pixels, width, x, y)
        current_job().progress(round(100 * (y + SHRINK) / height))  # cheap: only the newest is sent, once a second
    return write_ppm(Path(small), width // SHRINK, height // SHRINK, bytes(out))


def mean_colour(pixels: memoryview, width: int, left: int, top: int) -> bytes:
    """Return the mean colour of a square. Bytes are gamma-encoded, so the mean is taken of the decoded light."""
    square = b"".join(pixels[3 * (y * width + left) :][: 3 * SHRINK] for y in range(top, top + SHRINK))
    light = [sum((value / 255) ** 2.2 for value in square[colour::3]) / SHRINK**2 for colour in range(3)]
    return bytes(round(255 * mean ** (1 / 2.2)) for mean in light)


def read_ppm(file: Path) -> tuple[int, int, memoryview]:
    head, pixels = file.read_bytes().split(b"\n", 1)
    _, width, height, _ = head.split()
    return int(width), int(height), memoryview(pixels)


def write_ppm(file: Path, width: int, height: int, pixels: bytes) -> int:
    return file.write_bytes(b"P6 %d %d 255\n" % (width, height) + pixels)


def draw_pictures() -> None:
    FOLDER.mkdir(exist_ok=True)
    for number, name in enumerate(NAMES):
        row = b"".join(bytes((40 + 60 * number, 40 + x * 180 // WIDTH, 200 - 40 * number)) for x in range(WIDTH))
        write_ppm(FOLDER / f"{name}.ppm", WIDTH, HEIGHT, row * HEIGHT)


async def main() -> None:
    draw_pictures()
    async with app, app.worker(processes=2):
        handles = [await thumbnail.enqueue(f"{FOLDER}/{name}.ppm", f"{FOLDER}/{name}-small.ppm") for name in NAMES]
        showing = asyncio.create_task(show([handle.id for handle in handles]))
        sizes = [await handle.result(wait=None) for handle in handles]
        await showing
    for name, size in zip(NAMES, sizes, strict=True):
        print(f"{FOLDER}/{name}-small.ppm: {size} bytes")


async def show(ids: list[str]) -> None:
    """Print the progress of the jobs when it changes, until all have ended. On a terminal, rewrite one line."""
    said, live = "", sys.stdout.isatty()
    while True:
        jobs = [job for id in ids if (job := await app.queue(thumbnail.name).get(id))]
        far = [str(job.state) if job.progress is None else f"{job.progress} %" for job in jobs]
        line = "   ".join(f"{name} {percent}" for name, percent in zip(NAMES, far, strict=True))
        if line != said:
            print(f"\r\x1b[K{line}" if live else line, end="" if live else "\n", flush=True)
            said = line
        if all(job.state not in ("waiting", "running") for job in jobs):
            print(end="\n" if live else "")
            return
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    asyncio.run(main())
