// Markdown as elements of the page: markdown-it parses it, Temml sets formulas, highlight.js colours
// code. What a model writes never becomes HTML of its own.

const { markdownit, temml, hljs } = globalThis;

/** Longer code keeps one colour. */
const MOST_COLOURED = 100_000;
/** A formula that does not end within so many characters is text. */
const LONGEST_FORMULA = 5_000;

const parser = markdownit({ breaks: true, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
// Nothing but the web: no scripts, no data, no paths of this server.
parser.validateLink = (target) => /^(https?:\/\/|mailto:)/i.test(target);
const escape = parser.utils.escapeHtml;

/** What begins a formula, what ends it, and whether it stands on lines of its own. */
const MARKS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

/** Where the formula that begins a text ends, or -1. A price is no formula: "$5 and $6". */
function formulaEnd(text, end) {
  if (end.length > 1) return text.indexOf(end);
  if (/\s/.test(text[0] ?? " ")) return -1;
  for (let at = text.indexOf(end); at >= 0; at = text.indexOf(end, at + 1)) {
    const isInside = text[at - 1] === "\\";
    if (!isInside) return /\s/.test(text[at - 1]) || /\d/.test(text[at + 1] ?? "") ? -1 : at;
  }
  return -1;
}

/** A rule of markdown-it: a formula within a line. */
function formula(state, silent) {
  const { src, pos, posMax } = state;
  const mark = MARKS.find(([begin]) => src.startsWith(begin, pos));
  if (!mark) return false;
  const [begin, end, isDisplay] = mark;
  const within = src.slice(pos + begin.length, Math.min(posMax, pos + LONGEST_FORMULA));
  const length = formulaEnd(within, end);
  if (length <= 0) return false;
  if (!silent) {
    const token = state.push("formula", "math", 0);
    token.content = within.slice(0, length);
    token.meta = { isDisplay };
  }
  state.pos = pos + begin.length + length + end.length;
  return true;
}

/** A rule of markdown-it: a formula on lines of its own, which may be blank or look like lists. */
function formulaBlock(state, first, last, silent) {
  const start = state.bMarks[first] + state.tShift[first];
  if (state.sCount[first] - state.blkIndent >= 4) return false;
  const mark = MARKS.find(([begin, , isDisplay]) => isDisplay && state.src.startsWith(begin, start));
  if (!mark) return false;
  const [begin, end] = mark;
  const lines = [];
  let size = 0;
  let line = first;
  const take = (content) => {
    const token = state.push("formula", "math", 0);
    token.block = true;
    token.content = content;
    token.meta = { isDisplay: true };
    token.map = [first, line];
    state.line = line;
    return true;
  };
  for (; line < last && size < LONGEST_FORMULA; line += 1) {
    if (line > first && !state.isEmpty(line) && state.sCount[line] < state.blkIndent) return false;
    const from = line === first ? start + begin.length : state.bMarks[line] + state.tShift[line];
    const text = state.src.slice(from, state.eMarks[line]);
    size += text.length + 1;
    const at = text.indexOf(end);
    if (at < 0) {
      lines.push(text);
      continue;
    }
    if (text.slice(at + end.length).trim()) return false;
    if (silent) return true;
    line += 1;
    return take([...lines, text.slice(0, at)].join("\n"));
  }
  // The end of a text that grows may still come.
  const isOpen = state.env.isGrowing && line === state.lineMax;
  return isOpen && (silent || take(lines.join("\n")));
}

parser.inline.ruler.before("escape", "formula", formula);
parser.block.ruler.before("fence", "formula", formulaBlock, { alt: ["paragraph", "reference", "blockquote", "list"] });

const { rules } = parser.renderer;
rules.formula = (tokens, at) => {
  const { content, meta, block } = tokens[at];
  const name = block ? "p" : "span";
  return `<${name} class="formula" ${meta.isDisplay ? "data-display" : ""}>${escape(content)}</${name}>`;
};
rules.fence = rules.code_block = (tokens, at) => {
  const language = tokens[at].info.trim().split(/\s+/)[0];
  const text = tokens[at].content.replace(/\n$/, "");
  const named = language ? ` data-language="${escape(language)}"` : "";
  const isKnown = text.length < MOST_COLOURED && hljs.getLanguage(language);
  const coloured = isKnown ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escape(text);
  return `<div class="code"><button type="button" data-copy aria-label="Copy the code">Copy</button><pre tabindex="0"><code${named}>${coloured}</code></pre></div>`;
};
// A picture would be fetched from where the model says. Within a link, only its text is left.
rules.image = (tokens, at) => {
  const target = tokens[at].attrGet("src");
  const before = tokens.slice(0, at).findLast(({ type }) => type.startsWith("link_"));
  if (before?.type === "link_open") return escape(tokens[at].content || target);
  return `<a href="${escape(target)}" target="_blank" rel="noopener noreferrer nofollow">${escape(tokens[at].content || target)}</a>`;
};
rules.link_open = (tokens, at, options, _, renderer) => {
  tokens[at].attrSet("target", "_blank");
  tokens[at].attrSet("rel", "noopener noreferrer nofollow");
  return renderer.renderToken(tokens, at, options);
};
// The page has a heading of its own above.
rules.heading_open = (tokens, at) => `<h${Math.min(6, Number(tokens[at].tag[1]) + 1)}>`;
rules.heading_close = (tokens, at) => `</h${Math.min(6, Number(tokens[at].tag[1]) + 1)}>`;
// The page allows no styles in HTML.
rules.th_open = rules.td_open = (tokens, at) => {
  const side = /text-align:(\w+)/.exec(tokens[at].attrGet("style") ?? "");
  return side ? `<${tokens[at].tag} class="${side[1]}">` : `<${tokens[at].tag}>`;
};

/** Elements for tokens of the parser. */
function elements(tokens, env) {
  const template = document.createElement("template");
  template.innerHTML = parser.renderer.render(tokens, parser.options, env);
  for (const place of template.content.querySelectorAll(".formula")) {
    const source = place.textContent.trim();
    try {
      temml.render(source, place, { displayMode: "display" in place.dataset, throwOnError: true, maxSize: [25, 100], maxExpand: 200 });
      // Labels of formulas would be ids of the page, and references links within it.
      for (const labelled of place.querySelectorAll("[id]")) labelled.removeAttribute("id");
      for (const link of place.querySelectorAll("a")) link.replaceWith(...link.childNodes);
    } catch {
      // What is no formula, or not yet, stays as it was written.
      const code = document.createElement("code");
      code.textContent = source;
      place.replaceChildren(code);
    }
  }
  return template.content;
}

/** The elements of a text. */
export function blocks(text) {
  const env = {};
  return [...elements(parser.parse(text, env), env).childNodes];
}

/** Shows a text that grows in a box. Of what is there already, only the last block is made anew. */
export class Growing {
  #box;
  #env = { isGrowing: true };
  /** Characters of blocks that cannot change any more, and their elements. */
  #finished = 0;
  #kept = 0;

  constructor(box) {
    this.#box = box;
  }

  /** Shows `text`, which begins with what was shown before. */
  show(text) {
    const rest = text.slice(this.#finished);
    const tokens = parser.parse(rest, this.#env);
    const last = tokens.findLastIndex((token) => token.level === 0 && token.nesting >= 0);
    while (this.#box.childNodes.length > this.#kept) this.#box.lastChild.remove();
    if (last > 0) {
      this.#box.append(elements(tokens.slice(0, last), this.#env));
      this.#kept = this.#box.childNodes.length;
      this.#finished += lineStart(rest, tokens[last].map[0]);
    }
    this.#box.append(elements(tokens.slice(Math.max(0, last)), this.#env));
  }
}

/** Where a line begins, counted from 0. */
function lineStart(text, line) {
  const ends = /\r\n?|\n/g;
  for (let left = line; left > 0 && ends.exec(text); left -= 1);
  return ends.lastIndex;
}
