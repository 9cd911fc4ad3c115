"""API keys: what is kept of one, what it allows, and files of them that say what is wrong."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chassis.api_keys import ApiKey, digest_of, find, id_of, make_token, render
from chassis.api_keys_file import parse_keys, read_keys, write_keys
from chassis.config import ConfigError, effective, load
from gateway.config import Config

TOKEN = make_token("abc", "A-b_" * 10)
DAY_NS = 86_400 * 10**9


def key(**terms: object) -> ApiKey:
    return ApiKey(digest_of(TOKEN), **terms)  # type: ignore[arg-type]


def test_a_key_is_found_by_its_id_and_its_whole() -> None:
    keys = {"abc": key(tenant="acme"), "abd": ApiKey("1" * 64)}
    assert find(keys, TOKEN) == ("abc", keys["abc"])
    for wrong in (
        "",
        "abc",
        TOKEN[:-1],
        TOKEN + "x",
        TOKEN.replace("abc", "abd"),
        "shoal_abd_x",
        "é",
        TOKEN * 9,
    ):
        assert find(keys, wrong) is None
    assert find({}, TOKEN) is None


@given(st.text())
def test_any_text_is_a_key_or_none(text: str) -> None:
    assert find({"abc": key()}, text) is None
    assert id_of(text) is None or text.startswith("shoal_")


def test_terms() -> None:
    some = key(models=("smollm2", "qwen*"), priority_best=4, priority_worst=6)
    assert [some.may_use(m) for m in ("smollm2", "smollm22", "qwen", "qwen3", "x")] == [
        True,
        False,
        True,
        True,
        False,
    ]
    assert [some.priority(p) for p in (0, 5, 9)] == [4, 5, 6]
    assert key(service_class="batch").priority(5) == 9
    last_day = key(expires="1970-01-01")
    assert not last_day.expired(DAY_NS - 1) and last_day.expired(DAY_NS)
    assert key(expires="1970-01-01T02:00:00+02:00").expired(0)
    assert not key().expired(1 << 62)


@pytest.mark.parametrize(
    "terms",
    [
        {"models": ()},
        {"models": ("a*b",)},
        {"priority_best": 7, "priority_worst": 6},
        {"priority_worst": 10},
        {"service_class": "gold"},
        {"requests_per_minute": -1},
        {"tokens_per_day": 1 << 31},
        {"expires": "soon"},
        {"expires": "2030-01-01T00:00:00"},
        {"tenant": "t" * 129},
    ],
)
def test_terms_that_make_no_sense_are_refused(terms: dict[str, object]) -> None:
    with pytest.raises((ValueError, AssertionError)):
        key(**terms)


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    keys = {
        "abc": key(
            tenant='a"b\\\n\x7fé', models=("m", "n*"), tokens_per_day=5, expires="2031-12-31", disabled=True
        ),
        "0": key(service_class="batch", priority_best=9),
    }
    path = tmp_path / "keys.toml"
    write_keys(path, keys)
    assert read_keys(path) == keys and path.stat().st_mode & 0o777 == 0o600
    assert TOKEN not in path.read_text() and list(tmp_path.iterdir()) == [path]
    assert render({}).startswith("#") and parse_keys(render({}), "x") == {}
    as_json = json.dumps({"keys": {"abc": {"sha256": digest_of(TOKEN), "models": ["m"]}}})
    assert parse_keys(as_json, "keys.json") == {"abc": key(models=("m",))}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys = 3", "not a table"),
        ("other = 3", "nothing else"),
        ("[keys.abc]\ntenant = 'x'", "sha256"),
        ("[keys.abc]\nsha256 = 'shoal_abc_secret'", "64 hex digits"),
        ("[keys.abc]\nsha256 = '%s'\nmodel = 'm'" % ("0" * 64), "did you mean models?"),
        ("[keys.ABC]\nsha256 = '%s'" % ("0" * 64), "small letters"),
        ("[keys", "TOML"),
    ],
)
def test_a_bad_file_says_what_is_wrong_and_shows_no_secret(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_keys(text, "keys.toml")
    assert says in str(refused.value) and "secret" not in str(refused.value)


def test_what_is_logged_of_a_configuration_shows_no_digest() -> None:
    shown = json.dumps(effective(Config(keys={"abc": key(tenant="acme")})))
    assert "acme" in shown and digest_of(TOKEN) not in shown


def test_keys_come_from_the_environment_too() -> None:
    said = f'{{ abc = {{ sha256 = "{digest_of(TOKEN)}", tenant = "acme", models = ["m"] }} }}'
    assert load(Config, "gateway", env={"SHOAL_GATEWAY_KEYS": said}).keys == {
        "abc": key(tenant="acme", models=("m",))
    }
    with pytest.raises(ConfigError) as refused:
        load(Config, "gateway", env={"SHOAL_GATEWAY_KEYS": f'{{ abc = {{ secret = "{TOKEN}" }} }}'})
    assert "secret" in str(refused.value) and TOKEN not in str(refused.value)


def test_without_keys_only_this_machine_is_listened_on() -> None:
    for address in ("127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:socket", ""):
        Config(grpc_address=address)
    for address in ("0.0.0.0:1", "10.0.0.1:1", ":1", "[::]:1", "example.org:1", "127.0.0.1.example.org:1"):
        for name in ("grpc_address", "http_address"):
            with pytest.raises(AssertionError, match="keys_file"):
                Config(**{name: address})  # type: ignore[arg-type]
        Config(grpc_address=address, http_address=address, insecure=True)
        Config(grpc_address=address, http_address=address, keys_file="keys.toml")
        tls = {"tls_certificate_file": "c", "tls_key_file": "k", "tls_client_ca_file": "ca"}
        Config(grpc_address=address, http_address=address, **tls)  # type: ignore[arg-type]
    for half in ({"tls_key_file": "k"}, {"tls_client_ca_file": "ca"}):
        with pytest.raises(AssertionError, match="tls_"):
            Config(**half)  # type: ignore[arg-type]
