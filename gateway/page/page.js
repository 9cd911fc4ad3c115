// The chat page: what is on it, what was said, and what happens when. Streams are in stream.js, text in prose.js.

import { Refused, answer, call, headers, timings } from "./stream.js";
import { copier, made, show } from "./prose.js";

const at = (id) => document.getElementById(id);
const ui = Object.fromEntries(
  ["model", "fresh", "theme", "settings-button", "settings", "params", "key", "defaults", "empty", "turns",
    "latest", "main", "scroller", "composer", "ask", "send", "stop", "status"].map((id) => [id, at(id)]),
);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "repetition_penalty"];
const THEMES = { auto: "◐", light: "☀\ufe0e", dark: "☾" };
const NARROW = matchMedia("(max-width: 52rem)"); // settings lie over the conversation there
const MODELS_AGAIN_MS = 3000;

let turns = []; // {role, content}: what the model is told
let running = null; // the answer that streams now

// ---- what is remembered ----------------------------------------------------------------------------

function kept(store, name) {
  try {
    return store.getItem(`shoal.${name}`) ?? "";
  } catch {
    return ""; // the browser keeps nothing
  }
}

function keep(store, name, value) {
  try {
    if (value) store.setItem(`shoal.${name}`, value);
    else store.removeItem(`shoal.${name}`);
  } catch {
    // the browser keeps nothing
  }
}

function fields() {
  return [...ui.params.elements].filter((field) => field.name);
}

function restore() {
  let said = {};
  try {
    said = JSON.parse(kept(localStorage, "params") || "{}");
  } catch {
    // nothing of use
  }
  for (const field of fields()) field.value = typeof said[field.name] === "string" ? said[field.name] : "";
  ui.key.value = kept(sessionStorage, "key");
  colour(kept(localStorage, "theme") || "auto");
}

function colour(theme) {
  const name = theme in THEMES ? theme : "auto";
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  ui.theme.textContent = THEMES[name];
  ui.theme.title = ui.theme.ariaLabel = `Colours: ${name === "auto" ? "as the system says" : name}`;
  keep(localStorage, "theme", name === "auto" ? "" : name);
}

// ---- what is asked ---------------------------------------------------------------------------------

/** The request without its messages; null if a field is wrong, which the browser then says. */
function params() {
  if (!ui.params.checkValidity()) {
    openSettings(true);
    ui.params.reportValidity();
    return null;
  }
  const said = { model: ui.model.value };
  for (const name of NUMBERS) {
    const { value } = ui.params.elements[name];
    if (value !== "") said[name] = Number(value);
  }
  const { seed, stop } = ui.params.elements;
  if (seed.value) said.seed = Number(seed.value);
  if (stop.value) said.stop = [stop.value];
  return said;
}

function messages() {
  const system = ui.params.elements.system.value;
  return [...(system.trim() ? [{ role: "system", content: system }] : []), ...turns];
}

function send(text) {
  if (running || !text.trim()) return;
  if (!ui.model.value) {
    ui.status.textContent = "No model is served yet.";
    return;
  }
  const said = params();
  if (!said) return;
  turns.push({ role: "user", content: text });
  addTurn("user", text);
  ui.ask.value = "";
  grow();
  reply(said);
}

async function reply(said) {
  const turn = addTurn("assistant", "");
  const here = { abort: new AbortController(), text: "", turn, frame: 0 };
  running = here;
  busy(true);
  toEnd(true);
  const paint = () => {
    here.frame = 0;
    show(turn.body, here.text);
    toEnd(false);
  };
  try {
    const told = await answer({ ...said, messages: messages() }, ui.key.value, here.abort.signal, {
      accepted: ({ id }) => (here.id = id),
      text: (piece) => {
        here.text += piece;
        here.frame ||= requestAnimationFrame(paint);
      },
    });
    ended(here, { ...told, said });
  } catch (error) {
    failed(here, error, said);
  } finally {
    cancelAnimationFrame(here.frame);
    paint();
    if (running === here) {
      running = null;
      busy(false);
    }
  }
}

function ended(here, told) {
  turns.push({ role: "assistant", content: here.text });
  const why = { length: "cut at the limit of tokens", stop: "" }[told.reason] ?? told.reason;
  foot(here, [...timings(told), ...(why ? [why] : [])], told.said);
  ui.status.textContent = `Answered, ${timings(told).join(", ")}.`;
}

function failed(here, error, said) {
  const stopped = error.name === "AbortError";
  if (here.forgotten) return;
  if (here.text) turns.push({ role: "assistant", content: here.text });
  if (stopped) {
    foot(here, ["stopped"], said);
    ui.status.textContent = "Stopped.";
    return;
  }
  const text = error instanceof Refused ? error.message : "The answer cannot be read.";
  const later = error.retryS ? ` Try again in ${error.retryS} s.` : "";
  const note = made("p", "wrong", text + later);
  note.setAttribute("role", "alert");
  here.turn.body.after(note);
  foot(here, here.text ? ["broken off"] : [], said);
  if (error.status === 401) {
    openSettings(true);
    ui.key.focus();
  }
}

