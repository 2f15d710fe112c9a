"""A server on loopback, for downloads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """Run a server on loopback. -> its address, and the requested paths"""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def do_GET(self) -> None:
            asked.append(self.path)
            self.close_connection = True
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/models", asked
        finally:
            server.shutdown()
            thread.join()


def answering(*parts: bytes, status: int = 200, **headers: object) -> Answer:
    """Send these headers, named with ``_`` for ``-``, and then the parts in order."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), str(value))
        request.end_headers()
        for part in parts:
            request.wfile.write(part)

    return answer


def whole(content: bytes) -> Answer:
    return part(content, len(content))


def part(content: bytes, n_bytes: int) -> Answer:
    """Announce all of the content, and send its beginning."""
    return answering(content[:n_bytes], Content_Length=len(content))
