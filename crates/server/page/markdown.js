/**
 * Markdown to a tree of plain objects: the part of CommonMark, tables and TeX delimiters that models write.
 *
 * A node is a string or { type, children, ... }. HTML is text like any other, a link keeps its target only when it is http,
 * https or mailto, and an image becomes a link: nothing here can run or fetch anything. Every step is linear in the length
 * of the text, since an answer is parsed again for each frame while it streams.
 *
 * With `partial` the text is the beginning of something longer: marks that are still open at the end count as closed, and
 * a last line that may yet become a mark is held back. So words do not change their look when the closing mark arrives.
 */

const MAX_DEPTH = 10; // of quotes and lists in each other
const MAX_OPEN = 64; // emphasis marks waiting for their closing mark

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(?=\S)|[ \t]*$)/;
const DELIMITER_ROW = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH_END = { '$$': '$$', '\\[': '\\]', '\\(': '\\)', $: '$' };

/** Parses a whole text to a list of block nodes. */
export function parse(text, { partial = false } = {}) {
  const lines = text.replaceAll('\r\n', '\n').split('\n');
  if (partial) holdBack(lines);
  return parseBlocks(lines, partial, 0);
}

/** The target of a link if it is one to follow, else null. */
export function safeTarget(target) {
  try {
    const { protocol, href } = new URL(target);
    return ['http:', 'https:', 'mailto:'].includes(protocol) ? href : null;
  } catch {
    return null;
  }
}

