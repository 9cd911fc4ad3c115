"""Pure. What a lease has done since the start; the reader takes differences."""

from dataclasses import dataclass


@dataclass(slots=True)
class LeaseStats:
    exchanges: int = 0
    matches: int = 0
    matched_blocks: int = 0
    failed_calls: int = 0
    attaches: int = 0
    reclaimed: int = 0
