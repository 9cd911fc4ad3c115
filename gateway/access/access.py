"""Who may come in: keys from the configuration and from a file that may change while we run.

Without either everybody is the configured tenant, and the gateway listens on loopback only (`Config`).
A file that cannot be read after it could be leaves the keys as they were: an editor's half-saved file locks
nobody out. What it took away is taken away with the next look, `LOOK_S` later at the latest.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from chassis import log
from chassis.api_keys import ApiKey
from chassis.api_keys_file import check_ids, read_keys
from chassis.config import ConfigError
from chassis.ids import BootId
from chassis.messages.gateway import GenerateCall
from chassis.messages.request import Request
from chassis.ports import Ports
from gateway.access.caller import Caller
from gateway.access.quota import Need
from gateway.access.quotas import Hold, Quotas, cost
from gateway.access.rights import Rights
from gateway.config import Config

LOOK_S = 1.0


class Access:
    def __init__(self, config: Config, ports: Ports, boot: BootId) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._fixed = dict(config.keys)
        self._path = Path(config.keys_file) if config.keys_file else None
        self._tenant = config.tenant
        self._wall_ns = ports.wall_ns
        self._seen: tuple[int, ...] | None = None
        self._quotas = Quotas(ports.bus, boot, ports.wall_ns)
        check_ids(self._fixed, "gateway.keys")
        self.rights = Rights({})
        if self._path is not None:
            self._seen = _stamp(self._path)
            self._take(read_keys(self._path))
        else:
            self._take({})

    @property
    def open(self) -> bool:
        """No keys are asked for."""
        return self._path is None and not self._fixed

    def who(self, token: str | None) -> Caller:
        """Raises Status (UNAUTHENTICATED)."""
        if self.open:
            return Caller(self._tenant)
        return self.rights.who(token, self._wall_ns())

    def check_call(self, call: GenerateCall) -> None:
        """Refuses early what can be told without a model. Raises Status."""
        if not call.job:
            self.rights.check_call(call)
        self._quotas.check(call.key, self.rights.key(call.key))

    def job_key(self, tenant: str, key_id: str) -> str:
        """Whose quotas a job counts to: nobody's if the key is not there any more, or not its tenant's. What
        a key may was asked when its batch began; whoever else publishes jobs is one of ours."""
        return key_id if self.rights.holds(key_id, tenant) else ""

    def hold(self, call: GenerateCall, request: Request, choices: int) -> AbstractAsyncContextManager[Hold]:
        """Of the key's quotas, what a request takes while it runs. Raises Status."""
        need = cost(len(request.prompt_ids), request.limits.max_tokens, choices, slot=not call.job)
        key = self.rights.key(call.key)
        return self._quotas.hold(call.key, key, need, goes_on=bool(call.resume_window_s))

    def hold_resumed(self, key_id: str) -> AbstractAsyncContextManager[Hold]:
        """The same of one that was let in before: counted, and refused for no quota. Raises Status."""
        return self._quotas.hold(key_id, self.rights.key(key_id), Need())

    async def spend_request(self, key_id: str) -> None:
        """Of a call that runs nothing. Raises Status."""
        await self._quotas.spend(key_id, self.rights.key(key_id), Need(1))

    async def give_back(self) -> None:
        """What this gateway holds of quotas, before it goes."""
        await self._quotas.give_back()

    async def run(self) -> None:
        """Looks at the file, and keeps quotas in step with other gateways."""
        if self.open:
            log.warning("no keys: whoever can connect may use all of it")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._quotas.run(), name="quotas")
            await self._look_on()

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Takes the file's keys if it changed; they are read beside the loop, for they may be many."""
        if self._path is None or (stamp := _stamp(self._path)) == self._seen:
            return
        self._seen = stamp
        try:
            self._take(await asyncio.to_thread(read_keys, self._path))
        except ConfigError as error:
            log.warning("keys stay as they were", error=str(error))

    def _take(self, from_file: Mapping[str, ApiKey]) -> None:
        self.rights = Rights({**from_file, **self._fixed})
        if not self.open:
            log.info("keys", keys_len=len(from_file.keys() | self._fixed.keys()))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Differs once the file does; None: there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
