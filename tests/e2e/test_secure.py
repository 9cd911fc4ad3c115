"""What `shoal init --secure` wrote, in use: TLS, mTLS, keys, users of the bus with their rights; and that
nothing secret, and nothing that a user said, is in any log, trace, state or process list."""

import argparse
import asyncio
import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from chassis import nats_bus, subjects
from chassis.api_keys_file import read_keys, write_keys
from chassis.bus_rights import OPERATOR, rights
from chassis.errors import BusError, RpcUnavailable
from chassis.grpc_rpc import GrpcRpc
from chassis.messages.cache import HOLDINGS, HoldingsQuestion, build_question
from chassis.messages.quota import parse_ledger
from chassis.messages.registry import parse_kvstore
from chassis.nats_access import access_of
from shoal import init_words
from shoal.client import AsyncClient, Params, ShoalError, Tls
from shoal.keys_words import new_key
from shoal.secure_folder import tls_of
from tests.e2e.rig import Answer, Running, ask, call, fake_plan, resume, running, until
from tests.e2e.test_bad_input import GARBAGE, listening_ports, send_garbage
from tests.e2e.test_batches import shoal_batch

PROMPT = "tell-nobody-3f9c"


@dataclass(frozen=True)
class Secure:
    shoal: Running
    folder: Path
    key: str

    def client(self, key: str | None = None, tls: Tls | bool | None = None, index: int = 0) -> AsyncClient:
        return AsyncClient(
            self.shoal.deployment.addresses[index],
            api_key=self.key if key is None else key,
            tls=tls_of(self.folder) if tls is None else tls,
            retry=None,
        )


