"""Pure. What the holder of a key may: who it is, which models, which priorities.

Refusals of who it is say one thing, whatever is wrong with the key: who guesses learns nothing.
"""

from collections.abc import Mapping

from chassis.api_keys import ApiKey, find
from chassis.errors import Code, Status
from chassis.messages.gateway import GenerateCall
from gateway.access.caller import Caller


class Rights:
    """Of one set of keys. Who has none (`Caller.key` empty) is one of ours, as jobs are, and may all."""

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        self._keys = dict(keys)

    def who(self, token: str | None, now_ns: int) -> Caller:
        """Raises Status (UNAUTHENTICATED)."""
        if not token:
            raise Status(Code.UNAUTHENTICATED, "authorization: no API key; send `Authorization: Bearer KEY`")
        found = find(self._keys, token)
        if found is None or found[1].disabled or found[1].expired(now_ns):
            raise Status(Code.UNAUTHENTICATED, "authorization: the API key is unknown, revoked or expired")
        key_id, key = found
        return Caller(key.tenant, key_id)

    def key(self, key_id: str) -> ApiKey | None:
        """None for those of ours. Raises Status for a key that was taken away since it was asked."""
        if not key_id:
            return None
        key = self._keys.get(key_id)
        if key is None or key.disabled:
            raise Status(Code.UNAUTHENTICATED, "authorization: the API key is unknown, revoked or expired")
        return key

    def holds(self, key_id: str, tenant: str) -> bool:
        """Whether there is such a key of that tenant."""
        key = self._keys.get(key_id)
        return key is not None and not key.disabled and key.tenant == tenant

    def check_call(self, call: GenerateCall) -> None:
        """What needs no model. Raises Status."""
        key = self.key(call.key)
        if key is None:
            return
        if call.priority is not None and not key.may_ask(call.priority):
            range_ = f"{key.priority_best} to {key.priority_worst}"
            raise Status(Code.PERMISSION_DENIED, f"priority: {call.priority}; this key may ask for {range_}")
        if call.model:
            self.check_model(call.key, call.model)

    def check_model(self, key_id: str, model: str) -> None:
        """Raises Status."""
        key = self.key(key_id)
        if key is not None and not key.may_use(model):
            raise Status(Code.PERMISSION_DENIED, f"model: this key may not use {model[:200]}")

    def may_use(self, key_id: str, model: str) -> bool:
        key = self._keys.get(key_id)
        return not key_id or (key is not None and key.may_use(model))

    def priority(self, key_id: str, default: int) -> int:
        """Of a request that names none."""
        key = self._keys.get(key_id)
        return default if key is None else key.priority(default)
