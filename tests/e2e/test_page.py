"""The chat page in a real browser (`make test-page`), before a stand-in that misbehaves and before Shoal."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chassis.messages.request import Reason, Terminal
from tests.e2e.browser import KEYS, Browser, browser, missing
from tests.e2e.page_server import Script, served
from tests.e2e.rig import Running, last_record, until

pytestmark = [pytest.mark.page, pytest.mark.skipif(bool(missing()), reason=missing())]

EVIL = (
    "<img src=x onerror='window.hit=1'><script>window.hit=2</script> [a](javascript:window.hit=3) "
    "**<b onclick=x>bold</b>** `</code><script>window.hit=4</script>` \u202e \0 &lt; "
    "\n```html\n<iframe src='//example.org'></iframe>\n```\n"
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as made:
        yield made


@pytest.fixture
def script() -> Script:
    return Script(pieces=["Hello", ", ", "wör", "ld 🐟"])


@pytest.fixture
def page(chromium: Browser, script: Script) -> Iterator[Browser]:
    """Fresh: nothing is remembered."""
    with served(script) as url:
        chromium.size(1200, 800)
        chromium.scheme("light")
        chromium.go(url)
        chromium.run("localStorage.clear(); sessionStorage.clear()")
        chromium.complaints()
        chromium.go(url)
        chromium.until(
            lambda: script.key or chromium.count("#model option:not([value=''])"), "models are listed"
        )
        yield chromium


def say(page: Browser, text: str) -> None:
    page.type("#ask", text + KEYS["enter"])


def answered(page: Browser, count: int = 1) -> None:
    page.until(
        lambda: page.count(".turn.assistant .foot") >= count and page.visible("#send"), "the answer ends"
    )


def test_a_conversation(page: Browser, script: Script) -> None:
    assert page.visible("#empty")
    say(page, "hi there")
    answered(page)
    assert page.text(".turn.assistant .body") == "Hello, wörld 🐟"
    foot = page.text(".turn.assistant .timings")
    assert "first token" in foot and "4 tokens" in foot and "9 of prompt, 4 cached" in foot
    assert page.text(".turn.assistant .id") == "req1" and not page.visible("#empty")
    page.run("document.querySelector('#model').value = 'second'")
    page.type("#ask", "two" + KEYS["shift"] + KEYS["enter"] + KEYS["shift"] + "lines" + KEYS["enter"])
    answered(page, 2)
    first, second = script.asked
    assert first == {
        "model": "first",
        "messages": [{"role": "user", "content": "hi there"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert second["model"] == "second"
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert [m["content"] for m in second["messages"]] == ["hi there", "Hello, wörld 🐟", "two\nlines"]
    page.click("#fresh")
    assert page.count(".turn") == 0 and page.visible("#empty")
    say(page, "anew")
    answered(page)
    assert len(script.asked[-1]["messages"]) == 1
    assert page.complaints() == []


def test_what_is_set_is_sent_and_kept(page: Browser, script: Script) -> None:
    page.click("#settings-button")
    page.type("[name=system]", "be brief")
    for name, value in {"temperature": "0.5", "top_p": "0.9", "top_k": "40", "max_tokens": "7"}.items():
        page.type(f"[name={name}]", value)
    page.type("[name=seed]", "12")
    page.type("[name=stop]", "END")
    page.type("#key", "sk-mine")
    page.click(".starter")
    answered(page)
    asked = script.asked[0]
    assert asked["messages"][0] == {"role": "system", "content": "be brief"}
    said = {n: asked[n] for n in ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop")}
    assert said == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 7, "seed": 12, "stop": ["END"]
    }  # fmt: skip
    assert script.keys == ["Bearer sk-mine"]
    assert "sk-mine" not in page.run("return JSON.stringify(localStorage)")
    page.go(page.run("return location.href"))
    assert page.run("return document.querySelector('[name=top_k]').value") == "40"
    page.click("#settings-button")
    page.click("#defaults")
    assert page.run("return document.querySelector('[name=top_k]').value") == ""
    page.type("[name=temperature]", "9")
    say(page, "too hot")
    assert len(script.asked) == 1 and page.count(".turn") == 0  # the browser says what is wrong


@pytest.mark.parametrize("how", ["button", "key", "new chat", "leaving"])
def test_stop_ends_the_answer(page: Browser, script: Script, how: str) -> None:
    script.endless, script.pace_s = True, 0.02
    say(page, "on and on")
    page.until(lambda: "word6" in page.text(".turn.assistant .body"), "it streams")
    assert page.visible("#stop") and not script.left.is_set()
    match how:
        case "button":
            page.click("#stop")
        case "key":
            page.type("#ask", KEYS["escape"])
        case "new chat":
            page.click("#fresh")
        case _:
            page.go("about:blank")
    assert script.left.wait(10)  # the connection is gone, so that the gateway ends the request
    if how in ("button", "key"):
        answered(page)
        assert page.text(".turn.assistant .timings") == "stopped"
        script.endless = False
        say(page, "go on")
        answered(page, 2)
        assert "word6" in script.asked[1]["messages"][1]["content"]
    if how == "new chat":
        page.until(lambda: page.visible("#send"), "it can be asked again")
        assert page.count(".turn") == 0


def test_what_a_model_writes_is_only_text(page: Browser, script: Script) -> None:
    script.pieces = [*EVIL]
    say(page, "<b>me</b><script>window.hit=5</script>")
    answered(page)
    assert page.run("return window.hit ?? null") is None
    assert page.count(".turn img, .turn script, .turn iframe, .turn a, .turn b") == 0
    assert page.text(".turn.user .body") == "<b>me</b><script>window.hit=5</script>"
    shown = page.text(".turn.assistant .body")
    for part in (
        "<img src=x onerror='window.hit=1'>",
        "[a](javascript:window.hit=3)",
        "<b onclick=x>bold</b>",
    ):
        assert part in shown
    assert page.text(".turn.assistant pre code") == "<iframe src='//example.org'></iframe>"
    assert page.text(".turn.assistant strong") == "<b onclick=x>bold</b>"
    assert page.complaints() == []


def test_the_policy_holds_what_would_get_in(page: Browser) -> None:
    """If a hole were found: no inline code, no foreign address, no form, no frame."""
    script = """
        const said = [];
        document.addEventListener("securitypolicyviolation", (e) => said.push(e.effectiveDirective));
        const image = new Image(); image.src = "http://127.0.0.1:9/x"; document.body.append(image);
        try { document.body.insertAdjacentHTML("beforeend", "<p>"); } catch (e) { said.push(e.name); }
        fetch("http://127.0.0.1:9/").catch(() => {});
        return new Promise((done) => setTimeout(() => done(said), 300));
    """
    held = page.run(script)
    assert {"img-src", "connect-src", "TypeError"} <= set(held)
    page.complaints()


def test_prose_is_shown_as_it_is_meant(page: Browser, script: Script) -> None:
    code = "```py\nx = 1\n\ny = '```'\n```"
    script.pieces = [*f"# Head\n\nText with `code` and *slant*.\n\n1. one\n2. two\n\n{code}\nend 2 * 3 * 4"]
    say(page, "prose")
    answered(page)
    assert page.text("[role=heading][aria-level='3']") == "Head"
    assert page.text(".body p code") == "code" and page.text(".body em") == "slant"
    assert page.count(".body ol li") == 2
    assert page.text(".body pre code") == "x = 1\n\ny = '```'"
    assert page.text(".assistant .body > p:last-child") == "end 2 * 3 * 4"
    assert page.run("return document.querySelector('.code figcaption').firstChild.data") == "py"


def test_refusals_are_said_and_can_be_tried_again(page: Browser, script: Script) -> None:
    script.refuse = (503, "queue: full", {"retry-after": "2"})
    say(page, "hi")
    answered(page)
    assert page.text("[role=alert]") == "queue: full Try again in 2 s."
    script.refuse = None
    page.click(".again")
    page.until(lambda: page.text(".turn.assistant .body") == "Hello, wörld 🐟", "it is answered")
    answered(page)
    assert page.count(".turn") == 2 and page.count("[role=alert]") == 0
    assert script.asked[0]["messages"] == script.asked[1]["messages"]
    script.pieces = ["half", {"error": {"message": "gateway: draining", "type": "t"}}]
    say(page, "again")
    answered(page, 2)
    assert page.text("[role=alert]") == "gateway: draining"
    assert page.text(".turn.assistant:last-child .body") == "half"
    script.pieces = ["half", {"choices": "no list", "usage": None}]
    say(page, "worse")
    answered(page, 3)
    assert page.visible(".turn:last-child [role=alert]")


def test_a_key_is_asked_for(chromium: Browser) -> None:
    script = Script(pieces=["yes"], key="sk-right")
    with served(script) as url:
        chromium.go(url)
        chromium.until(lambda: chromium.visible("#key"), "settings open")
        assert "API key" in chromium.text("#model")
        chromium.type("#key", "sk-right" + KEYS["enter"])
        chromium.until(lambda: chromium.text("#model option") == "first", "models come")
        chromium.run("sessionStorage.clear()")


def test_models_that_come_later_are_found(chromium: Browser) -> None:
    script = Script(models=[])
    with served(script) as url:
        chromium.go(url)
        chromium.until(lambda: chromium.text("#model") == "no model yet", "there is none")
        script.models = ["late"]
        chromium.until(lambda: chromium.text("#model") == "late", "it is looked for again")


@pytest.mark.parametrize("width", [360, 800, 1200])
def test_nothing_sticks_out(page: Browser, script: Script, width: int, tmp_path: Path) -> None:
    script.pieces = ["A word: ", "x" * 300, "\n\n```\n", "long line " * 40, "\n```\n"]
    page.size(width, 700)
    say(page, "y" * 200)
    answered(page)
    for open_settings in (False, True):
        assert page.visible("#settings") is open_settings
        assert page.run(WIDEST) <= width
        assert page.run("return document.scrollingElement.scrollWidth") <= width
        page.click("#settings-button")
    if width < 832:  # settings lie over the conversation, which nobody can reach then
        page.click("#settings-button")
        assert page.run("return document.querySelector('main').inert")
        page.type("[name=system]", KEYS["escape"])
    assert not page.visible("#settings") and not page.run("return document.querySelector('main').inert")


WIDEST = """
const all = [...document.querySelectorAll("body *")].filter((e) => !e.closest("pre, .unseen, .skip"));
return Math.max(...all.map((e) => e.getBoundingClientRect().right));
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read(page: Browser, script: Script, scheme: str) -> None:
    """Contrast of 4.5 to 1 of all text (WCAG AA), in both schemes, whichever way they are chosen."""
    page.scheme(scheme)
    page.click("#settings-button")
    script.pieces = ["# Head\n\ntext `code`\n\n```py\nx\n```\n"]
    say(page, "hi")
    answered(page)
    script.refuse = (400, "messages: too long", {})
    say(page, "hi")
    answered(page, 2)
    assert page.run(CONTRAST) == []
    for _ in range({"light": 2, "dark": 1}[scheme]):  # to the other one, against the system's
        page.click("#theme")
    assert page.run(CONTRAST) == []


