"""The location of a run's database: a URL without a password, chosen and recorded at the start.

The URL is sqlite:////DIR/rayloom.db, or postgresql+psycopg://USER@HOST:PORT/DATABASE?schema=RUN,
where each run has its own schema. No file, log, message or process title of Rayloom contains a
password. A process takes password, server, user and TLS options from the URL in the variable
RAYLOOM_DATABASE_URL. The variable RAYLOOM_DATABASE_URL_FILE can name a file with this URL instead.
The file is read again for new connections (`service.store.database_engines`). Without these
variables, a process uses the recorded URL and the password sources of PostgreSQL's own clients
(PGPASSWORD, ~/.pgpass).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from service.access.secret_files import read_secret
from service.store.errors import StoreError

VARIABLE = "RAYLOOM_DATABASE_URL"
FILE_VARIABLE = "RAYLOOM_DATABASE_URL_FILE"
DATABASE = "rayloom.db"
POSTGRESQL = "postgresql+psycopg"
_ACCEPTED = ("postgresql", "postgres", POSTGRESQL)
_MAX_NAME_BYTES = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """A user's options for the store of a new run."""

    state_dir: Path | None = None
    """The directory of rayloom.db; if it is None, the run directory is used."""
    database_url: str | None = None
    """URL of a PostgreSQL database.

    If this and state_dir are None, the environment's URL is used, if there is one.
    """

    def check(self) -> None:
        """Check that at most one location is given, and that its URL is valid.

        Raises: StoreError.
        """
        if self.state_dir is not None and self.database_url is not None:
            raise StoreError(
                "--state-dir and --database-url: got both, expected one of them: a directory for "
                "SQLite, or a URL for PostgreSQL"
            )
        if self.database_url is not None:
            url = _parsed(self.database_url, source="--database-url")
            if _password_of(url) is not None:
                raise StoreError(
                    "--database-url: got a password, which every user of this machine can read in "
                    f"the list of processes; give the URL in {VARIABLE}, or only the password in "
                    "PGPASSWORD or ~/.pgpass"
                )
        elif self.state_dir is None and (given := given_url()):
            _parsed(given, source=_source())


def chosen_url(run_dir: Path, run_id: str, options: StoreOptions) -> str:
    """Return the URL of the database for a new run, without a password. Raises: StoreError."""
    options.check()
    if options.state_dir is not None:
        return sqlite_url(options.state_dir.expanduser().absolute())
    source = "--database-url" if options.database_url else _source()
    given = options.database_url or given_url()
    if not given:
        return sqlite_url(run_dir)
    url = _parsed(given, source=source).set(drivername=POSTGRESQL)
    url = url.update_query_dict({"schema": schema_name(run_id)})
    return _without_password(url).render_as_string(hide_password=False)


def sqlite_url(directory: Path) -> str:
    return f"sqlite:///{directory / DATABASE}"


def schema_name(run_id: str) -> str:
    """Return the name of the PostgreSQL schema for a run.

    A long run id is shortened and gets a digest. Otherwise PostgreSQL would cut it, and two runs
    might have the same schema.
    """
    encoded = run_id.encode()
    if len(encoded) <= _MAX_NAME_BYTES:
        return run_id
    digest = blake2b(encoded, digest_size=8).hexdigest()
    return f"{encoded[:40].decode(errors='ignore')}-{digest}"


def record(file: Path, url: str) -> None:
    """Write the URL into the run directory, unless that directory contains the database.

    A run directory that contains its database needs no record, and can therefore be moved. Raises:
    OSError.
    """
    if url == sqlite_url(file.parent):
        file.unlink(missing_ok=True)
    else:
        part = file.with_name(f"{file.name}.part")
        part.write_text(json.dumps({"url": url}, indent=1) + "\n")
        part.replace(file)


def recorded_url(file: Path) -> str:
    """Return the URL of a run's database from the record in the run directory.

    If there is no record, the database is in the run directory. Raises: StoreError for a record
    that cannot be read.
    """
    try:
        tree = json.loads(file.read_text())
        url = make_url(tree["url"])
        if url.drivername not in ("sqlite", POSTGRESQL) or not url.database:
            raise ValueError(f"a URL of {url.drivername}")
    except FileNotFoundError:
        return sqlite_url(file.parent)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ArgumentError) as error:
        raise StoreError(
            f"{file} cannot be read ({type(error).__name__}); expected the run's database, such as "
            '{"url": "postgresql+psycopg://USER@HOST/DATABASE?schema=RUN"}; restore it from a copy'
        ) from error
    return url.render_as_string(hide_password=False)


def sqlite_file(url: str | URL) -> Path | None:
    """Return the file of an SQLite database; None for another database."""
    parsed = make_url(url)
    is_sqlite = parsed.get_backend_name() == "sqlite" and parsed.database
    return Path(parsed.database) if is_sqlite and parsed.database else None


def shown(url: str | URL) -> str:
    """Return a database's location for people: SQLite's file, or the URL without its password."""
    if (file := sqlite_file(url)) is not None:
        return str(file)
    return _without_password(make_url(url)).render_as_string(hide_password=True)


