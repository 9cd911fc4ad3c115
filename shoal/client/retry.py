"""Pure. When to try again, and how long to wait before it.

Rules: what was refused for want of room, or got no answer, may be tried again; what was refused for a reason
may not. Each address is tried at once; a wait follows when all have failed. Waits double up to a cap, are
drawn (chance is given) and never shorter than the gateway's hint. Nothing new for `patience_s` ends it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.client.errors import DeadlineExceeded, ShoalError

AGAIN = frozenset({"UNAVAILABLE", "CANCELLED"})  # CANCELLED: by the other side; one's own never gets here


@dataclass(frozen=True, slots=True)
class Retry:
    patience_s: float = 30.0
    first_wait_s: float = 0.05
    wait_s_max: float = 2.0
    on_wait: Callable[[ShoalError], None] | None = None  # is told what failed, before each wait


class Tries:
    """Of one call: its failures since something new came."""

    __slots__ = ("_addresses_len", "_deadline_s", "_failures", "_retry", "_since_s", "_timeout_s")

    def __init__(
        self, retry: Retry | None, addresses_len: int, now_s: float, timeout_s: float | None = None
    ) -> None:
        """`retry` None: the first failure is the last."""
        self._retry = retry
        self._addresses_len = addresses_len
        self._timeout_s = timeout_s
        self._deadline_s = None if timeout_s is None else now_s + timeout_s
        self._failures = 0
        self._since_s = now_s

    def progress(self) -> None:
        """Something new came."""
        self._failures = 0

    def left_s(self, now_s: float) -> float | None:
        """Until the caller's deadline; None: there is none. Raises DeadlineExceeded."""
        if self._deadline_s is None:
            return None
        if now_s >= self._deadline_s:
            raise DeadlineExceeded("DEADLINE_EXCEEDED", f"timeout_s: {self._timeout_s:g}")
        return self._deadline_s - now_s

    def wait_s(self, error: ShoalError, now_s: float, chance: float) -> float:
        """Before the next try. `chance`: 0 to 1. Raises the error when there is to be none."""
        if self._retry is None or not may_try_again(error):
            raise error
        if not self._failures:
            self._since_s = now_s
        self._failures += 1
        rounds, rest = divmod(self._failures, self._addresses_len)
        if rest:
            return 0.0
        longest_s = min(self._retry.wait_s_max, self._retry.first_wait_s * float(1 << min(rounds - 1, 30)))
        wait_s = max(longest_s * (0.5 + chance / 2), (error.retry_ms or 0) / 1000 * (1 + chance / 4))
        if now_s + wait_s - self._since_s > self._retry.patience_s:
            raise error
        if self._deadline_s is not None and now_s + wait_s >= self._deadline_s:
            raise DeadlineExceeded(
                "DEADLINE_EXCEEDED", f"timeout_s: {self._timeout_s:g}; last {error}", None, error.request_id
            ) from error
        if self._retry.on_wait is not None:
            self._retry.on_wait(error)
        return wait_s


def may_try_again(error: ShoalError) -> bool:
    """A quota that says when it has room again is worth a wait; a limit that does not, is not."""
    return error.code in AGAIN or (error.code == "RESOURCE_EXHAUSTED" and error.retry_ms is not None)