CONTRAST = """
const parse = (c) => c.match(/[\\d.]+/g).map(Number);
const light = (c) => c.slice(0, 3).map((v) => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const ground = (e) => { for (; e; e = e.parentElement) {
  const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; } };
const bad = [];
for (const e of document.querySelectorAll("body *")) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!(own || e.matches("input, textarea")) || !e.checkVisibility()) continue;
  if (e.matches(".unseen, .skip, noscript, option")) continue;
  const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
  const contrast = (a + .05) / (b + .05);
  if (contrast < 4.5) bad.push(`${e.tagName}.${e.className}#${e.id} ${contrast.toFixed(2)}`);
}
return bad;
"""


def test_a_keyboard_and_a_screen_reader_are_enough(page: Browser) -> None:
    names = page.run(
        "return [...document.querySelectorAll('button, input, select, textarea')].filter((e) =>"
        " !(e.textContent.trim() || e.labels?.length || e.ariaLabel)).map((e) => e.outerHTML)"
    )
    assert names == []
    tree = page.protocol("Accessibility.getFullAXTree")["nodes"]
    roles = {node["role"]["value"] for node in tree if not node["ignored"]}
    assert {"main", "heading", "textbox", "button", "status"} <= roles
    assert page.run("return document.activeElement.id") == "ask"


