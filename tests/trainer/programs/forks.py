"""Processes that a program forks in place of fresh ones: what it has loaded, they need not load again."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread
import inspect
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def fork(run: Callable[[], object], environ: Mapping[str, str], *, stdout: int, stderr: int) -> int:
    """Fork a process that calls `run` in a session of its own, and ends as the interpreter does; return its id.

    It has no files of this process but its output, none of its threads, and none of its handlers of signals. This may
    be called below a running event loop, and in any thread: of what is on the stack, nothing runs in the new process.
    """
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        _forget_all(stdout, stderr)
        os.environ.clear()
        os.environ.update(environ)
        run()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_all(stdout: int, stderr: int) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(None)
    concurrent.futures.thread._threads_queues.clear()  # type: ignore[attr-defined]
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)


class ForkedPython(subprocess.Popen[bytes]):
    """`python SCRIPT ARGUMENT...`, forked: for programs whose output goes to files."""

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *args).arguments  # type: ignore[attr-defined]
        _, script, *rest = given["args"]

        def run() -> None:
            sys.argv = [script, *rest]
            runpy.run_path(script, run_name="__main__")

        self.pid = fork(run, given["env"], stdout=given["c2pwrite"], stderr=given["errwrite"])
        self._child_created = True
