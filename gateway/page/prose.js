// What a model wrote, as elements made here: text only ever becomes text nodes, so nothing in it can act.
// Understood are fenced code, headings, lists, inline code, bold and italic; all else stays as it is written.

/** Brings `place` to show `text`; blocks that have not changed stay, so that a long answer streams cheaply. */
export function show(place, text) {
  const blocks = split(text);
  const shown = place.shown ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && equal(blocks[same], shown[same])) same += 1;
  while (place.childNodes.length > same) place.lastChild.remove();
  for (const block of blocks.slice(same)) place.append(element(block));
  place.shown = blocks;
}

function equal(a, b) {
  return a.kind === b.kind && a.body === b.body && a.language === b.language;
}

/** Text in blocks: {kind: "code" | "heading" | "list" | "text", body, language}. */
export function split(text) {
  const blocks = [];
  let fence = null;
  let body = [];
  const close = (kind, more = {}) => {
    if (body.length && (kind === "code" || body.some((line) => line.trim()))) {
      blocks.push({ kind, body: body.join("\n"), ...more });
    }
    body = [];
  };
  let kind = "text";
  for (const line of text.split("\n")) {
    const mark = line.match(/^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/);
    if (fence) {
      if (mark && mark[1].startsWith(fence.mark) && !mark[2]) {
        close("code", { language: fence.language });
        fence = null;
      } else body.push(line);
      continue;
    }
    const next = mark ? "fence" : /^#{1,6} /.test(line) ? "heading" : /^\s*([-*+]|\d{1,3}[.)]) /.test(line) ? "list" : "text";
    const goesOn = next === kind || (kind === "list" && next === "text" && /^\s+\S/.test(line));
    if (!line.trim() || !goesOn || kind === "heading") close(kind);
    if (next === "fence") {
      fence = { mark: mark[1], language: mark[2] };
      kind = "text";
      continue;
    }
    if (line.trim()) {
      kind = goesOn && body.length ? kind : next;
      body.push(line);
    }
  }
  if (fence) {
    if (!body.length) body.push("");
    close("code", { language: fence.language });
  } else close(kind);
  return blocks;
}

function element(block) {
  switch (block.kind) {
    case "code": {
      const box = made("figure", "code");
      const head = made("figcaption");
      head.append(block.language || "code", copier(block.body));
      const pre = made("pre");
      pre.tabIndex = 0;
      pre.append(made("code", "", block.body));
      box.append(head, pre);
      return box;
    }
    case "heading": {
      const level = block.body.match(/^#+/)[0].length;
      const head = made("p", "heading");
      head.setAttribute("role", "heading");
      head.setAttribute("aria-level", String(Math.min(6, level + 2)));
      inline(head, block.body.replace(/^#+ /, ""));
      return head;
    }
    case "list": {
      const numbered = /^\s*\d/.test(block.body);
      const list = made(numbered ? "ol" : "ul");
      if (numbered) list.start = Number(block.body.match(/\d+/)[0]);
      for (const item of block.body.split(/\n(?=\s*(?:[-*+]|\d{1,3}[.)]) )/)) {
        const li = made("li");
        inline(li, item.replace(/^\s*(?:[-*+]|\d{1,3}[.)]) /, ""));
        list.append(li);
      }
      return list;
    }
    default: {
      const p = made("p");
      inline(p, block.body);
      return p;
    }
  }
}

// each mark reaches so far at most: a model that opens thousands and closes none costs nothing
const MARKS =
  /(?<!`)(`{1,4})(?!`)([\s\S]{1,2000}?)(?<!`)\1(?!`)|\*\*(?=\S)([\s\S]{0,400}?\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]{0,400}?[^\s*])\*(?![\w*])/g;

/** A line of text in pieces: {kind: "" | "code" | "strong" | "em", text}. */
export function pieces(text) {
  const found = [];
  let end = 0;
  for (const mark of text.matchAll(MARKS)) {
    if (mark.index > end) found.push({ kind: "", text: text.slice(end, mark.index) });
    if (mark[2] !== undefined) found.push({ kind: "code", text: mark[2] });
    else found.push({ kind: mark[3] !== undefined ? "strong" : "em", text: mark[3] ?? mark[4] });
    end = mark.index + mark[0].length;
  }
  if (end < text.length) found.push({ kind: "", text: text.slice(end) });
  return found;
}

function inline(place, text) {
  for (const { kind, text: part } of pieces(text)) place.append(kind ? made(kind, "", part) : part);
}

export function made(name, look = "", text = "") {
  const element = document.createElement(name);
  if (look) element.className = look;
  if (text) element.textContent = text;
  return element;
}

export function copier(text) {
  const button = made("button", "small", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}
