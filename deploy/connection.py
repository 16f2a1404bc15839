"""One HTTP connection, with limits that uvicorn lacks: for a request's header, and for a client that does not read.

An upgrade of the protocol is ignored, as HTTP allows: httptools would drop the body of a request that asks for one.
"""

import asyncio
import json
import socket
import struct
from http import HTTPStatus

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from deploy.openai_api.errors import INVALID, Answer, error_body

MAX_HEADER_BYTES = 64 << 10
HEADER_S = 10.0  # from the connection, or from a later request's first byte, until the header is whole
UNREAD_S = 30.0  # the client takes no byte of what waits for it
RULES = {
    HTTPStatus.BAD_REQUEST: "request: must be HTTP/1.0 or HTTP/1.1",
    HTTPStatus.REQUEST_TIMEOUT: f"header: must be whole within {HEADER_S:g} s",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: f"header: must be at most {MAX_HEADER_BYTES} bytes",
}
ACKED = struct.Struct("120xQ")  # tcpi_bytes_acked of Linux's struct tcp_info
HOP_HEADERS = (b"upgrade", b"http2-settings")


class Connection(HttpToolsProtocol):
    """Serve's HTTP server makes one for each connection (`deploy.headers.middlewares`)."""

    timer: asyncio.TimerHandle | None = None  # runs while a header is awaited
    in_header = False  # whether it has begun
    header_bytes = 0  # of the request that is being read
    unparsed = 0  # bytes since the parser last told anything
    refused: HTTPStatus | None = None
    watch: asyncio.TimerHandle | None = None  # runs while something waits for the client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_came()
        if self.watch is not None:
            self.watch.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        super().eof_received()  # the transport closes, when the client has read what waits for it
        self._watch_client()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self.unparsed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":  # it is an upgrade in itself
                self.refuse(HTTPStatus.BAD_REQUEST)
            else:
                self._without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self.refuse(self.refused or HTTPStatus.BAD_REQUEST)
            return
        if self.unparsed > MAX_HEADER_BYTES:
            self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self.timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_header()

    # The parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.in_header = True
        self.header_bytes = self.unparsed = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(name, value)

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():  # else another parser will read the header again
            self._header_came()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.header_bytes = self.unparsed = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _should_upgrade(self) -> bool:
        return False

    def _count(self, *parts: bytes) -> None:
        self.header_bytes += sum(map(len, parts)) + len(b": \r\n")
        self.unparsed = 0
        if self.header_bytes > MAX_HEADER_BYTES:
            self.refused = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise ValueError("the header is too long")  # the parser stops, and `data_received` answers

    def _without_upgrade(self, rest: bytes) -> None:
        """Read the request again as if it had not asked for an upgrade. `rest` is what came after its header."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name not in HOP_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    # Time

    def _await_header(self) -> None:
        self.timer = self.loop.call_later(HEADER_S, self._header_is_late)

    def _header_came(self) -> None:
        self.in_header = False
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _header_is_late(self) -> None:
        if self.in_header:
            self.refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:  # nobody waits for an answer
            self._close()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_client()

    def _close(self) -> None:
        self.transport.close()
        self._watch_client()  # it stays open until the client has read what waits for it

    def _watch_client(self) -> None:
        """End the connection when the client takes nothing for `UNREAD_S` seconds, while something waits for it."""

        def look(acked_before: int) -> None:
            self.watch = None
            if self.flow.write_paused or self.transport.is_closing():
                acked = self._acked()
                if acked == acked_before:
                    self.transport.abort()  # `close` would wait
                else:
                    self.watch = self.loop.call_later(UNREAD_S, look, acked)

        if self.watch is None:
            self.watch = self.loop.call_later(UNREAD_S, look, self._acked())

    def _acked(self) -> int:
        """How many bytes the client's machine has taken since the connection began."""
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKED.size)
        return int(ACKED.unpack(info)[0])

    def refuse(self, status: HTTPStatus) -> None:
        """Answer with an error, unless another answer has begun, and end the connection."""
        if self.cycle is None or self.cycle.response_complete:
            rule = RULES[status]
            body = json.dumps(
                error_body(rule, Answer(status, INVALID, status.phrase.lower().replace(" ", "_")))
            ).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self._close()
