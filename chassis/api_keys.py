"""Pure. API keys: what a client shows, what is kept of it, and what it lets its holder do.

A key is `shoal_<id>_<secret>`: a public name of letters and digits, and 256 random bits. Kept is the SHA-256
of the whole. A slow hash protects secrets that people choose, because those can be guessed; of 256 random
bits even a fast one tells nothing, and a slow one would let strangers burn our time with wrong keys. Keys are
found by their id and compared in constant time: how long a refusal takes says nothing of a secret.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, timedelta

PREFIX = "shoal"
ID_LEN = 10
SECRET_BYTES = 32
TOKEN_LEN_MAX = 128
TENANT_BYTES_MAX = 128
CLASSES = ("interactive", "batch")
BATCH_PRIORITY = 9
U31_MAX = 2**31 - 1

_ID = re.compile(r"[a-z0-9]{1,32}")
_TOKEN = re.compile(rf"{PREFIX}_([a-z0-9]{{1,32}})_[A-Za-z0-9_-]+")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key. Limits of 0 are none; `models` are names, or their beginnings before a `*`."""

    sha256: str = field(metadata={"secret": True})
    tenant: str = ""
    models: tuple[str, ...] = ("*",)
    priority_best: int = 0  # the highest it may ask for
    priority_worst: int = 9
    service_class: str = "interactive"  # "batch": its requests that name no priority have 9
    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts and outputs together, cached ones too
    tokens_per_day: int = 0
    concurrent_requests: int = 0
    expires: str = ""  # ISO 8601: a day (its last), or a moment with its offset from UTC
    disabled: bool = False

    def __post_init__(self) -> None:
        assert _DIGEST.fullmatch(self.sha256), "sha256: 64 hex digits"
        assert len(self.tenant.encode()) <= TENANT_BYTES_MAX, f"tenant: at most {TENANT_BYTES_MAX} bytes"
        assert self.models, "models: at least one, or *"
        assert all(name and "*" not in name[:-1] for name in self.models), (
            "models: names, `*` only at the end"
        )
        assert 0 <= self.priority_best <= self.priority_worst <= 9, (
            "priority_best to priority_worst: in 0 to 9"
        )
        assert self.service_class in CLASSES, f"service_class: {' or '.join(CLASSES)}"
        for name in LIMITS:
            assert 0 <= getattr(self, name) <= U31_MAX, f"{name}: 0 (none) to {U31_MAX}"
        ends_at(self.expires)

    def may_use(self, model: str) -> bool:
        return any(
            model.startswith(name[:-1]) if name.endswith("*") else model == name for name in self.models
        )

    def may_ask(self, priority: int) -> bool:
        return self.priority_best <= priority <= self.priority_worst

    def priority(self, default: int) -> int:
        """Of a request that names none."""
        wanted = BATCH_PRIORITY if self.service_class == "batch" else default
        return min(max(wanted, self.priority_best), self.priority_worst)

    def expired(self, now_ns: int) -> bool:
        end = ends_at(self.expires)
        return end is not None and now_ns >= int(end.timestamp() * 1e9)

    @property
    def limited(self) -> bool:
        return any(getattr(self, name) for name in LIMITS)


LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent_requests")


def ends_at(expires: str) -> datetime | None:
    """The first moment after `expires`; None if it never does. Raises ValueError."""
    if not expires:
        return None
    if len(expires) == 10:
        day = date.fromisoformat(expires)
        return datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)
    moment = datetime.fromisoformat(expires)
    if moment.tzinfo is None:
        raise ValueError(f"expires: {expires!r} has no offset from UTC (Z, +02:00)")
    return moment


def make_token(key_id: str, secret: str) -> str:
    """`secret`: 32 random bytes as URL-safe base64."""
    token = f"{PREFIX}_{key_id}_{secret}"
    assert is_id(key_id) and id_of(token) == key_id, "an id of small letters and digits"
    return token


def is_id(text: str) -> bool:
    return bool(_ID.fullmatch(text))


def id_of(token: str) -> str | None:
    """The public name in a key; None if it is none of ours."""
    found = _TOKEN.fullmatch(token) if len(token) <= TOKEN_LEN_MAX else None
    return found[1] if found else None


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def find(keys: Mapping[str, ApiKey], token: str) -> tuple[str, ApiKey] | None:
    """The key that a client shows, with its id; disabled and expired ones too."""
    key_id = id_of(token)
    if key_id is None:
        return None
    key = keys.get(key_id)
    if not hmac.compare_digest(digest_of(token), key.sha256 if key is not None else "0" * 64):
        return None
    return (key_id, key) if key is not None else None


def render(keys: Mapping[str, ApiKey]) -> str:
    """As TOML, a table `[keys.<id>]` each; what is at its default is left out."""
    lines = ["# API keys, by their public ids: only their SHA-256 is kept. `shoal keys` writes this file."]
    for key_id, key in keys.items():
        lines += ["", f"[keys.{key_id}]"]
        for entry in fields(ApiKey):
            value = getattr(key, entry.name)
            if entry.name in ("sha256", "tenant") or value != entry.default:
                shown = list(value) if isinstance(value, tuple) else value
                lines.append(f"{entry.name} = {_toml(shown)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """JSON's strings, numbers, booleans and lists are TOML's, but for one control character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
