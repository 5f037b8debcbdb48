#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stands in for `vllm` in the harness's tests: the same front end, no model, milliseconds to start.

FAKE_MODE: "" serves; "die" prints a reason and exits with 3; "hang" never listens; "stubborn"
serves and ignores SIGTERM. Every mode but "die" has a child process, which ends with its parent
(or, when stubborn, does not).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = """\
# TYPE vllm:kv_offload_load_bytes counter
vllm:kv_offload_load_bytes_total{engine="0",direction="in"} 7.0
vllm:kv_offload_load_bytes_total{engine="1",direction="in"} 5.0
# TYPE vllm:kv_offload_stores_pending gauge
vllm:kv_offload_stores_pending{engine="0"} %s
"""


class Front(BaseHTTPRequestHandler):
    """Answers the four requests that the harness makes."""

    def do_GET(self) -> None:
        pages = {"/health": "", "/metrics": METRICS % os.environ.get("FAKE_PENDING", "0")}
        self._answer("text/plain", pages[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["max_tokens"] == 0:
            self._answer("text/event-stream", 'data: {"error": "no tokens asked for"}\n\n')
            return
        events = [
            {"choices": [{"text": "", "token_ids": []}]},
            {"choices": [{"text": "a", "token_ids": [1], "logprobs": {"token_logprobs": [-0.5]}}]},
            {"choices": [{"text": "b", "token_ids": [2], "logprobs": {"token_logprobs": [-1.5]}}]},
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": len(body["prompt"]),
                    "prompt_tokens_details": {"cached_tokens": 2},
                },
            },
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._answer("text/event-stream", "".join(lines) + "data: [DONE]\n\n")

    def _answer(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Keep the log to what the tests look for."""


def main() -> None:
    mode = os.environ.get("FAKE_MODE", "")
    if mode == "die":
        print("the engine could not be started, reason 42")
        sys.exit(3)
    lasting = "import signal; signal.pause()" if mode == "stubborn" else "input()"
    subprocess.Popen(
        [sys.executable, "-c", lasting], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "hang":
        signal.pause()
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Front).serve_forever()


if __name__ == "__main__":
    main()
