"""A run's directory: its files' paths, its creation, and the checks before a start or resume."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from logging.handlers import RotatingFileHandler
from pathlib import Path

from actors.trainer.checkpoint import CLAIM
from actors.trainer.tiny.built import MARKER
from service.config.algorithm_checks import schedule_warnings
from service.config.file import (
    FUNCTIONS,
    ConfigError,
    dump_config,
    load_config,
    parse_config,
    read_yaml,
)
from service.config.preflight import check_with_model, check_without_model
from service.config.resumable import refused_changes, refused_temperature
from service.config.tree import Config
from service.config.trial import Trial
from service.launch.model_directories import build_tiny
from service.launch.sources import check_sources, sources_of, write_sources
from service.store.errors import StoreError
from service.store.leases import check_kind
from service.store.place import (
    DATABASE,
    StoreOptions,
    check_local,
    chosen_url,
    record,
    recorded_url,
    shown,
    sqlite_file,
)
from service.store.read_only import ReadOnlyStore, has_run
from service.store.tables import RunKind

_logger = logging.getLogger(__name__)
# Number of bytes to write as a test: more than the last block of a full disk can have free.
PROBE_BYTES = 4096
# A file with fewer characters is damaged.
MIN_SECRET_CHARACTERS = 32
_RUN_ID = re.compile(r"rayloom-(.+)-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """The paths of a run's files, all in the run's directory; this class creates no files."""

    path: Path
    patience_s: float = 0.0
    """Longest time in seconds to wait for a database that does not answer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path.resolve())

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def sources_file(self) -> Path:
        """File that records to which tasks and modules the configuration referred at the start."""
        return self.path / "sources.json"

    @property
    def store_file(self) -> Path:
        """File with the location of the run's database.

        The file is missing if the database is in the run's directory.
        """
        return self.path / "store.json"

    @property
    def secret_file(self) -> Path:
        """File with the secret from which the keys of sessions are derived if the API needs no key.

        If a client has an API key, the keys of its sessions are derived from the API key instead.
        """
        return self.path / "session.key"

    @property
    def database_url(self) -> str:
        """Location of the run's database, without a password. Raises: StoreError."""
        return recorded_url(self.store_file)

    @property
    def database_file(self) -> Path:
        """File of the run's database, unless `store_file` records another location."""
        return self.path / DATABASE

    def has_run(self) -> bool:
        """Return whether a run was started here, which means that its database exists.

        Raises: StoreError if the database does not answer.
        """
        url = self.database_url
        if (file := sqlite_file(url)) is not None:
            return os.path.exists(file)
        return has_run(url, patience_s=self.patience_s)

    def may_have_run(self) -> bool:
        """Return the result of `has_run`, or True if the database does not answer."""
        try:
            return self.has_run()
        except StoreError:
            return True

    @contextmanager
    def looked_into(
        self,
        *,
        patience_s: float | None = None,
        may_be_older: bool = False,
        any_format: bool = False,
    ) -> Iterator[ReadOnlyStore]:
        """Open the run's database for reading, and close it at the end of the `with` block.

        Args: patience_s: seconds to wait for the database; None for `RunDir.patience_s`.
        may_be_older, any_format: see `ReadOnlyStore`. Raises: StoreError.
        """
        store = ReadOnlyStore(
            self.database_url,
            patience_s=self.patience_s if patience_s is None else patience_s,
            may_be_older=may_be_older,
            any_format=any_format,
        )
        try:
            yield store
        finally:
            store.close()

    @property
    def tiny_model(self) -> Path:
        return self.path / "model"

    @property
    def functions(self) -> Path:
        """Directory of the user's functions and data rows that `rayloom.train` stores."""
        return self.path / FUNCTIONS

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def chats_file(self) -> Path:
        """File with the digest of the training chats; only a directory of `rayloom sft` has it."""
        return self.path / "chats.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def log_file(self) -> Path:
        return self.path / "run.log"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"


def default_run_dir(config: Config) -> RunDir:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return RunDir(path=Path("runs") / f"{config.run.name}-{stamp}")


def check_new(run_dir: RunDir) -> None:
    """Check that a new run may use the directory.

    Raises: ConfigError unless the directory is missing, empty or has only files of an interrupted
    start.
    """
    with _refusing(run_dir):
        if not run_dir.path.exists():
            return
        if not run_dir.path.is_dir():
            raise ConfigError(
                f"run directory {run_dir.path} is a file; expected a new directory: choose another "
                "--run-dir"
            )
        if run_dir.has_run():
            raise ConfigError(
                f"run directory {run_dir.path} holds a run and is not empty; expected a new one: "
                f"choose another --run-dir, or resume that run with --resume {run_dir.path}"
            )
        others = sorted(
            path.name for path in run_dir.path.iterdir() if not _is_of_a_start(path, run_dir)
        )
    if others:
        raise ConfigError(
            f"run directory {run_dir.path} is not empty (it holds {', '.join(others[:3])}); "
            "expected a new one: choose another --run-dir"
        )


