"""What was really sent: bytes and messages of every collective issued, by mesh axis, counted at the send.

A collective belongs to the step that issued it, even when it runs behind the next: each step has a record of its own,
and the communication thread counts into the record that was current when the job was queued.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loadmaster.ledger import Ledger

__all__ = ["TrafficMeter", "TrafficRecord"]


@dataclass(slots=True)
class TrafficRecord:
    """One step's sums by term."""

    num_bytes: dict[str, int] = field(default_factory=dict)
    num_messages: dict[str, int] = field(default_factory=dict)

    def bytes(self) -> Ledger:
        """Bytes sent by this rank."""
        return Ledger("bytes", dict(sorted(self.num_bytes.items())))

    def messages(self) -> Ledger:
        """Messages sent by this rank."""
        return Ledger("messages", dict(sorted(self.num_messages.items())))


class TrafficMeter:
    """`record` is the current step's; `active` the one the communication thread counts into.

    >>> meter = TrafficMeter()
    >>> meter.count("dp_shard/all_gather", num_bytes=512, messages=1)
    >>> meter.record.bytes().terms["dp_shard/all_gather"], meter.record.messages().total
    (512, 1)
    """

    def __init__(self) -> None:
        self.record = self.active = TrafficRecord()

    def begin(self) -> None:
        """Start a new step."""
        self.record = TrafficRecord()

    def count(self, term: str, *, num_bytes: int, messages: int) -> None:
        """Add what one collective sent from this rank."""
        record = self.active
        record.num_bytes[term] = record.num_bytes.get(term, 0) + num_bytes
        record.num_messages[term] = record.num_messages.get(term, 0) + messages
