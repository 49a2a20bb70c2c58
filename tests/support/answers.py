"""A server of JSON in a thread."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@contextmanager
def answering(answer: Callable[[Any, Mapping[str, str]], tuple[int, Any]]) -> Iterator[str]:
    """Yield the URL of a server; `answer` makes the status and the body of an answer of what is posted, and headers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, body = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.headers)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