def check_no_sft(run_dir: RunDir, *, what: str) -> None:
    """Raise ConfigError if `rayloom sft` (supervised fine-tuning) has made the directory.

    Such a directory has no database, and commands for runs cannot use it.
    Args: what: the option or command that names the directory, for the message; may be empty.
    """
    if run_dir.chats_file.is_file():
        raise ConfigError(
            f"{f'{what} {run_dir.path}'.strip()}: got the directory of a supervised training, "
            "expected the directory of a run; continue the training with `rayloom sft --resume "
            f"{run_dir.path}`, or train its export with `rayloom train --model`"
        )


@contextmanager
def prepared_directory(run_dir: RunDir) -> Iterator[None]:
    """Create and lock a run's directory; the `with` block prepares the run in it.

    If there is no run at the end of the block, remove what was created.
    Raises: ConfigError if another start uses the directory, or if it cannot be written.
    """
    # os.path.exists, because Path.exists raises for a path that cannot be created.
    made = [path for path in (run_dir.path, *run_dir.path.parents) if not os.path.exists(path)]
    had_model = os.path.exists(run_dir.tiny_model)
    try:
        with _refusing(run_dir):
            run_dir.path.mkdir(parents=True, exist_ok=True)
            _check_writable(run_dir.path)
        with held_alone(run_dir):
            try:
                yield
            finally:
                if not run_dir.may_have_run():
                    _clear(run_dir, had_model=had_model)
    finally:
        with suppress(OSError):
            for directory in made:
                directory.rmdir()


