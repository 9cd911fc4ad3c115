"""What `shoal chat` makes of lines; that Ctrl-C ends an answer is for tests/e2e."""

import io

import pytest

from shoal import cli
from tests.shoal.client.fake_gateway import TEXT, FakeGateway, served


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


def talk(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, said: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said.encode("utf-8", "surrogateescape"))))
    with served(gateway) as addresses:
        return cli.main(["chat", "--address", addresses[0], *words])


def test_turns_follow_each_other(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "one\n\n//two \\\nlines\n/quit\nthree\n"
    assert talk(gateway, monkeypatch, said, "--system", "be brief", "--temperature", "0") == 0
    told = capsys.readouterr()
    assert told.out == f"{TEXT}\n{TEXT}\n"
    assert "[length: 0 tokens" in told.err and "request r]" in told.err
    first, second = gateway.asked
    assert [(t.role, t.content) for t in first.chat.turns] == [("system", "be brief"), ("user", "one")]
    assert [t.content for t in second.chat.turns] == ["be brief", "one", TEXT, "/two \nlines"]
    assert first.HasField("temperature")


def test_who_says_nothing_is_told_how(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(gateway, monkeypatch, "") == 0
    assert "nothing was said: each line" in capsys.readouterr().err
    assert talk(gateway, monkeypatch, "/quit\n") == 0
    assert not capsys.readouterr().err


def test_words_of_the_chat_itself(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["/again", "/undo", "one", "/again", "/system be kind", "two", "/undo", "/reset", "three"]
    lines += ["/system", "/nonsense", "/help"]
    assert talk(gateway, monkeypatch, "\n".join(lines)) == 0
    asked = [[t.content for t in asked.chat.turns] for asked in gateway.asked]
    assert asked == [["one"], ["one"], ["be kind", "one", TEXT, "two"], ["be kind", "three"]]
    said = capsys.readouterr().err
    assert said.count("nothing was said") == 2 and "/nonsense is nothing" in said and "/system TEXT" in said


def test_what_fails_is_said_and_the_chat_goes_on(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "bad \udcff\none\n"
    assert talk(gateway, monkeypatch, said) == 0
    told = capsys.readouterr()
    assert told.out == f"{TEXT}\n" and "chat.turns[0].content: not valid Unicode" in told.err
    assert talk(gateway, monkeypatch, "one\n", "-n", "2") == 1
    assert "n: 2; 1 in a conversation" in capsys.readouterr().err