@pytest.fixture(scope="module")
def secure(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    words = argparse.Namespace(secure=folder / "made", host=[], tenant="acme", days=30)
    key, _ = init_words.run(words)
    config = folder / "made" / "shoal.toml"
    text = config.read_text().replace("# tls_client_ca_file", "tls_client_ca_file")
    config.write_text(text)
    plan = fake_plan(folder / "run", gateways=2, config=config, env={"SHOAL_CHASSIS_LOG_LEVEL": "debug"})
    with running(runner, plan) as shoal:
        yield Secure(shoal, folder / "made", key)


def said_to(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def at_least(found: list[str], count: int) -> bool:
    return len(found) >= count


def violations(secure: Secure) -> list[str]:
    """What the server refused."""
    log = secure.shoal.deployment.run_dir / "logs" / "nats.log"
    return re.findall(r".*Violation.*", log.read_text())


def test_all_of_it_works_with_these_rights(secure: Secure) -> None:
    """Streams, a resume at the other gateway, a cancel, jobs; the server has refused nothing."""

    async def life() -> None:
        async with secure.client() as one, secure.client(index=1) as two:
            calls = [call(range(3 + i), 40) for i in range(4)]
            answers = await asyncio.gather(*(ask(one, Answer(c)) for c in calls))
            for answer in answers:
                answer.check()
            cut = Answer(call(range(9), 200, resume_window_s=30))
            stream = one.generate(
                cut.call.token_ids or (),
                Params(max_tokens=200, temperature=0.0, seed=0, ignore_eos=True, resume_window_s=30),
            )
            async for event in stream:
                cut.take(event)
                if len(cut.ids) > 5:
                    break
            await resume(two, cut)
            cut.check()
            left = Answer(call(range(5), 5000, resume_window_s=30))
            asking = asyncio.create_task(ask(one, left))
            await until(lambda: bool(left.ids), "a stream begins")
            await two.cancel(left.request_id)
            await asking
            assert left.end is not None and left.end.reason == "cancelled"
        bus = await nats_bus.connect(secure.shoal.deployment.nats_url, name="test")
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": 3}
        job = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        await bus.append("shoal.job.acme.q.k", json.dumps(job).encode(), expected_seq=0)

        async def answered() -> bool:
            return await bus.last(subjects.ANSWERS, "shoal.ans.acme.q.k") is not None

        await until(answered, "a job is answered")
        receipts = await bus.read(subjects.USAGE, "shoal.use.>", 1, 100)
        assert len(receipts) >= 6
        await bus.close()
        assert violations(secure) == []

    secure.shoal.run(life())


def test_files_and_batches_work_with_these_rights(secure: Secure) -> None:
    known = ssl.create_default_context(cafile=str(secure.folder / "ca.pem"))
    known.load_cert_chain(secure.folder / "client" / "certificate.pem", secure.folder / "client" / "key.pem")
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": 3}
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(3)
    ]
    parts = (
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--b\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
        + "".join(json.dumps(line) + "\n" for line in lines)
        + "\r\n--b--\r\n"
    )

    async def life() -> None:
        def asked(path: str, body: Any = None, kind: str = "application/json") -> dict[str, Any]:
            status, told = http(secure, path, known, secure.key, body, kind)
            assert status == 200, told
            return dict(told)

        file = await asyncio.to_thread(asked, "/v1/files", parts, "multipart/form-data; boundary=b")
        window = {"completion_window": "24h", "endpoint": "/v1/completions"}
        batch = await asyncio.to_thread(asked, "/v1/batches", {"input_file_id": file["id"], **window})

        async def over() -> bool:
            told = await asyncio.to_thread(asked, f"/v1/batches/{batch['id']}")
            return bool(told["status"] == "completed" and told["request_counts"]["completed"] == 3)

        await until(over, "the batch is over")
        assert violations(secure) == []

    secure.shoal.run(life())


def test_the_batch_command_finds_address_and_certificates_by_itself(
    secure: Secure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what runs in its run folder; told an address, it needs them told too, and never goes without."""
    monkeypatch.setenv("SHOAL_API_KEY", secure.key)
    monkeypatch.delenv("SHOAL_CA", raising=False)
    here: tuple[str, ...] = ("--run-dir", str(secure.shoal.deployment.run_dir))
    there: tuple[str, ...] = ("--url", f"https://{secure.shoal.deployment.http_addresses[1]}")
    client = secure.folder / "client"
    mine = ("--certificate", str(client / "certificate.pem"), "--private-key", str(client / "key.pem"))
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": 3}
    source, results = tmp_path / "asked.jsonl", tmp_path / "results.jsonl"
    asked = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(3)
    ]
    source.write_text("\n".join(json.dumps(one) for one in asked))

    async def life() -> None:
        batch_id, beside = await shoal_batch("submit", str(source), "--wait", *here)
        assert "] 3/3 completed" in beside
        told_all = (*there, "--ca", str(secure.folder / "ca.pem"), *mine)
        for where in (here, told_all):
            said, _ = await shoal_batch("status", batch_id, *where)
            assert said == f"{batch_id}  completed  3 completed, 0 failed of 3"
        await shoal_batch("results", batch_id, "-o", str(results), *here)
        told = [json.loads(text)["custom_id"] for text in results.read_text().splitlines()]
        assert sorted(told) == ["c0", "c1", "c2"]
        for where in (there, (*there, *mine), (*there, "--ca", str(secure.folder / "ca.pem"))):
            await shoal_batch("status", *where, code=1)
        monkeypatch.setenv("SHOAL_API_KEY", secure.key[:-1])
        assert "HTTP 401" in (await shoal_batch("status", *here, code=1))[1]
        assert violations(secure) == []

    secure.shoal.run(life())


def test_a_quota_holds_at_both_gateways(secure: Secure) -> None:
    """Of a key that was added while they run, over the bus with its rights."""
    path = secure.folder / "keys.toml"
    token, key_id, key = new_key(tenant="two", concurrent_requests=2, tokens_per_day=100_000)
    write_keys(path, {**read_keys(path), key_id: key})

    async def life() -> None:
        async with secure.client(token) as one, secure.client(token, index=1) as two:

            async def known() -> bool:
                try:
                    return bool(await one.models()) and bool(await two.models())
                except ShoalError:
                    return False

            await until(known, "the key is known")
            running_ = [Answer(call(range(4 + i), 5000)) for i in range(2)]
            asking = [asyncio.create_task(ask(c, a)) for c, a in zip((one, two), running_, strict=True)]
            await until(lambda: all(a.ids for a in running_), "both begin")
            for client in (one, two):
                with pytest.raises(ShoalError) as refused:
                    await ask(client, Answer(call(range(3), 4)))
                assert refused.value.code == "RESOURCE_EXHAUSTED" and refused.value.retry_ms
                assert "concurrent_requests" in refused.value.message
            for answer, task in zip(running_, asking, strict=True):
                await two.cancel(answer.request_id)
                await task
            (await ask(one, Answer(call(range(3), 4)))).check()

            async def counted() -> bool:
                stored = await bus.last(subjects.QUOTAS, subjects.quota(key_id))
                windows = parse_ledger(stored.data).windows if stored is not None else ()
                return any(w.granted >= sum(len(a.ids) for a in running_) for w in windows)

            bus = await nats_bus.connect(secure.shoal.deployment.nats_url, name="test")
            await until(counted, "tokens are counted")
            await bus.close()
        assert violations(secure) == []

    secure.shoal.run(life())


def test_every_service_is_refused_what_is_not_its_own(secure: Secure) -> None:
    forbidden = {
        "gateway": (
            "shoal.tok.x",
            "shoal.use.t.m.r",
            f"$KV.{subjects.REGISTRY_BUCKET}.batcher.x",
            "$JS.API.STREAM.DELETE.RESULTS",
        ),
        "batcher": (
            "shoal.req.fake.5.x",
            "shoal.ans.t.q.k",
            f"$KV.{subjects.REGISTRY_BUCKET}.worker.x",
            "$JS.API.STREAM.PURGE.REQUESTS",
        ),
        "kvstore": (
            "shoal.req.fake.5.x",
            "shoal.res.x",
            "$JS.API.STREAM.MSG.GET.RESULTS",
            "$JS.API.STREAM.MSG.GET.REQUESTS",
        ),
        "shard_worker": (
            "shoal.req.fake.5.x",
            "shoal.res.x",
            "shoal.tok.x",
            "$JS.API.STREAM.MSG.GET.RESULTS",
        ),
        "autoscale": (
            "shoal.req.fake.5.x",
            "shoal.res.x",
            "shoal.load.fake",
            "$JS.API.CONSUMER.MSG.NEXT.REQUESTS.b-fake-5",
        ),
    }
    assert forbidden.keys() == rights().keys() - {OPERATOR}
    unheard = {
        "gateway": "shoal.own.*",
        "batcher": "shoal.tok.*",
        "kvstore": "shoal.>",
        "shard_worker": "shoal.req.>",
        "autoscale": "shoal.tok.*",
    }

    async def life() -> None:
        for service, subjects_ in forbidden.items():
            refused: list[str] = []

            async def note(error: Exception, into: list[str] = refused) -> None:
                into.append(str(error))

            access = access_of(secure.shoal.deployment.nats_url, service)
            client = await nats.connect(list(access.servers), error_cb=note, **access.options)
            for subject in subjects_:
                await client.publish(subject, b"x")
            for subject in (
                unheard[service],
                "_INBOX.>",
                f"_INBOX.{'kvstore' if service == 'gateway' else 'gateway'}.>",
            ):
                await client.subscribe(subject)
            await client.flush()
            await until(partial(at_least, refused, len(subjects_) + 3), f"{service} is refused")
            for subject in (*subjects_, unheard[service]):
                assert any(f'"{subject.lower()}"' in error.lower() for error in refused), (
                    service,
                    subject,
                    refused,
                )
            await client.close()
        assert len(violations(secure)) >= 5 * 6, "what it refuses it writes down"

    secure.shoal.run(life())


def test_nobody_comes_to_the_bus_without_a_user(secure: Secure) -> None:
    url = secure.shoal.deployment.nats_url
    servers, _, _ = url.partition("?")

    async def life() -> None:
        for wrong in (
            servers.replace("tls://", "nats://"),
            servers,
            f"{servers}?ca={secure.folder / 'nats' / 'ca.pem'}",
            f"{servers}?ca={secure.folder / 'ca.pem'}&credentials={secure.folder / 'nats' / 'credentials'}",
        ):
            with pytest.raises(BusError):
                await nats_bus.connect(wrong, name="test", timeout_s=0.4)

    secure.shoal.run(life())


def test_gateways_want_a_certificate_and_a_key(secure: Secure) -> None:
    ca = secure.folder / "ca.pem"
    inside = secure.folder / "rpc"
    stranger = Tls.of_files(ca, inside / "service.pem", inside / "service.key")

    async def life() -> None:
        for tls in (False, Tls.of_files(ca), stranger):
            async with secure.client(tls=tls) as client:
                with pytest.raises(ShoalError) as failed:
                    await client.models()
                assert failed.value.code == "UNAVAILABLE"
        for key in ("", "shoal_abc_" + "x" * 43, secure.key[:-1]):
            async with secure.client(key) as client:
                for ask_ in (client.models(), client.tokenize("x"), client.cancel("r")):
                    with pytest.raises(ShoalError) as failed:
                        await ask_
                    assert failed.value.code == "UNAUTHENTICATED"
        async with secure.client() as client:
            assert [model.name for model in await client.models()] == ["fake"]

    secure.shoal.run(life())


def http(
    secure: Secure,
    path: str,
    tls: ssl.SSLContext,
    key: str = "",
    body: Any = None,
    kind: str = "application/json",
) -> tuple[int, Any]:
    address = secure.shoal.deployment.http_addresses[0]
    headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {key}"} if key else {})
    text = body if isinstance(body, str) else json.dumps(body)
    data = None if body is None else text.encode()
    asked = urllib.request.Request(f"https://{address}{path}", data, headers)
    try:
        with urllib.request.urlopen(asked, context=tls, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_http_is_guarded_the_same_way(secure: Secure) -> None:
    trusting = ssl.create_default_context(cafile=str(secure.folder / "ca.pem"))
    known = ssl.create_default_context(cafile=str(secure.folder / "ca.pem"))
    known.load_cert_chain(secure.folder / "client" / "certificate.pem", secure.folder / "client" / "key.pem")

    async def life() -> None:
        ask_ = asyncio.to_thread
        with pytest.raises((urllib.error.URLError, OSError)):
            await ask_(http, secure, "/v1/models", trusting, secure.key)
        status, body = await ask_(http, secure, "/v1/models", known)
        assert status == 401 and "error" in body
        status, body = await ask_(http, secure, "/v1/models", known, secure.key)
        assert status == 200 and [model["id"] for model in body["data"]] == ["fake"]
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": 4}
        status, body = await ask_(http, secure, "/v1/completions", known, secure.key, body)
        assert status == 200 and body["usage"]["completion_tokens"] == 4

    secure.shoal.run(life())


def test_calls_between_services_prove_both_sides(secure: Secure) -> None:
    async def life() -> None:
        bus = await nats_bus.connect(secure.shoal.deployment.nats_url, name="test")
        entry = next(iter(await bus.entries(subjects.KVSTORES)))
        assert entry.value is not None
        address = parse_kvstore(entry.value).rpc_address
        await bus.close()
        rpc = GrpcRpc()
        with pytest.raises(RpcUnavailable):
            await rpc.call(address, HOLDINGS, build_question(HoldingsQuestion("", 0)), 1.0)
        await rpc.close()

    secure.shoal.run(life())


def test_garbage_before_and_after_the_handshake_disturbs_nobody(secure: Secure) -> None:
    known = ssl.create_default_context(cafile=str(secure.folder / "ca.pem"))
    known.load_cert_chain(secure.folder / "client" / "certificate.pem", secure.folder / "client" / "key.pem")

    async def inside(address: str, data: bytes) -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=known)
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(0.2):
                while await reader.read(1 << 16):
                    pass
        except (OSError, TimeoutError):
            pass
        finally:
            writer.transport.abort()

    async def life() -> None:
        deployment = secure.shoal.deployment
        pids = deployment.pids()
        async with secure.client() as client:
            stream = Answer(call(range(6), 200))
            asking = asyncio.create_task(ask(client, stream))
            await until(lambda: bool(stream.ids), "a stream begins")
            ports = {port for name, pid in pids.items() for port in listening_ports(pid)}
            assert len(ports) >= 8
            async with asyncio.TaskGroup() as group:
                for garbage in GARBAGE[::2]:
                    for port in ports:
                        group.create_task(send_garbage(port, garbage, hang=False))
                    for address in (*deployment.addresses, *deployment.http_addresses):
                        group.create_task(inside(address, garbage))
            await asking
            stream.check()
            (await ask(client, Answer(call([1, 2, 3], 5)))).check()
        assert deployment.pids() == pids

    secure.shoal.run(life())


def test_nothing_secret_or_said_is_written_down(secure: Secure) -> None:
    """In logs at their most talkative, traces, receipts, the record of state, command lines."""

    async def life() -> None:
        async with secure.client() as client:
            for prompt in (PROMPT, [("user", PROMPT)]):
                try:
                    async for _ in client.generate(prompt, Params(max_tokens=3)):
                        pass
                except ShoalError as error:  # the fake model has no template
                    assert PROMPT not in str(error)
            with pytest.raises(ShoalError) as failed:
                async for _ in client.generate(PROMPT, Params(max_tokens=3, priority=77)):
                    pass
            assert PROMPT not in str(failed.value)
        bus = await nats_bus.connect(secure.shoal.deployment.nats_url, name="test")
        found = b""
        deadline = time.monotonic() + 20
        while b"gateway" not in found and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            found = b"".join([s.data for s in await bus.read(subjects.TRACES, "shoal.trace.>", 1, 5000)])
        receipts = b"".join([s.data for s in await bus.read(subjects.USAGE, "shoal.use.>", 1, 100)])
        await bus.close()
        assert found and receipts
        deployment = secure.shoal.deployment
        written = {"traces": found, "receipts": receipts}
        for path in [*(deployment.run_dir / "logs").iterdir(), deployment.run_dir / "state.json"]:
            written[path.name] = path.read_bytes()
        for name, pid in deployment.pids().items():
            written[f"command line of {name}"] = said_to(pid)
        assert len(written) >= 15
        secrets = [secure.key, secure.key.split("_", 2)[2], PROMPT]  # "_" is a letter of secrets, too
        credentials = (secure.folder / "nats" / "credentials").iterdir()
        secrets += [re.findall(r'password = "(.*)"', path.read_text())[0] for path in credentials]
        secrets += re.findall(r'sha256 = "(.*)"', (secure.folder / "keys.toml").read_text())
        assert len(secrets) >= 4 + len(rights())
        for where, content in written.items():
            for secret in secrets:
                assert secret.encode() not in content, where
        assert b"***" in written["gateway.log"] or b"keys_file" in written["gateway.log"]

    secure.shoal.run(life())