def _check_writable(directory: Path) -> None:
    """Raise OSError if the directory cannot be written, for example because the disk is full."""
    # On most file systems the file has no name, so a process that is killed here leaves no file.
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def held_alone(run_dir: RunDir) -> Iterator[None]:
    """Lock the directory during the `with` block, so that no other process can start in it.

    A directory that may already have a run is not locked: a lease in the run's database allows
    only one process at a time to write. Raises: ConfigError if another process holds the lock.
    """
    if run_dir.may_have_run():
        yield
        return
    directory = os.open(run_dir.path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        raise ConfigError(
            f"run directory {run_dir.path}: another start is using it; expected a separate "
            "directory for each run: wait for that start, or choose another --run-dir"
        ) from None
    except OSError:
        # Without file locks, concurrent starts cannot be detected.
        pass
    try:
        yield
    finally:
        os.close(directory)


def _clear(run_dir: RunDir, *, had_model: bool) -> None:
    """Remove a start's files. had_model: whether the tiny model was there before, and is kept."""
    if not had_model:
        shutil.rmtree(run_dir.tiny_model, ignore_errors=True)
    files = (run_dir.config_file, run_dir.sources_file, run_dir.store_file, run_dir.secret_file)
    for file in files:
        with suppress(OSError):
            file.unlink()


def session_secret(run_dir: RunDir) -> str:
    """Return the secret from which the keys of the run's sessions are derived (`secret_file`).

    The first call creates the file, which only the file's owner may read.
    Raises: ConfigError if the file cannot be read or written, or is damaged.
    """
    file = run_dir.secret_file
    with _refusing(run_dir):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{file.name}.part")
            part.unlink(missing_ok=True)
            with open(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as made:
                made.write(secrets.token_urlsafe(32))
                made.flush()
                os.fsync(made.fileno())
            part.replace(file)
        secret = file.read_bytes().decode("latin-1")
    # With an empty secret, an agent could compute the key that rewards its session.
    if len(secret) < MIN_SECRET_CHARACTERS or not (secret.isascii() and secret.isprintable()):
        raise ConfigError(
            f"{file} is damaged: got {len(secret)} characters, expected at least "
            f"{MIN_SECRET_CHARACTERS} printable ones; restore it, or remove it: sessions then "
            "continue with their existing keys"
        )
    return secret


def write_config(run_dir: RunDir, config: Config) -> None:
    """Write the configuration to the run's directory. Raises: ConfigError if that fails."""
    with _refusing(run_dir):
        run_dir.config_file.write_text(dump_config(config))


@contextmanager
def _refusing(run_dir: RunDir) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # os.path.isfile, because Path.is_file raises for a path that cannot be created.
        is_there = os.path.isfile(run_dir.config_file)
        remedy = "free space or correct permissions" if is_there else "choose another --run-dir"
        raise ConfigError(
            f"run directory {run_dir.path} cannot be used ({error.strerror or error}); expected "
            f"one that can be made and written, on a disk with space: {remedy}"
        ) from error
    except StoreError as error:
        raise ConfigError(f"run directory {run_dir.path}: {error}") from error


def _is_of_a_start(path: Path, run_dir: RunDir) -> bool:
    """Return whether an interrupted start may have left this path."""
    if path == run_dir.tiny_model:
        return (path / MARKER).is_file()
    if path in (run_dir.store_file, run_dir.sources_file, run_dir.functions):
        return True
    if path.name.startswith(run_dir.secret_file.name):
        return True
    if path.name.startswith(f".{run_dir.tiny_model.name}."):
        # A model that a killed start was building.
        return True
    if path != run_dir.config_file:
        return False
    # A user's own config.yaml does not have exactly this form, and must not be overwritten.
    try:
        # Not `load_config`, which changes the path of stored rows if the directory was moved.
        return path.read_text() == dump_config(parse_config(read_yaml(path), source=str(path)))
    except (ConfigError, UnicodeDecodeError):
        return False


def check_resumable(run_dir: RunDir, config: Config, *, kind: RunKind = RunKind.TRAIN) -> None:
    """Check that the run in a directory can be resumed with this configuration.

    Args: config: the configuration, which may differ from the run's own only in some settings.
    kind: the kind of run that is expected. Raises: ConfigError.
    """
    # The database comes first: the configuration of another format may be unreadable too.
    _check_database(run_dir, kind)
    if not run_dir.config_file.is_file():
        raise ConfigError(
            f"--resume {run_dir.path}: there is no run; expected a directory with its "
            "config.yaml, as `rayloom train` makes it"
        )
    try:
        before = load_config(run_dir.config_file)
    except (ConfigError, OSError) as error:
        raise ConfigError(
            f"--resume {run_dir.path}: the run's own configuration cannot be used "
            f"({' '.join(str(error).split())}); restore it, or start a new run"
        ) from error
    try:
        with run_dir.looked_into() as store:
            num_kept = store.num_kept_samples()
    except StoreError as error:
        raise ConfigError(f"--resume {run_dir.path}: {error}") from error
    refused = refused_changes(before, config)
    if refused := refused or refused_temperature(before, config, num_kept_samples=num_kept):
        raise ConfigError(
            f"--resume {run_dir.path}: {refused[0]}; use the run's own configuration "
            f"({run_dir.config_file}), or start a new run"
        )


def _check_database(run_dir: RunDir, kind: RunKind) -> None:
    """Raise ConfigError if the database is missing, damaged, or of another run or kind."""
    try:
        place = shown(run_dir.database_url)
        check_local(run_dir.database_url)
        if not run_dir.has_run():
            raise ConfigError(
                f"--resume {run_dir.path}: there is no run; expected one in the database {place},"
                " as `rayloom train` makes it; if it was moved, name its new location in "
                f"{run_dir.store_file.name}"
            )
        with run_dir.looked_into(may_be_older=True) as store:
            store.check()
            check_kind(store.kind(), kind)
            is_blank = store.newest_term() == 0
            _check_not_a_copy(run_dir, store.directory())
    except StoreError as error:
        raise ConfigError(f"--resume {run_dir.path}: {error}") from error
    # A term that ended before its first checkpoint leaves only its claim.
    written = (*run_dir.checkpoints.glob("step-*"), *run_dir.checkpoints.glob(CLAIM))
    if is_blank and written:
        raise ConfigError(
            f"--resume {run_dir.path}: the database {place} is empty, but a run has written "
            f"{written[0]}; restore a copy of the database, or start a new run"
        )


def _check_not_a_copy(run_dir: RunDir, directory: str) -> None:
    """Raise ConfigError if this is a copy of a run's directory that still exists.

    directory: the run's directory as recorded in the database.
    """
    original = RunDir(path=Path(directory or run_dir.path))
    if original.path == run_dir.path or not original.config_file.is_file():
        return
    if original.database_url == run_dir.database_url:
        raise ConfigError(
            f"--resume {run_dir.path}: its database {shown(run_dir.database_url)} belongs to the "
            f"run in {original.path}, of which this directory is a copy; expected one directory "
            f"for a database: use --resume {original.path}, or, if the run has moved "
            "here, remove the old directory"
        )


def place_store(run_dir: RunDir, run_id: str, options: StoreOptions) -> None:
    """Choose and record the location of a new run's database; do nothing if a run exists.

    Raises: ConfigError if the location cannot be used or holds another run.
    """
    if run_dir.may_have_run():
        return
    try:
        url = chosen_url(run_dir.path, run_id, options)
        check_local(url)
        file = sqlite_file(url)
        if file is None:
            is_taken = has_run(url, patience_s=run_dir.patience_s)
            remedy = "drop that schema, or choose another --run-dir"
        else:
            is_taken, remedy = file.exists(), "choose another --state-dir"
            file.parent.mkdir(parents=True, exist_ok=True)
        if is_taken:
            raise ConfigError(
                f"the database {shown(url)} holds a run already, expected a place for a new one: "
                f"{remedy}"
            )
        with _refusing(run_dir):
            record(run_dir.store_file, url)
    except (StoreError, OSError) as error:
        raise ConfigError(str(error)) from error


@contextmanager
def prepared_run(
    config: Config,
    run_dir: RunDir,
    *,
    is_local: bool,
    store: StoreOptions,
    check_stop: Callable[[], None] = lambda: None,
    begin: Callable[[str], None] = lambda _stage: None,
    trial: Trial = Trial(),  # noqa: B008  # frozen
    tell: Callable[[str], None] = _logger.warning,
) -> Iterator[str]:
    """Check the configuration, and prepare the run's directory; the `with` block starts the run.

    Build the tiny model if it is missing. If no run has begun at the end of the block, remove the
    directory.
    Args: is_local: whether the run uses only this machine. store: location of a new run's database.
    check_stop: called after each slow stage; if it raises, the start ends. begin: called with the
    name of each stage. trial: selects which of the user's own functions are called as a check.
    tell: called with each warning.
    Yields: the path or hub name of the policy's model. Raises: ConfigError.
    """
    for warning in schedule_warnings(config):
        tell(warning)
    begin("reading rows")
    observations = check_without_model(config, is_local=is_local, trial=trial, tell=tell)
    sources = sources_of(config)
    with prepared_directory(run_dir):
        place_store(run_dir, run_id_of(config, run_dir), store)
        begin("building the model" if config.model.tiny else "looking for the model")
        model = model_path(config, run_dir)
        check_stop()
        begin("checking the model and the prompts")
        has_run = run_dir.may_have_run()
        check_with_model(
            config, observations, model_path=model, was_loaded=has_run, tell_template=tell
        )
        if has_run:
            check_sources(run_dir.sources_file, sources)
        else:
            # If a run resumes, the supervisor writes the file after it has got the lease.
            write_config(run_dir, config)
            with _refusing(run_dir):
                write_sources(run_dir.sources_file, sources)
        yield model


def run_id_of(config: Config, run_dir: RunDir) -> str:
    """Return a run's id, made of the run's name and a digest of the directory's path.

    The id is the same at every start, so that a start finds the actors that a dead run left.
    """
    digest = blake2b(str(run_dir.path).encode(), digest_size=4).hexdigest()
    return f"rayloom-{config.run.name}-{digest}"


def run_name_of(run_id: str) -> str | None:
    """Return the `run.name` in a run's id; None if the string is not a run's id."""
    found = _RUN_ID.fullmatch(run_id)
    return found[1] if found else None


def model_path(config: Config, run_dir: RunDir) -> str:
    """Return the directory or hub name of the policy's model; build the tiny model if missing.

    Raises: ConfigError.
    """
    if config.model.tiny is not None:
        # A run resumes with the model that it began with; the imports of a build take seconds.
        if not (run_dir.may_have_run() and (run_dir.tiny_model / "config.json").is_file()):
            build_tiny(run_dir.tiny_model, config.model.tiny)
        return str(run_dir.tiny_model)
    assert config.model.path is not None
    path = Path(config.model.path).expanduser()
    return str(path.absolute()) if path.is_dir() else config.model.path


# A step writes a few hundred bytes: at least the newest hundred thousand steps are kept.
LOG_BYTES, OLD_LOGS = 32 * 2**20, 3


def configure_logging(path: str) -> None:
    """Write Rayloom's log to a file, one line for each event, with the event's time in UTC.

    A full file is renamed to run.log.1, older files to run.log.2 and so on; the oldest is removed.
    Nothing is written to stdout, because Ray would store each line again in the node's logs.
    """
    lines = logging.Formatter(
        "%(asctime)s %(levelname)-7s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"
    )
    lines.converter = time.gmtime
    root = logging.getLogger("rayloom")
    root.setLevel(logging.INFO)
    root.propagate = False
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=OLD_LOGS)
    handler.setFormatter(lines)
    root.addHandler(handler)
