"""A connection to SQLite whose COMMIT fails, as it does where the disk is full."""

from __future__ import annotations

import sqlite3


def fail_commits_of(connection: sqlite3.Connection) -> None:
    """The COMMIT of a transaction that inserts into `children` fails from now on.

    The table refers to `parents`, which is empty, and SQLite looks at that in the COMMIT.  A COMMIT
    that fails for it leaves the transaction open, as one that finds the database busy does.
    """
    connection.executescript(
        """
        PRAGMA foreign_keys = ON;
        CREATE TABLE parents (number INTEGER PRIMARY KEY);
        CREATE TABLE children (
            parent INTEGER REFERENCES parents (number) DEFERRABLE INITIALLY DEFERRED
        );
        """
    ).close()
