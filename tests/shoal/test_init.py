"""`shoal init --secure`: written once, for its owner alone, and never over what is there."""

import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from chassis.api_keys import find
from chassis.api_keys_file import read_keys
from chassis.batch_layout import FILES
from chassis.bus_rights import OPERATOR, inbox_prefix, rights
from chassis.config import ConfigError, load
from chassis.nats_access import access_of
from chassis.subjects import CARDS, LAYOUT, matches
from gateway.config import Config
from shoal import cli


def test_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "s"
    words = ["init", "--secure", str(folder), "--host", "gw.example.org", "--host", "10.0.0.7"]
    assert cli.main(words) == 0
    key = capsys.readouterr().out.strip()
    assert find(read_keys(folder / "keys.toml"), key)
    for path in folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
        assert path.is_dir() or key not in path.read_text()
    config = load(Config, "gateway", folder / "shoal.toml")
    assert config.keyed and Path(config.tls_key_file).exists()
    certificate = x509.load_pem_x509_certificate(Path(config.tls_certificate_file).read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "gw.example.org" in names.get_values_for_type(x509.DNSName)
    assert "10.0.0.7" in map(str, names.get_values_for_type(x509.IPAddress))
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(uses) == [ExtendedKeyUsageOID.SERVER_AUTH], "a gateway's certificate is no client's"
    url = tomllib.loads((folder / "shoal.toml").read_text())["chassis"]["nats_url"]
    found = {service: access_of(url, service) for service in (*rights(), "whoever")}
    assert found["gateway"].user == "gateway" and found["whoever"].user == OPERATOR
    assert len({access.password for access in found.values()}) == len(rights())
    assert all(
        access.password not in repr(access) and access.password not in url for access in found.values()
    )
    assert cli.main(words) == 1, "never over what is there"
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("--days", "0"), ("--tenant", "t" * 200), ("--host", "\u00e9\u00e9"), ("--host", "")]
)
def test_bad_words_are_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert cli.main(["init", "--secure", str(tmp_path / "s"), *words]) == 1


def test_an_address_of_the_bus_says_what_is_wrong_without_secrets(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    for text in ("password = 'hush-hush'", "user = 3\npassword = 'hush-hush'", "user = 'hush-hush"):
        bad.write_text(text)
        with pytest.raises(ConfigError, match="credentials") as refused:
            access_of(f"nats://x:1?credentials={bad}", "gateway")
        assert "hush" not in str(refused.value)
    for options in ("ca=/no-such", "certificate=/no-such", "what=1"):
        with pytest.raises(ConfigError, match="nats_url"):
            access_of(f"nats://x:1?{options}", "gateway")
    assert access_of("nats://a:1, nats://b:2", "gateway").servers == ("nats://a:1", "nats://b:2")


def test_rights_are_the_least() -> None:
    """Nobody but the operator deletes, empties or changes a stream, or listens to another's inbox."""
    for user, may in rights().items():
        if user == OPERATOR:
            continue
        for stream in LAYOUT:
            for verb in ("DELETE", "UPDATE", "MSG.DELETE", "SNAPSHOT", "RESTORE"):
                subject = f"$JS.API.STREAM.{verb}.{stream.name}"
                assert not any(matches(allowed, subject) for allowed in may.publish), (user, subject)
        for other in rights().keys() - {user}:
            inbox = f"{inbox_prefix(other)}.x.1"
            assert not any(matches(allowed, inbox) for allowed in (*may.publish, *may.subscribe))
    purges = {
        (user, subject) for user, may in rights().items() for subject in may.publish if "PURGE" in subject
    }
    assert purges == {
        ("shard_worker", f"$JS.API.STREAM.PURGE.{CARDS}"),
        ("gateway", f"$JS.API.STREAM.PURGE.{FILES}"),
    }
