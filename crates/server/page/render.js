/**
 * Markdown trees to DOM nodes. Elements come from the list below and text becomes text nodes, so nothing that a model
 * writes is ever read as HTML. A tree is laid over what is already there: only what differs is touched, so a streaming answer
 * does not flicker and a selection in it survives.
 */

import { parse } from './markdown.js';

/** Shows a Markdown text as the content of an element. */
export function renderMarkdown(element, text, options) {
  patch(element, parse(text, options).map(shape));
}

/** An element to be: a tag, constant attributes (a link's checked target aside) and children that are shapes or text. */
function h(tag, attributes, ...children) {
  return { tag, attributes, children };
}

function shape(node) {
  if (typeof node === 'string') return node;
  const children = () => node.children.map(shape);
  switch (node.type) {
    case 'paragraph': return h('p', {}, ...children());
    // The page has its title as level 1 and a heading a turn as level 2.
    case 'heading': return h(`h${Math.min(node.level + 2, 6)}`, {}, ...children());
    case 'quote': return h('blockquote', {}, ...children());
    case 'list': return node.ordered ? h('ol', { start: node.start }, ...children()) : h('ul', {}, ...children());
    case 'item': return h('li', {}, ...children());
    case 'rule': return h('hr', {});
    case 'table': return table(node.children);
    case 'code': return code(node);
    case 'math': return h('pre', { class: 'math', tabindex: 0 }, h('code', {}, node.text));
    case 'strong': return h('strong', {}, ...children());
    case 'emphasis': return h('em', {}, ...children());
    case 'deleted': return h('del', {}, ...children());
    case 'codespan': return h('code', {}, node.text);
    case 'mathspan': return h('code', { class: 'math' }, node.text);
    case 'link': return h('a', { href: node.href, rel: 'noopener noreferrer', target: '_blank' }, ...children());
    case 'break': return h('br', {});
  }
}

function code({ language, text }) {
  const head = h('figcaption', {}, h('span', {}, language || 'text'), h('button', { type: 'button', class: 'copy-code' }, 'Copy'));
  return h('figure', { class: 'code' }, head, h('pre', { tabindex: 0 }, h('code', {}, text)));
}

function table([header, ...rows]) {
  const cells = (tag, attributes) => (row) =>
    h('tr', {}, ...row.children.map(({ align, children }) => {
      return h(tag, { ...attributes, ...(align && { class: align }) }, ...children.map(shape));
    }));
  const head = h('thead', {}, cells('th', { scope: 'col' })(header));
  const body = h('tbody', {}, ...rows.map(cells('td', {})));
  return h('div', { class: 'table', role: 'group', 'aria-label': 'Table', tabindex: 0 }, h('table', {}, head, body));
}

/** Makes the children of an element equal to the shapes, keeping every node that already fits. */
function patch(parent, shapes) {
  shapes.forEach((wanted, index) => {
    const present = parent.childNodes[index];
    if (typeof wanted === 'string' && present?.nodeType === Node.TEXT_NODE) {
      if (wanted.startsWith(present.data)) present.appendData(wanted.slice(present.length));
      else present.data = wanted;
    } else if (wanted.tag && present?.localName === wanted.tag) {
      setAttributes(present, wanted.attributes);
      patch(present, wanted.children);
    } else {
      const made = build(wanted);
      if (present) present.replaceWith(made);
      else parent.append(made);
    }
  });
  while (parent.childNodes.length > shapes.length) parent.lastChild.remove();
}

function build(wanted) {
  if (typeof wanted === 'string') return document.createTextNode(wanted);
  const element = document.createElement(wanted.tag);
  setAttributes(element, wanted.attributes);
  patch(element, wanted.children);
  return element;
}

function setAttributes(element, attributes) {
  for (const name of element.getAttributeNames()) {
    if (!(name in attributes)) element.removeAttribute(name);
  }
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}