/** Below an answer: what it took, and what can be done with it. */
function foot(here, said, request) {
  const line = made("p", "foot");
  if (said.length) line.append(made("span", "timings", said.join(" · ")));
  if (here.id) {
    const id = made("code", "id", here.id);
    id.title = `shoal why ${here.id} explains where the time went`;
    line.append(id);
  }
  if (here.text) line.append(copier(() => here.text));
  const again = made("button", "small again", "Again");
  again.type = "button";
  again.title = "Answer this once more";
  again.addEventListener("click", () => retry(here, request));
  line.append(again);
  here.turn.item.append(line);
  for (const other of ui.turns.querySelectorAll(".again")) other.hidden = other !== again;
}

function retry(here) {
  const said = params();
  if (running || !said) return;
  if (turns.at(-1)?.role === "assistant") turns.pop();
  here.turn.item.remove();
  reply(said);
}

// ---- what is seen ----------------------------------------------------------------------------------

function addTurn(role, text) {
  ui.empty.hidden = true;
  const item = made("li", `turn ${role}`);
  const head = made("h2", "unseen", role === "user" ? "You" : "Shoal");
  const body = made("div", "body");
  if (role === "user") body.append(made("p", "", text));
  item.append(head, body);
  ui.turns.append(item);
  return { item, body };
}

function busy(is) {
  ui.send.hidden = is;
  ui.stop.hidden = !is;
  ui.turns.setAttribute("aria-busy", String(is));
  document.body.classList.toggle("busy", is);
  for (const turn of ui.turns.querySelectorAll(".streams")) turn.classList.remove("streams");
  if (is) {
    running.turn.item.classList.add("streams");
    ui.status.textContent = "Answering.";
  } else {
    ui.ask.focus({ preventScroll: true });
  }
}

function atEnd() {
  const { scrollTop, scrollHeight, clientHeight } = ui.scroller;
  return scrollHeight - scrollTop - clientHeight < 80;
}

let follows = true; // until somebody scrolls away
function toEnd(surely) {
  if (surely) follows = true;
  if (follows) ui.scroller.scrollTop = ui.scroller.scrollHeight;
  ui.latest.hidden = follows;
}

function grow() {
  ui.ask.style.height = "auto";
  ui.ask.style.height = `${Math.min(ui.ask.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function openSettings(open) {
  ui.settings.hidden = !open;
  ui["settings-button"].setAttribute("aria-expanded", String(open));
  ui.main.inert = open && NARROW.matches;
}

function forget() {
  if (running) {
    running.forgotten = true;
    running.abort.abort();
    running = null;
    busy(false);
  }
  turns = [];
  ui.turns.replaceChildren();
  ui.empty.hidden = false;
  ui.latest.hidden = true;
  ui.ask.focus();
}

// ---- models ----------------------------------------------------------------------------------------

async function findModels() {
  let told;
  try {
    const response = await call("/v1/models", { headers: headers(ui.key.value) });
    told = (await response.json()).data.map((model) => String(model.id));
    if (!told.length) throw new Refused("No model is served yet.", 503);
  } catch (error) {
    ui.model.replaceChildren(new Option(error.status === 401 ? "needs an API key" : "no model yet", ""));
    ui.model.disabled = true;
    ui.model.title = error.message;
    if (error.status === 401) openSettings(true);
    else setTimeout(findModels, MODELS_AGAIN_MS);
    return;
  }
  const wanted = ui.model.value || kept(localStorage, "model");
  ui.model.replaceChildren(...told.map((name) => new Option(name, name)));
  ui.model.value = told.includes(wanted) ? wanted : told[0];
  ui.model.disabled = false;
  ui.model.title = "";
}

// ---- what happens ----------------------------------------------------------------------------------

ui.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  send(ui.ask.value);
});
ui.ask.addEventListener("input", grow);
ui.ask.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send(ui.ask.value);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (ui.main.inert) openSettings(false);
  else running?.abort.abort();
});
addEventListener("pagehide", () => running?.abort.abort()); // a page that is kept for "back" keeps its connection
ui.stop.addEventListener("click", () => running?.abort.abort());
ui.fresh.addEventListener("click", forget);
ui.latest.addEventListener("click", () => toEnd(true));
ui.theme.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const now = document.documentElement.dataset.theme ?? "auto";
  colour(names[(names.indexOf(now) + 1) % names.length]);
});
ui["settings-button"].addEventListener("click", () => openSettings(ui.settings.hidden));
ui.params.addEventListener("submit", (event) => event.preventDefault());
ui.params.addEventListener("input", () => {
  keep(localStorage, "params", JSON.stringify(Object.fromEntries(fields().map((f) => [f.name, f.value]))));
});
ui.key.addEventListener("change", () => {
  keep(sessionStorage, "key", ui.key.value);
  findModels();
});
ui.defaults.addEventListener("click", () => {
  for (const field of fields()) field.value = "";
  keep(localStorage, "params", "");
});
ui.model.addEventListener("change", () => keep(localStorage, "model", ui.model.value));
for (const starter of document.querySelectorAll(".starter")) {
  starter.addEventListener("click", () => send(starter.textContent));
}
NARROW.addEventListener("change", () => openSettings(!ui.settings.hidden));
ui.scroller.addEventListener("scroll", () => {
  follows = atEnd();
  ui.latest.hidden = follows;
}, { passive: true });

restore();
findModels();
