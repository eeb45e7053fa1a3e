"""An OpenAI-compatible server that emits tokens at once; ``python fake_server.py PORT`` runs it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


class FakeServer:
    """Answers completions and chat with as many tokens as asked for; keeps the request bodies.

    delay_s: pause before each token. fail: completions get HTTP 400. break_after: closes the
    connection after that many events. split: writes events in two halves, to try the parser.
    """

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        fail: bool = False,
        break_after: int | None = None,
        split: bool = False,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._delay_s = delay_s
        self._fail = fail
        self._break_after = break_after
        self._split = split

    async def start(self, port: int = 0) -> asyncio.Server:
        """A listening server on 127.0.0.1."""
        return await asyncio.start_server(self._serve, "127.0.0.1", port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().partition("content-length:")[2].split()[0])
                body = await reader.readexactly(length)
                await self._answer(head.split()[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/health":
            return _plain(writer, 200, {})
        if path == "/v1/models":
            return _plain(writer, 200, {"data": [{"id": "fake"}]})
        if not path.endswith("completions"):
            return _plain(writer, 404, {"error": "no such path"})
        if self._fail:
            return _plain(writer, 400, {"error": {"message": "refused"}})
        request = json.loads(body)
        self.bodies.append(request)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for count, event in enumerate(_stream(request, chat="chat" in path)):
            if count == self._break_after:
                raise ConnectionError("broken on purpose")
            if self._delay_s and "usage" not in event:
                await asyncio.sleep(self._delay_s)
            await self._send(writer, f"data: {json.dumps(event)}\n\n".encode())
        await self._send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        parts = [data[: len(data) // 2], data[len(data) // 2 :]] if self._split else [data]
        for part in parts:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            if self._split:
                await writer.drain()
                await asyncio.sleep(0.001)


def _plain(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


def _stream(request: dict[str, Any], *, chat: bool) -> list[dict[str, Any]]:
    num_tokens = request["max_tokens"]
    events: list[dict[str, Any]] = []
    if chat:
        events.append({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    for index in range(num_tokens):
        finish = "length" if index == num_tokens - 1 else None
        text = {"delta": {"content": "x"}} if chat else {"text": "x"}
        events.append({"choices": [{**text, "finish_reason": finish}]})
    prompt = request["messages"][0]["content"].split() if chat else request["prompt"]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
    return [*events, {"choices": [], "usage": usage}]


async def _run(port: int) -> None:
    async with await FakeServer().start(port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_run(int(sys.argv[1])))
