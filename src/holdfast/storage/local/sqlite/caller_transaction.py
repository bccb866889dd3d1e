"""A step inside a transaction of the caller, on the caller's SQLite connection. Nothing of the caller is committed,
rolled back or left changed here.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import OptionError, StorageUnavailable
from holdfast.storage.local.sqlite.connection import is_busy, translate_sqlite_error


@contextmanager
def in_caller_transaction(transaction: object, path: Path) -> Generator[sqlite3.Connection, None, None]:
    """Yield the caller's connection, with its transaction begun. A step that fails is rolled back."""
    db = _connection(transaction)
    row_factory, text_factory = db.row_factory, db.text_factory
    db.row_factory, db.text_factory = None, str
    try:
        _check_file(db, path)
        with _transaction(db):
            yield db
    except sqlite3.Error as error:
        if is_busy(error):
            raise StorageUnavailable(
                f"{path} is locked by another transaction, or was written to since yours began to read; nothing of the"
                " call was applied: roll back and try again, from BEGIN IMMEDIATE"
            ) from error
        raise translate_sqlite_error(error, path) from error
    finally:
        db.row_factory, db.text_factory = row_factory, text_factory


def _connection(transaction: object) -> sqlite3.Connection:
    if not isinstance(transaction, sqlite3.Connection):
        kind = type(transaction)
        raise OptionError(
            f"{kind.__module__}.{kind.__qualname__} is not a transaction that a job could be part of here:"
            " pass the sqlite3.Connection that has it"
        )
    try:
        transaction.cursor().close()
    except sqlite3.ProgrammingError as error:
        raise OptionError(f"the connection cannot be used here: {error}") from error
    return transaction


def _check_file(db: sqlite3.Connection, path: Path) -> None:
    files = {name: file for _, name, file in db.execute("PRAGMA database_list")}
    try:
        same = os.path.samefile(files["main"], path)
    except OSError:
        same = False
    if not same:
        raise OptionError(
            f"the connection is to {files['main'] or 'a database in memory'}, the jobs are in {path}:"
            " both must be one file"
        )


@contextmanager
def _transaction(db: sqlite3.Connection) -> Generator[None, None, None]:
    """The caller's transaction, begun if Python would begin one for a statement of theirs. A savepoint in it, or the
    beginning of it, is what a step that fails goes back to."""
    begun_here = not db.in_transaction
    if begun_here and not _begins_by_itself(db):
        raise OptionError("the connection is in no transaction, and would commit the job at once: begin one first")
    db.execute("BEGIN IMMEDIATE" if begun_here else "SAVEPOINT holdfast")
    try:
        yield
        if not begun_here:
            db.execute("RELEASE holdfast")
    except BaseException:
        if db.in_transaction:  # SQLite itself ends it when the disk is full, and in other emergencies.
            for statement in ("ROLLBACK",) if begun_here else ("ROLLBACK TO holdfast", "RELEASE holdfast"):
                db.execute(statement)
        raise


def _begins_by_itself(db: sqlite3.Connection) -> bool:
    """Does Python's module begin transactions on this connection, for the caller to commit?"""
    legacy = getattr(sqlite3, "LEGACY_TRANSACTION_CONTROL", None)  # Since 3.12 it is one way of three.
    return getattr(db, "autocommit", legacy) == legacy and db.isolation_level is not None
