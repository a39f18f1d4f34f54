"""The history of this user's governed runs on this machine: an embedded SQLite database.

Each run adds the settings that it compared and what it chose; the next run of the same job begins
with that (`clocks/plan/known`), and `kilter learn` fits its predictor to all of them. Every row
says where its numbers come from: a reader names the label that it wants, so that simulated runs
never enter what is said of a measured one. Of each job's memory plans the last record is kept.

The database is opened for one short transaction at a time, so that any number of processes may use
it, and no descriptor of ours stays open in the program. Whatever is wrong with the file is one
`FileError`. A network file system is refused: SQLite's locks cannot be relied on there, and a
server that hangs would hang us.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from kilter.core.errors import FileError
from kilter.core.files import flaw_of, state_home
from kilter.core.label import Label
from kilter.core.past_run import PastRun

if TYPE_CHECKING:
    import sqlite3

APPLICATION_ID = 0x6B696C74
VERSION = 1
BUSY_S = 2.0
"""How long another process's transaction is waited for; one takes milliseconds."""
KEPT_RUNS = 50
"""One job has at most so many: one that runs every hour must not fill a disk over the years."""
MOST_HISTORY_BYTES = 1 << 30

_SCHEMA = """\
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    signature TEXT NOT NULL,
    label TEXT NOT NULL CHECK (label IN ('measured', 'replayed', 'simulated')),
    gpu TEXT NOT NULL,
    began TEXT NOT NULL,
    record TEXT NOT NULL
);
CREATE INDEX of_job ON run (signature, label, id);
"""
_MEMORY_SCHEMA = """\
CREATE TABLE IF NOT EXISTS memory (
    signature TEXT PRIMARY KEY,
    record TEXT NOT NULL
)
"""
"""It is made when it is needed first: a kilter that has no use for it reads the same file."""
NETWORK_FILE_SYSTEMS = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
        *("orangefs", "panfs", "pvfs2", "smb3", "smbfs"),
        *("fuse.beegfs", "fuse.ceph", "fuse.glusterfs", "fuse.sshfs"),
    )
)


def default_file(environ: Mapping[str, str]) -> Path:
    return state_home(environ) / "history.sqlite"


class History:
    """The runs in the database at `path`, which need not exist. Every call may raise `FileError`,
    and none waits for more than `BUSY_S`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, run: PastRun) -> None:
        """Keep what a run leaves; of one job the last `KEPT_RUNS` stay."""
        record = msgspec.json.encode(run).decode()
        with self._open(create=True) as database:
            database.execute(
                "INSERT INTO run (signature, label, gpu, began, record) VALUES (?, ?, ?, ?, ?)",
                (run.signature, run.label.value, run.gpu, run.began, record),
            )
            database.execute(
                "DELETE FROM run WHERE signature = ? AND label = ? AND id NOT IN (SELECT id FROM"
                " run WHERE signature = ? AND label = ? ORDER BY id DESC LIMIT ?)",
                # Python 3.12.1 warns of numbered parameters, where they are given in a sequence.
                2 * (run.signature, run.label.value) + (KEPT_RUNS,),
            )

    def last(self, signature: str, label: Label) -> PastRun | None:
        """The last run of a job that came to a decision."""
        for run in self._runs(
            "WHERE signature = ? AND label = ? ORDER BY id DESC", (signature, label.value)
        ):
            if run.chosen is not None:
                return run
        return None

    def runs(self, label: Label) -> list[PastRun]:
        """All runs with this label, the oldest first."""
        return self._runs("WHERE label = ? ORDER BY id", (label.value,))

    def keep_memory(self, signature: str, record: str) -> None:
        """In place of what was kept of this job's memory plans before."""
        with self._open(create=True) as database:
            database.execute(_MEMORY_SCHEMA)
            database.execute("INSERT OR REPLACE INTO memory VALUES (?, ?)", (signature, record))

    def memory(self, signature: str) -> str | None:
        """What was kept of this job's memory plans."""
        if not self.path.exists():
            return None
        with self._open(create=False) as database:
            made = "SELECT 1 FROM sqlite_schema WHERE name = 'memory'"
            kept = "SELECT record FROM memory WHERE signature = ?"
            if database.execute(made).fetchone() is None:
                return None
            row = database.execute(kept, (signature,)).fetchone()
        return None if row is None else str(row[0])

    def _runs(self, which: str, values: tuple[str, ...]) -> list[PastRun]:
        if not self.path.exists():
            return []
        with self._open(create=False) as database:
            rows = database.execute(f"SELECT id, record FROM run {which}", values).fetchall()
        runs = []
        for number, record in rows:
            try:
                runs.append(msgspec.json.decode(record, type=PastRun))
            except (msgspec.MsgspecError, UnicodeError, TypeError) as error:
                raise FileError(f"{self.path}: run {number} is not readable ({error})") from error
        return runs

    @contextlib.contextmanager
    def _open(self, *, create: bool) -> Iterator[sqlite3.Connection]:
        """The database inside a transaction."""
        try:
            import sqlite3
        except ImportError as error:
            raise FileError(f"{self.path}: this Python has no sqlite3 ({error})") from error
        self._check(create=create)
        try:
            with contextlib.closing(
                sqlite3.connect(
                    f"file:{quote(os.path.abspath(self.path))}?mode=rw",
                    uri=True,
                    timeout=BUSY_S,
                    isolation_level=None,
                )
            ) as database:
                database.execute("BEGIN IMMEDIATE" if create else "BEGIN")
                self._check_schema(database, create=create)
                yield database
                database.execute("COMMIT")
        except (sqlite3.OperationalError, sqlite3.IntegrityError) as error:
            raise FileError(f"{self.path}: the history cannot be used now ({error})") from error
        except sqlite3.Error as error:
            raise FileError(
                f"{self.path}: damaged ({error}); move it away, and a new history is begun"
            ) from error

    def _check(self, *, create: bool) -> None:
        """The file is there, nobody else's, and on a disk of this machine."""
        try:
            if create:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            kind = network_file_system(self.path)
            if kind is not None:
                raise FileError(
                    f"{self.path}: no history is kept on a network file system ({kind}); name a "
                    "file on a local disk with KILTER_HISTORY, or KILTER_HISTORY=off"
                )
            if create and not self.path.exists():
                os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            status = self.path.stat()
        except OSError as error:
            raise FileError(f"{self.path}: cannot be opened ({error.strerror})") from error
        flaw = flaw_of(status, max_bytes=MOST_HISTORY_BYTES, owners={os.geteuid()})
        if flaw is not None:
            raise FileError(f"{self.path}: {flaw}; no history is kept there")

    def _check_schema(self, database: sqlite3.Connection, *, create: bool) -> None:
        (owner,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (tables,) = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables == 0 and create:
            for statement in _SCHEMA.split(";\n"):
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {VERSION}")
        elif owner != APPLICATION_ID:
            raise FileError(
                f"{self.path}: a database, but no history of kilter; nothing was changed"
            )
        elif version != VERSION:
            raise FileError(
                f"{self.path}: a history of version {version}, this kilter keeps version {VERSION};"
                " choose another file with KILTER_HISTORY"
            )


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that `path` is on, by Linux's list of mounts; None for a
    local one, and where there is no such list."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real = os.path.realpath(path)
    best, found = -1, None
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].encode(errors="surrogateescape").decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # a later mount covers an earlier one
            best, found = len(point), after.split(" ")[0]
    return found if found in NETWORK_FILE_SYSTEMS else None
