"""Copy committed checkpoints to `run.checkpoint_url`, in a thread.

Only the end of a run waits for an upload, and only for a limited time. A failed upload is counted
and causes a notice, but never ends the run. The newest checkpoint is copied first. Older ones are
not copied at all if the run commits checkpoints faster than they can be copied.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from actors.metrics import Metrics
from actors.trainer.checkpoint import CheckpointError
from service.config.sections import RunSettings
from service.config.tree import Config
from service.launch.remote_run import NotThisRun, upload_next
from service.launch.run_dir import RunDir
from service.remote_files import RemoteError
from service.store.errors import StoreError

log = logging.getLogger("rayloom.uploads")

# Delay before the second attempt; it doubles after each failure, and a random part of up to half of
# it is added. After the last attempt the thread waits for the next checkpoint.
FIRST_DELAY_S, MAX_ATTEMPTS = 2.0, 7
CLOSE_LIMIT_S = 600.0


class CheckpointUploads:
    """A thread that copies committed checkpoints to `run.checkpoint_url`.

    Call `begin_term` first, `wake` after each commit, and `close` last.
    """

    def __init__(self, run_dir: RunDir, settings: RunSettings, *, metrics: Metrics) -> None:
        assert settings.checkpoint_url is not None
        self._run_dir, self._settings, self._metrics = run_dir, settings, metrics
        self._url = settings.checkpoint_url
        self._notice: Callable[[str], None] = log.warning
        self._woken, self._ending, self._is_lost = (threading.Event() for _ in range(3))
        self._has_noticed = False
        self._newest_id = 0
        """Number of the newest commit that this process has copied."""
        self.uploading = ""
        """Name of the checkpoint that is being copied; empty while none is."""
        self._waiting: list[float] = []
        """Commit times of the checkpoints without a copy, in seconds since 1970, oldest first."""
        self._waiting_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)

    def begin_term(self, notice: Callable[[str], None]) -> None:
        """Start the thread, or wake a running thread, to copy all checkpoints that were not copied.

        Called when the run starts, and again when it continues from a checkpoint (a new term).
        notice: function that shows a notice to the user; the thread calls it.
        """
        self._notice = notice
        if self._thread.ident is None:
            self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Wake the thread after a checkpoint has been committed."""
        with self._waiting_lock:
            self._waiting.append(time.time())
            self._show_waiting()
        self._woken.set()

    def close(self, *, writes_rest: bool, limit_s: float = CLOSE_LIMIT_S) -> None:
        """End the thread; block for at most `limit_s` seconds.

        writes_rest: whether to copy the committed checkpoints that have no copy before the thread
        ends; False if another process has taken over the run.
        """
        if not writes_rest:
            self._is_lost.set()
        self._ending.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(limit_s)
        if self._thread.is_alive():
            self._notice(
                f"{self._url} lacks a checkpoint: its upload did not end within {limit_s:g} s; "
                "--resume completes it"
            )

    def _run(self) -> None:
        num_failures = 0
        while not self._is_lost.is_set():
            is_last = self._ending.is_set()
            if num_failures == 0 and not is_last:
                self._woken.wait()
                is_last = self._ending.is_set()
            self._woken.clear()
            if self._is_lost.is_set():
                return
            try:
                while self._upload() and not self._is_lost.is_set():
                    num_failures = 0
                num_failures = 0
            except NotThisRun as error:
                self._failed(error, next_try="this run copies no more")
                return
            except (RemoteError, StoreError, CheckpointError, OSError) as error:
                num_failures += 1
                self._failed(error, next_try="--resume tries again" if is_last else "trying again")
            if is_last:
                return
            if num_failures >= MAX_ATTEMPTS:
                num_failures = 0
            elif num_failures:
                delay_s = FIRST_DELAY_S * 2 ** (num_failures - 1)
                self._ending.wait(delay_s * random.uniform(1.0, 1.5))

    def _upload(self) -> bool:
        """Copy the newest checkpoint that has no copy; return False if there is none."""
        began, num_waiting = time.monotonic(), len(self._waiting)
        try:
            done = upload_next(
                self._run_dir,
                self._url,
                keep=self._settings.keep_checkpoints,
                keep_best=self._settings.keep_best,
                begin=self._begin,
            )
        finally:
            self.uploading = ""
        # The newest checkpoint is copied first, so that no older one waits any more.
        with self._waiting_lock:
            del self._waiting[:num_waiting]
            self._show_waiting()
        if done is None:
            return False
        self._has_noticed = False
        self._metrics.parts.upload_seconds.observe(time.monotonic() - began)
        self._metrics.parts.upload_bytes.inc(done.num_bytes)
        log.info("copied %s, sent %d bytes", done.commit.directory, done.num_bytes)
        if done.commit.id > self._newest_id:
            self._newest_id = done.commit.id
            self._metrics.run.uploaded_step.set(done.commit.step)
        return True

    def _show_waiting(self) -> None:
        self._metrics.run.upload_waiting_time.set(self._waiting[0] if self._waiting else None)

    def _begin(self, directory: str) -> None:
        self.uploading = directory

    def _failed(self, error: Exception, *, next_try: str) -> None:
        self._metrics.parts.upload_failures.inc()
        text = f"a checkpoint was not copied to run.checkpoint_url: {error}; {next_try}"
        if self._has_noticed:
            log.warning("%s", text)
        else:
            self._has_noticed = True
            self._notice(text)


def uploads_of(config: Config, run_dir: RunDir, *, metrics: Metrics) -> CheckpointUploads | None:
    """Return the thread that copies a run's checkpoints; None if `run.checkpoint_url` is null."""
    if config.run.checkpoint_url is None:
        return None
    return CheckpointUploads(run_dir, config.run, metrics=metrics)