def test_shoal_itself_answers(chromium: Browser, calm: Running) -> None:
    """An answer to its end, and one that is stopped, which ends the request."""
    chromium.size(1200, 800)
    for address in calm.deployment.http_addresses:
        chromium.go(f"http://{address}/")
        chromium.run("localStorage.clear(); sessionStorage.clear()")
        chromium.complaints()
        chromium.go(f"http://{address}/")
        chromium.until(lambda: chromium.text("#model") == "fake", "models are listed")
        chromium.click("#settings-button")
        chromium.type("[name=max_tokens]", "20")
        chromium.type("[name=seed]", "7")
        say(chromium, "hello")
        answered(chromium)
        assert chromium.text("[role=alert]") == ""
        tokens = int(chromium.text(".timings").split(" tokens")[0].rsplit(" ", 1)[-1])
        assert 1 < tokens <= 20 and chromium.text(".turn.assistant .body")
        chromium.clear("[name=max_tokens]")
        chromium.type("[name=stop]", "never said")
        say(chromium, "go on")
        chromium.until(
            lambda: chromium.count(".turn.assistant") == 2 and chromium.visible("#stop"), "streams"
        )
        chromium.until(lambda: chromium.text(".turn:last-child .body"), "it has begun")
        chromium.click("#stop")
        answered(chromium, 2)
        request_id = chromium.text(".turn:last-child .id")

        async def ended(request_id: str = request_id) -> None:
            bus = await calm.bus()

            async def told() -> bool:
                record = await last_record(bus, request_id)
                return isinstance(record, Terminal) and record.reason in (Reason.CANCELLED, Reason.STOP)

            await until(told, "the request ends")
            await bus.close()

        calm.run(ended())
        assert chromium.complaints() == []
