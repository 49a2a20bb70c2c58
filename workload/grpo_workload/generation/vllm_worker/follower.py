"""A pod's workers of an engine over several pods: vLLM without its server, which the first of these pods runs.

vLLM's own `--headless` says nothing of how far it is. This answers on the engine's port once its workers have loaded
the model and have met all others, so that the pod is ready when the engine is.
"""

from __future__ import annotations

import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Kubelets ask every two seconds."""


def main() -> int:
    """Run the workers that vLLM's arguments describe until one of them ends. Returns 1 then."""
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    executor = MultiprocExecutor(config, monitor_workers=False)
    with ThreadingHTTPServer((args.host, args.port), _Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        executor.start_worker_monitor(inline=True)
        server.shutdown()
    return 1


if __name__ == "__main__":
    sys.exit(main())
