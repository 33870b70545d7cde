// Markdown as elements of the page. Text of a model never becomes HTML: only text nodes and the elements below are made.

function element(name, children = [], attributes = {}) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const INLINE = /(?<!`)(`+)(?!`)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|__(?=\S)([\s\S]*?\S)__(?!\w)|~~(?=\S)([\s\S]*?\S)~~|\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)|(?<!\w)_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)|!?\[([^\]]*)\]\(\s*(<[^>]*>|[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)(?:\s+"[^"]*")?\s*\)|(https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,;:!?*_~])|\\\(([\s\S]+?)\\\)|\\\[([\s\S]+?)\\\]|\$\$([\s\S]+?)\$\$|\\([!-/:-@[-`{-~])| *\n/;

/** What stands within a line, or a few. */
export function inline(text, depth = 0) {
  const parts = [];
  while (text) {
    // The work grows with the square of the length: a paragraph of a book is shorter.
    const found = depth < 8 && text.length < 8000 ? INLINE.exec(text) : null;
    if (!found) {
      parts.push(text);
      break;
    }
    if (found.index) parts.push(text.slice(0, found.index));
    const [all, , code, strong, strong2, gone, em, em2, label, target, bare, small, large, display, escaped] = found;
    const formula = small ?? large ?? display;
    const inside = (name, body) => element(name, inline(body, depth + 1));
    if (code !== undefined) parts.push(element("code", [code.replace(/\n/g, " ")]));
    else if (strong ?? strong2) parts.push(inside("strong", strong ?? strong2));
    else if (gone) parts.push(inside("del", gone));
    else if (em ?? em2) parts.push(inside("em", em ?? em2));
    else if (label !== undefined) parts.push(link(label, target.replace(/^<|>$/g, ""), depth));
    else if (bare) parts.push(link(bare, bare, 8));
    // Formulas stay as they were written.
    else if (formula !== undefined) parts.push(element("code", [formula.trim()], { "data-language": "latex" }));
    else if (escaped) parts.push(escaped);
    else parts.push(element("br"));
    text = text.slice(found.index + all.length);
  }
  return parts;
}

function link(label, target, depth) {
  const inside = inline(label, depth + 1);
  // Nothing but the web: no scripts, no data.
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return element("span", inside);
  return element("a", inside, { href: target, target: "_blank", rel: "noopener noreferrer nofollow" });
}

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`\n]*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ROW = /^ *\|?.*\|.*$/;
const DASHES = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;

/**
 * The blocks of a text.
 * @param {string} text
 * @returns {Node[]}
 */
export function blocks(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const made = [];
  let at = 0;
  const begins = (line, next) =>
    FENCE.test(line) || /^ {0,3}(#{1,6} |>)/.test(line) || ITEM.test(line) || RULE.test(line) ||
    (ROW.test(line) && DASHES.test(next ?? "") && next.includes("-"));
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = /^ {0,3}(#{1,6}) +(.*?)(?: +#+)? *$/.exec(line);
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      const end = new RegExp(`^ {0,3}${fence[2][0]}{${fence[2].length},} *$`);
      let last = at + 1;
      while (last < lines.length && !end.test(lines[last])) last += 1;
      made.push(code(lines.slice(at + 1, last).join("\n"), fence[3].trim()));
      at = last + 1;
    } else if (heading) {
      // The page has a heading of its own above.
      made.push(element(`h${Math.min(6, heading[1].length + 1)}`, inline(heading[2])));
      at += 1;
    } else if (RULE.test(line)) {
      made.push(element("hr"));
      at += 1;
    } else if (/^ {0,3}>/.test(line)) {
      const quoted = [];
      while (at < lines.length && /^ {0,3}>/.test(lines[at])) quoted.push(lines[at++].replace(/^ {0,3}> ?/, ""));
      made.push(element("blockquote", depth < 8 ? blocks(quoted.join("\n"), depth + 1) : [quoted.join("\n")]));
    } else if (ITEM.test(line)) {
      let list;
      [list, at] = items(lines, at, depth);
      made.push(list);
    } else if (ROW.test(line) && DASHES.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
      const rows = [];
      const head = cells(line);
      at += 2;
      while (at < lines.length && lines[at].trim() && ROW.test(lines[at])) rows.push(cells(lines[at++]));
      const row = (name, texts) => element("tr", texts.map((text) => element(name, inline(text))));
      const body = rows.map((texts) => row("td", head.map((_, i) => texts[i] ?? "")));
      made.push(element("table", [element("thead", [row("th", head)]), element("tbody", body)]));
    } else {
      const paragraph = [line];
      at += 1;
      while (at < lines.length && lines[at].trim() && !begins(lines[at], lines[at + 1])) paragraph.push(lines[at++]);
      made.push(element("p", inline(paragraph.join("\n"))));
    }
  }
  return made;
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** A list from line `at` on, and the line behind it. */
function items(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const list = element(isOrdered ? "ol" : "ul");
  if (isOrdered && parseInt(mark, 10) !== 1) list.setAttribute("start", parseInt(mark, 10));
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length < indent.length || /\d/.test(item[2]) !== isOrdered || RULE.test(lines[at])) break;
    const width = item[1].length + item[2].length + Math.max(1, Math.min(item[3].length, 4));
    const inner = [lines[at].slice(item[0].length)];
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      const isDeeper = line.length - line.trimStart().length >= Math.min(width, indent.length + 2);
      const isBlank = !line.trim();
      const goesOn = isBlank && /^ {2,}/.test(lines[at + 1] ?? "");
      if (isBlank ? !goesOn : !isDeeper && (ITEM.test(line) || !inner.at(-1).trim() || FENCE.test(line))) break;
      inner.push(line.slice(Math.min(width, line.length - line.trimStart().length)));
      at += 1;
    }
    const made = depth < 8 ? blocks(inner.join("\n"), depth + 1) : [inner.join("\n")];
    // A paragraph alone needs no space around it.
    const only = made.length && made[0].nodeName === "P" ? [...made[0].childNodes, ...made.slice(1)] : made;
    list.append(element("li", only));
    const next = at;
    while (at < lines.length && !lines[at].trim()) at += 1;
    if (at < lines.length && !ITEM.test(lines[at])) {
      at = next;
      break;
    }
  }
  return [list, at];
}

function code(text, language) {
  const inside = element("code", [text], language ? { "data-language": language } : {});
  const copy = element("button", ["Copy"], { type: "button", "data-copy": "", "aria-label": "Copy the code" });
  const box = element("pre", [inside], { tabindex: "0" });
  return element("div", [copy, box], { class: "code" });
}
