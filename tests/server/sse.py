"""Reading server-sent events in tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp


def parse_events(text: str) -> list[tuple[str, Any]]:
    """(event name, decoded data); data that is not JSON stays text."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if fields:
            data = fields["data"]
            events.append((fields.get("event", "message"), data if data == "[DONE]" else json.loads(data)))
    return events


async def post_events(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> list[tuple[str, Any]]:
    """All events of a stream that is answered with 200."""
    async with session.post(url, json=body, headers=headers) as response:
        text = await response.text()
        assert response.status == 200, text
        assert response.content_type == "text/event-stream"
    return parse_events(text)


async def next_event(response: aiohttp.ClientResponse, buffer: bytearray) -> tuple[str, Any]:
    """The next event of a stream that is still open; `buffer` keeps what came with it."""
    while b"\n\n" not in buffer:
        part = await response.content.readany()
        assert part, f"the stream ended inside {bytes(buffer)!r}"
        buffer += part
    end = buffer.index(b"\n\n") + 2
    event = parse_events(bytes(buffer[:end]).decode())[0]
    del buffer[:end]
    return event