/** Cuts marks off the last line that the next characters may give another meaning. */
function holdBack(lines) {
  const last = lines.pop().trimEnd();
  let end = last.length;
  while (end > 0 && '*_~`'.includes(last[end - 1])) end -= 1;
  const rest = last.slice(0, end);
  if (!/^\s*(?:[-+#>|=:]+|\d{1,9}[.)]?)?$/.test(rest)) lines.push(rest);
}

// Blocks ------------------------------------------------------------------------------------------------------------

function parseBlocks(lines, partial, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    at = skipBlank(lines, at);
    if (at === lines.length) break;
    const read = (depth < MAX_DEPTH && blockAt(lines, at, partial)) || readParagraph;
    const [block, next] = read(lines, at, partial, depth);
    blocks.push(block);
    at = next;
  }
  return blocks;
}

/** The reader of the block that starts at a line, or null where a paragraph goes on. */
function blockAt(lines, at, partial) {
  const line = lines[at];
  if (FENCE.test(line)) return readFence;
  if (HEADING.test(line)) return readHeading;
  if (RULE.test(line)) return readRule;
  if (QUOTE.test(line)) return readQuote;
  if (ITEM.test(line)) return readList;
  if (mathOpening(line)) return readMath;
  if (startsTable(lines, at, partial)) return readTable;
  return null;
}

function readFence(lines, at) {
  const [, fence, info] = FENCE.exec(lines[at]);
  const indent = lines[at].indexOf(fence);
  const code = [];
  for (at += 1; at < lines.length; at += 1) {
    const line = lines[at].trim();
    if (line.length >= fence.length && line === fence[0].repeat(line.length)) break;
    code.push(dedent(lines[at], indent));
  }
  return [{ type: 'code', language: info.trim().split(/\s/)[0], text: code.join('\n') }, at + 1];
}

function readHeading(lines, at, partial) {
  const [, marks, text = ''] = HEADING.exec(lines[at]);
  const open = partial && at + 1 === lines.length;
  return [{ type: 'heading', level: marks.length, children: parseInline(text.trim(), open) }, at + 1];
}

function readRule(lines, at) {
  return [{ type: 'rule' }, at + 1];
}

function readQuote(lines, at, partial, depth) {
  const inner = [];
  for (; at < lines.length && QUOTE.test(lines[at]); at += 1) inner.push(lines[at].replace(QUOTE, ''));
  return [{ type: 'quote', children: parseBlocks(inner, partial && at === lines.length, depth + 1) }, at];
}

function readList(lines, at, partial, depth) {
  const [, , firstMark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(firstMark);
  const list = { type: 'list', ordered, start: ordered ? parseInt(firstMark, 10) : 1, children: [] };
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    if (!match || RULE.test(lines[at]) || match[2].at(-1) !== firstMark.at(-1)) break;
    const [, indent, mark, gap = ' '] = match;
    const width = indent.length + mark.length + (gap.length > 4 ? 1 : gap.length);
    const inner = [lines[at].slice(width)];
    // Models indent what belongs to an item by two columns or more, whatever the width of the mark.
    const needed = Math.min(width, indent.length + 2);
    let strip = null; // columns to take off, as the first line that is indented has them
    for (at += 1; at < lines.length; ) {
      const next = skipBlank(lines, at);
      if (!belongsToItem(lines, at, next, needed)) break;
      if (indentOf(lines[next]) >= needed) strip ??= Math.min(width, indentOf(lines[next]));
      for (const end = Math.max(next, at + 1); at < end; at += 1) inner.push(dedent(lines[at], strip ?? 0));
    }
    list.children.push({ type: 'item', children: parseBlocks(inner, partial && at === lines.length, depth + 1) });
  }
  return [list, at];
}

/** Whether a line goes on with an item. Blank lines do if what follows them does, or is the next item. */
function belongsToItem(lines, at, next, needed) {
  if (next === lines.length) return false;
  if (indentOf(lines[next]) >= needed) return true;
  return next > at ? ITEM.test(lines[next]) : lines[at - 1].trim() !== '' && !blockAt(lines, at, false);
}

function skipBlank(lines, at) {
  while (at < lines.length && lines[at].trim() === '') at += 1;
  return at;
}

function mathOpening(line) {
  const start = line.trimStart().slice(0, 2);
  return start === '$$' || start === '\\[' ? start : null;
}

/** A formula on lines of its own; one that is never closed ends with its paragraph. */
function readMath(lines, at, partial, depth) {
  const closing = MATH_END[mathOpening(lines[at])];
  const [first, ...rest] = lines[at].trimStart().slice(2).split(closing);
  if (rest.join(closing).trim() !== '') return readParagraph(lines, at, partial, depth); // words follow it
  const text = [first];
  for (let closed = rest.length > 0; (at += 1) < lines.length && !closed && lines[at].trim() !== ''; ) {
    closed = lines[at].includes(closing);
    text.push(lines[at].trimEnd().endsWith(closing) ? lines[at].trimEnd().slice(0, -2) : lines[at]);
  }
  return [{ type: 'math', text: text.join('\n').trim() }, at];
}

/** A header line and a row of dashes below it; while more may come, a line that starts with a bar will do. */
function startsTable(lines, at, partial) {
  if (!lines[at].includes('|')) return false;
  if (at + 1 < lines.length && DELIMITER_ROW.test(lines[at + 1])) {
    return splitRow(lines[at]).length === splitRow(lines[at + 1]).length;
  }
  return partial && lines[at].trimStart()[0] === '|' && at + 2 >= lines.length && /^[-|: ]*$/.test(lines[at + 1] ?? '');
}

function readTable(lines, at, partial) {
  const header = splitRow(lines[at]);
  const align = splitRow(lines[at + 1] ?? '').map((cell) => {
    const right = cell.endsWith(':');
    return cell.startsWith(':') ? (right ? 'center' : 'left') : right ? 'right' : null;
  });
  const row = (cells, open) => ({
    type: 'row',
    children: header.map((_, column) => ({
      type: 'cell',
      align: align[column] ?? null,
      children: parseInline(cells[column] ?? '', open),
    })),
  });
  const rows = [row(header, partial && at + 1 >= lines.length)];
  for (at += 2; at < lines.length && lines[at].includes('|') && lines[at].trim() !== ''; at += 1) {
    rows.push(row(splitRow(lines[at]), partial && at + 1 === lines.length));
  }
  return [{ type: 'table', children: rows }, at];
}

/** The cells of a table row; a bar within code or after a backslash is a character. */
function splitRow(line) {
  const cells = [''];
  const parts = line.trim().replace(/^\|/, '').split(/(\\.|`+[^`]*`+|\|)/);
  for (const part of parts) {
    if (part === '|') cells.push('');
    else cells[cells.length - 1] += part === '\\|' ? '|' : part;
  }
  if (cells.length > 1 && cells.at(-1).trim() === '') cells.pop();
  return cells.map((cell) => cell.trim());
}

function readParagraph(lines, at, partial) {
  const text = [lines[at].trim()];
  for (at += 1; at < lines.length && lines[at].trim() !== '' && !blockAt(lines, at, partial); at += 1) {
    text.push(lines[at].trim());
  }
  const open = partial && at === lines.length;
  return [{ type: 'paragraph', children: parseInline(text.join('\n'), open) }, at];
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function dedent(line, width) {
  return line.slice(Math.min(width, indentOf(line)));
}

// Inline ------------------------------------------------------------------------------------------------------------

const PLAIN = /[^\\`$<[\]!*_~\nh]+/y;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const BARE_LINK = /https?:\/\/[^\s<>"`|[\]]+/y;
const TARGET = /\([ \t]*(?:<([^<>\n]*)>|((?:[^\s()]|\([^\s()]*\))*))(?:[ \t]+(?:"[^"]{0,300}"|'[^']{0,300}'))?[ \t]*\)/y;
const UNFINISHED_TARGET = /\([^\s()]*$/y;
const SPACE = /\s/u;
const PUNCTUATION = /[\p{P}\p{S}]/u;

/** Parses the text of one block; with `open` it is still being written. */
function parseInline(text, open) {
  const tokens = []; // strings, nodes and { mark, count, opens, closes }
  const brackets = []; // places of '[' in tokens that may start a link
  const absent = new Set(); // what the rest of the text does not hold, so that it is looked for only once
  let at = 0;

  const find = (needle, from) => {
    const found = absent.has(needle) ? -1 : text.indexOf(needle, from);
    if (found < 0) absent.add(needle);
    return found;
  };
  const take = (pattern) => {
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (match) at += match[0].length;
    return match;
  };
  const literal = (length) => {
    tokens.push(text.slice(at, at + length));
    at += length;
  };

  while (at < text.length) {
    const plain = take(PLAIN);
    if (plain) {
      tokens.push(plain[0]);
      continue;
    }
    const char = text[at];
    const next = text[at + 1];
    if (char === '\n') {
      tokens.push({ type: 'break' });
      at += 1;
    } else if (char === '`') {
      const span = codeSpan(text, at, open, find);
      tokens.push(span.node);
      at = span.end;
    } else if (char === '$' || (char === '\\' && (next === '(' || next === '['))) {
      const formula = mathSpan(text, at, open, find);
      tokens.push(formula.node);
      at = formula.end;
    } else if (char === '\\') {
      if (next === '\n') tokens.push('');
      else tokens.push(next !== undefined && /[!-/:-@[-`{-~]/.test(next) ? text[++at] : char);
      at += 1;
    } else if (char === '<') {
      const link = take(AUTOLINK);
      if (link) tokens.push(linkTo(link[1], [link[1].replace('mailto:', '')]) ?? link[0]);
      else literal(1);
    } else if (char === 'h') {
      const bare = /\w/.test(text[at - 1] ?? '') ? null : bareLink(text, at);
      if (bare) tokens.push(bare.node);
      else tokens.push(char);
      at = bare ? bare.end : at + 1;
    } else if (char === '!') {
      if (next !== '[') tokens.push(char); // an image is shown as a link
      at += 1;
    } else if (char === '[') {
      brackets.push(tokens.length);
      literal(1);
    } else if (char === ']') {
      const start = brackets.pop();
      at += 1;
      const target = start === undefined ? null : take(TARGET);
      const href = target && safeTarget(target[1] ?? target[2]);
      if (href) {
        const label = tokens.splice(start).slice(1).flatMap((token) => (token.type === 'link' ? token.children : token));
        tokens.push({ type: 'link', href, children: emphasise(label, false) });
        brackets.length = 0; // a link holds no link
      } else if (open && start !== undefined && !target && take(UNFINISHED_TARGET)) {
        tokens.splice(start, 1);
      } else {
        tokens.push(']' + (target?.[0] ?? ''));
      }
    } else {
      tokens.push(markRun(text, at));
      at += tokens.at(-1).count;
    }
  }
  return emphasise(tokens, open);
}

/** Code between two runs of as many backticks; a run without its twin is text. */
function codeSpan(text, at, open, find) {
  let start = at;
  while (text[start] === '`') start += 1;
  const fence = text.slice(at, start);
  let end = find(fence, start);
  while (end >= 0 && text[end + fence.length] === '`') {
    let past = end;
    while (text[past] === '`') past += 1;
    end = find(fence, past);
  }
  if (end < 0 && !open) return { node: fence, end: start };
  let code = text.slice(start, end < 0 ? undefined : end).replaceAll('\n', ' ');
  if (code.startsWith(' ') && code.endsWith(' ') && code.trim() !== '') code = code.slice(1, -1);
  return { node: { type: 'codespan', text: code }, end: end < 0 ? text.length : end + fence.length };
}

/** TeX keeps its source, so that its underscores and asterisks stay what they are. Sums of money are not TeX. */
function mathSpan(text, at, open, find) {
  const opening = text[at] === '$' && text[at + 1] !== '$' ? '$' : text.slice(at, at + 2);
  const closing = MATH_END[opening];
  const start = at + opening.length;
  let end = find(closing, start);
  if (end < 0 && open && opening !== '$') end = text.length;
  const body = text.slice(start, Math.max(start, end));
  const fits = end > start && (opening !== '$' || (!SPACE.test(body[0] + body.at(-1)) && !/\d/.test(text[end + 1] ?? '')));
  if (!fits) return { node: opening, end: start };
  return { node: { type: 'mathspan', text: body.trim() }, end: end + closing.length };
}

/** An address in running text, without the punctuation that follows it. */
function bareLink(text, at) {
  BARE_LINK.lastIndex = at;
  const match = BARE_LINK.exec(text)?.[0];
  if (!match) return null;
  const trailing = match.includes('(') ? ".,;:!?'*_~" : ".,;:!?'*_~)";
  let length = match.length;
  while (trailing.includes(match[length - 1])) length -= 1;
  const address = match.slice(0, length);
  const node = linkTo(address, [address]);
  return node && { node, end: at + address.length };
}

function linkTo(target, children) {
  const href = safeTarget(target);
  return href && { type: 'link', href, children };
}

/** A run of one mark, with what CommonMark's flanking rules allow it to do. */
function markRun(text, at) {
  const mark = text[at];
  let end = at;
  while (text[end] === mark) end += 1;
  const before = text[at - 1] ?? ' ';
  const after = text[end] ?? ' ';
  const [spaceBefore, spaceAfter] = [SPACE.test(before), SPACE.test(after)];
  const [pointBefore, pointAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
  const left = !spaceAfter && (!pointAfter || spaceBefore || pointBefore);
  const right = !spaceBefore && (!pointBefore || spaceAfter || pointAfter);
  const loose = mark !== '_';
  return {
    mark,
    count: end - at,
    opens: left && (loose || !right || pointBefore),
    closes: right && (loose || !left || pointAfter),
  };
}

/** Turns marks that pair up into nodes and the others into text. */
function emphasise(tokens, open) {
  const stack = [{ run: null, count: 0, children: [] }]; // from the outside in
  const append = (node) => {
    const { children } = stack.at(-1);
    if (typeof node === 'string' && typeof children.at(-1) === 'string') children[children.length - 1] += node;
    else if (node !== '') children.push(node);
  };
  const spill = () => {
    const { run, count, children } = stack.pop();
    append(run.mark.repeat(count));
    children.forEach(append);
  };
  const wrap = (used) => {
    const frame = stack.pop();
    const type = frame.run.mark === '~' ? 'deleted' : used === 2 ? 'strong' : 'emphasis';
    const node = { type, children: frame.children };
    frame.count -= used;
    if (frame.count > 0) stack.push({ ...frame, children: [node] });
    else append(node);
  };

  for (const token of tokens) {
    if (!token.mark || token.count > 3) {
      append(token.mark ? token.mark.repeat(token.count) : token);
      continue;
    }
    let { count } = token;
    while (token.closes && count > 0) {
      const depth = stack.findLastIndex(({ run, count: waiting }) => run?.mark === token.mark && pairing(waiting, count));
      if (depth < 0) break;
      while (stack.length > depth + 1) spill();
      const used = pairing(stack[depth].count, count);
      count -= used;
      wrap(used);
    }
    const mayOpen = token.opens && count > 0 && stack.length < MAX_OPEN && (token.mark !== '~' || count === 2);
    if (mayOpen) stack.push({ run: token, count, children: [] });
    else append(token.mark.repeat(count));
  }
  while (stack.length > 1) {
    const { run, count, children } = stack.at(-1);
    if (open && !run.closes && children.length > 0) wrap(Math.min(count, 2));
    else spill();
  }
  return stack[0].children;
}

/** How many marks two runs use up on each other: two for strong, one for emphasis where both are odd, else none. */
function pairing(opening, closing) {
  if (opening >= 2 && closing >= 2) return 2;
  return opening % 2 === 1 && closing % 2 === 1 ? 1 : 0;
}