def check_local(url: str | URL) -> None:
    """Check that an SQLite file is not on a network or FUSE file system. Raises: StoreError."""
    file = sqlite_file(url)
    if file is not None and (name := refused_filesystem(file.parent)) is not None:
        raise StoreError(
            f"the database {file} would be on {name}, where SQLite's locks and shared memory "
            "are not reliable; expected a local disk: give a directory on one with --state-dir, "
            f"or a PostgreSQL database with --database-url or {VARIABLE}"
        )


def connection_url(url: URL, environ: Mapping[str, str] = os.environ) -> URL:
    """Return the URL to connect with: the database of `url`, on the server that `environ` gives.

    The host, port, user, password and TLS options come from the URL in `environ` (`given_url`),
    because they may change between two starts. Host and password are never from different URLs, so
    a password is sent only to its own server.

    Returns: `url` unchanged if it has a password, if `environ` has no URL, or if the URL in
    `environ` names another database. Raises: StoreError.
    """
    if url.password is not None:
        return url
    given = given_url(environ)
    if not given:
        return url
    own = _parsed(given, source=_source(environ))
    return url if own.database != url.database else _at_server_of(own, url)


def changed_url(url: URL, given: str) -> URL:
    """Return the URL to connect with after the file with the database's URL has changed.

    The result has the database of `url`, and the server and the user of `given`.

    given: the new text of the file. Raises: ValueError if `given` is not a URL, or names another
    database than `url`.
    """
    try:
        own = _parsed(given, source=FILE_VARIABLE)
    except StoreError as error:
        raise ValueError(str(error)) from None
    if own.database != url.database:
        raise ValueError(
            f"got the URL of the database {own.database}, expected {url.database}: a run stays in "
            "its database"
        )
    return _at_server_of(own, url)


def _at_server_of(own: URL, url: URL) -> URL:
    connection = _without_password(own).set(drivername=url.drivername, password=_password_of(own))
    schema = {"schema": url.query["schema"]} if "schema" in url.query else {}
    return connection.difference_update_query(["schema"]).update_query_dict(schema)


def url_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file that RAYLOOM_DATABASE_URL_FILE names; None if the variable is not set."""
    named = environ.get(FILE_VARIABLE)
    return Path(named) if named else None


def given_url(environ: Mapping[str, str] = os.environ) -> str:
    """Return the database's URL from the environment's variable or file; empty if there is none.

    Raises: StoreError.
    """
    given, file = environ.get(VARIABLE, ""), url_file(environ)
    if file is None:
        return given
    if given:
        raise StoreError(
            f"{VARIABLE} and {FILE_VARIABLE}: got both, expected one of them: a URL, or the path "
            "of a file with it; leave one out"
        )
    try:
        return read_secret(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"{FILE_VARIABLE} {file}: {reason}; expected a file with "
            "postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        ) from error


def _source(environ: Mapping[str, str] = os.environ) -> str:
    return VARIABLE if url_file(environ) is None else FILE_VARIABLE


def _parsed(text: str, *, source: str) -> URL:
    """Parse a URL; raise StoreError if it is not the URL of a PostgreSQL database.

    source: the variable that has the URL, for the error.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        url = None
    if url is None or url.drivername not in _ACCEPTED or not url.database:
        got = "no URL" if url is None else f"a URL of {url.drivername}"
        if url is not None and url.drivername in _ACCEPTED:
            got = "a URL without a database"
        # The URL may contain a password, so the error does not show it.
        raise StoreError(
            f"{source}: got {got}, expected postgresql://USER@HOST:PORT/DATABASE; for SQLite on a "
            "local disk use --state-dir"
        )
    return url


def _password_of(url: URL) -> str | None:
    # libpq also accepts the password as a parameter.
    in_query = url.query.get("password")
    return url.password or (in_query if isinstance(in_query, str) else None)


def _without_password(url: URL) -> URL:
    return URL.create(
        url.drivername,
        username=url.username,
        host=url.host,
        port=url.port,
        database=url.database,
        query={key: value for key, value in url.query.items() if key != "password"},
    )


# File systems on which SQLite is not reliable.
#
# SQLite's log needs memory that all its processes share, and reliable locks. Network file systems
# and FUSE guarantee neither: two hosts that both wrote left a damaged database, without an error.
# f_type of statfs(2), from the Linux kernel's magic.h and the file systems' own sources.
REFUSED = {
    0x00006969: "NFS",
    0x0000517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x65735546: "FUSE",
    0x01021997: "9p",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0xAAD7AAEA: "PanFS",
    0x013111A8: "IBRIX",
    0x0000564C: "NCP",
    0x20030528: "OrangeFS",
    0x786F4256: "VirtualBox's shared folders",
    0xBACBACBC: "VMware's shared folders",
}


def refused_filesystem(path: Path) -> str | None:
    """Return the name of the file system at `path` if SQLite may not be used on it; else None.

    If the path does not exist yet, its nearest existing parent is checked. On systems other than
    Linux the result is None.
    """
    kind = _filesystem_type(path)
    return None if kind is None else REFUSED.get(kind)


def _filesystem_type(path: Path) -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    # os.statvfs does not return the type. The type is the first word of the structure that statfs
    # fills; REFUSED has it as 32 unsigned bits, whatever the word's width and sign.
    libc = ctypes.CDLL(None, use_errno=True)
    found = (ctypes.c_long * 64)()
    for each in (path, *path.absolute().parents):
        if libc.statfs(os.fsencode(each), found) == 0:
            return found[0] & 0xFFFFFFFF
    return None
