/** The transcript and the list of conversations as DOM: shows what main.js hands over and decides nothing. */

import { renderMarkdown } from './render.js';

export const $ = (id) => document.getElementById(id);

const clone = (id) => $(id).content.firstElementChild.cloneNode(true);

// Conversation list -------------------------------------------------------------------------------------------------

/** Lists the conversations; buttons carry `data-id` and, within the current one, `data-action`. */
export function showConversations(conversations, currentId, isRunning) {
  const focused = document.activeElement?.closest('#conversations li')?.dataset.id;
  const action = document.activeElement?.dataset?.action;
  const items = conversations.map((conversation) => {
    const item = clone('conversation-template');
    const open = item.querySelector('.open');
    item.dataset.id = conversation.id;
    open.textContent = conversation.title;
    open.classList.toggle('running', isRunning(conversation.id));
    if (conversation.id === currentId) open.setAttribute('aria-current', 'true');
    else item.querySelector('.actions').remove();
    return item;
  });
  $('conversations').replaceChildren(...items);
  const again = focused && items.find((item) => item.dataset.id === focused);
  if (again) (again.querySelector(`[data-action="${action}"]`) ?? again.querySelector('.open')).focus();
}

// Transcript --------------------------------------------------------------------------------------------------------

/** Shows a conversation, keeping the turns that are already there. */
export function showTranscript(conversation, running) {
  $('title').textContent = conversation.title;
  document.title = conversation.messages.length > 0 ? `${conversation.title} - kipp` : 'kipp';
  $('empty').hidden = conversation.messages.length > 0;
  const turns = $('turns');
  conversation.messages.forEach((message, index) => {
    const present = turns.children[index];
    if (present?.dataset.id === message.id) return;
    const turn = clone(`${message.role}-template`);
    turn.dataset.id = message.id;
    if (present) present.replaceWith(turn);
    else turns.append(turn);
  });
  while (turns.children.length > conversation.messages.length) turns.lastChild.remove();
  for (const message of conversation.messages) showMessage(message, running && message === conversation.messages.at(-1));
}

/** Brings one turn up to date; with `running` its answer is still being written. */
export function showMessage(message, running) {
  const turn = turnOf(message.id);
  if (!turn) return;
  const said = turn.querySelector('.said');
  if (message.role === 'user') {
    if (said.textContent !== message.content) said.textContent = message.content;
    return;
  }
  turn.setAttribute('aria-busy', String(running));
  showThought(turn.querySelector('.thought'), message, running);
  renderMarkdown(said, message.content, { partial: running });
  const outcome = turn.querySelector('.outcome');
  outcome.textContent = outcomeOf(message, running);
  outcome.hidden = outcome.textContent === '';
  outcome.classList.toggle('failed', message.state === 'failed');
  turn.querySelector('.stats').textContent = statsOf(message.stats);
  turn.querySelector('[data-action=regenerate]').textContent = message.state === 'failed' ? 'Try again' : 'Regenerate';
  if (following) scrollToEnd();
}

/** The thinking is folded, and rendered only while someone has unfolded it. */
function showThought(details, message, running) {
  details.hidden = !message.reasoning?.trim();
  if (details.hidden) return;
  const unfinished = message.thoughtMs === undefined;
  const thinking = running && unfinished;
  const length = message.thoughtMs < 1000 ? 'briefly' : `for ${(message.thoughtMs / 1000).toFixed(1)} s`;
  details.querySelector('summary').textContent = thinking ? 'Thinking' : unfinished ? 'Thought' : `Thought ${length}`;
  details.classList.toggle('thinking', thinking);
  const show = () => details.open && renderMarkdown(details.querySelector('.text'), message.reasoning, { partial: thinking });
  details.ontoggle = show;
  show();
}

function outcomeOf({ state, error }, running) {
  if (running) return '';
  if (state === 'failed') return error ?? 'The answer failed.';
  if (state === 'length') return 'The limit on tokens was reached.';
  return state === 'done' ? '' : 'Stopped before the end.';
}

function statsOf(stats) {
  const number = (value, digits = 0) => value.toLocaleString('en', { maximumFractionDigits: digits });
  const parts = [];
  const add = (value, words) => Number.isFinite(value) && parts.push(words(value));
  add(stats?.perSecond, (rate) => `${stats.counted ? '' : '~'}${number(rate, rate < 100 ? 1 : 0)} tokens/s`);
  add(stats?.tokens, (tokens) => `${number(tokens)} ${tokens === 1 ? 'token' : 'tokens'}`);
  add(stats?.promptTokens, (tokens) => `prompt ${number(tokens)}${stats.cached > 0 ? ` (${number(stats.cached)} cached)` : ''}`);
  add(stats?.firstMs, (ms) => `first after ${number(ms / 1000, 2)} s`);
  return parts.join(' \u00b7 ');
}

/** Puts a form in the place of a user's words; calls back with the new text when it is sent. */
export function editMessage(message, send) {
  const turn = turnOf(message.id);
  const form = clone('edit-template');
  const [said, actions] = [turn.querySelector('.said'), turn.querySelector('.actions')];
  const text = form.querySelector('textarea');
  text.value = message.content;
  const close = () => {
    form.remove();
    said.hidden = actions.hidden = false;
    actions.querySelector('[data-action=edit]').focus();
  };
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    if (text.value.trim() === '') return;
    close();
    send(text.value.trim());
  });
  form.querySelector('[data-action=cancel]').addEventListener('click', close);
  form.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') close();
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  said.hidden = actions.hidden = true;
  said.after(form);
  grow(text);
  text.addEventListener('input', () => grow(text));
  text.focus();
}

function turnOf(id) {
  return $('turns').querySelector(`[data-id="${CSS.escape(id)}"]`);
}

// Scrolling ---------------------------------------------------------------------------------------------------------

let following = true; // a reader at the end stays there while it grows; any other is not moved

export function scrollToEnd() {
  following = true;
  $('latest').hidden = true;
  $('log').scrollTop = $('log').scrollHeight;
}

$('log').addEventListener('scroll', () => {
  const log = $('log');
  following = log.scrollHeight - log.scrollTop - log.clientHeight < 24;
  $('latest').hidden = following;
});
// A keyboard that opens, or a message box that grows, takes room from the transcript.
new ResizeObserver(() => following && scrollToEnd()).observe($('log'));
$('latest').addEventListener('click', () => {
  scrollToEnd();
  $('log').focus();
});

// On a narrow screen the list of conversations lies over the transcript.

/** Opens or closes that list; says whether it was open. */
export function showSidebar(shown) {
  const wasShown = document.body.classList.contains('sidebar-open');
  document.body.classList.toggle('sidebar-open', shown);
  document.querySelector('main').inert = shown;
  $('scrim').hidden = !shown;
  $('menu').setAttribute('aria-expanded', String(shown));
  return wasShown;
}

// Small things ------------------------------------------------------------------------------------------------------

/** Makes a text box as high as its text; the style sheet sets the limit. */
export function grow(box) {
  box.style.height = 'auto';
  box.style.height = `${box.scrollHeight + 2}px`;
}

/** Shows a line above the transcript, with a button where there is something to do; null takes it away. */
export function showNotice(text, label, action) {
  const notice = $('notice');
  const [words, button] = notice.children;
  notice.hidden = !text;
  words.textContent = text ?? '';
  button.hidden = !label;
  button.textContent = label ?? '';
  button.onclick = action ?? null;
}

let spoken = 0; // blocks of the current answer that were read out

/** Tells a screen reader what happens; an answer is read out block by block as each is finished. */
export function announce(words) {
  spoken = 0;
  $('live').replaceChildren(words);
}

export function announceBlocks(message, finished) {
  const turn = turnOf(message.id);
  const speak = ({ textContent }) => $('live').append(Object.assign(document.createElement('p'), { textContent }));
  const blocks = turn?.querySelector('.said').children ?? [];
  const end = finished ? blocks.length : blocks.length - 1;
  for (; spoken < end; spoken += 1) speak(blocks[spoken]);
  const outcome = turn?.querySelector('.outcome:not([hidden])');
  if (finished && outcome) speak(outcome);
}

/** Asks in a dialog; resolves to the text entered, true where no text was asked for, or null when it was cancelled. */
export function ask({ title, text = '', value, label, danger = false }) {
  const [dialog, input] = [$('ask'), $('ask-value')];
  $('ask-title').textContent = title;
  $('ask-text').textContent = text;
  $('ask-text').hidden = !text;
  $('ask-ok').textContent = label;
  $('ask-ok').classList.toggle('danger', danger);
  input.hidden = input.disabled = value === undefined;
  input.required = true;
  input.value = value ?? '';
  dialog.returnValue = 'cancel';
  dialog.showModal();
  if (value !== undefined) input.select();
  if (danger) dialog.querySelector('[value=cancel]').focus();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue !== 'ok' ? null : value === undefined ? true : input.value.trim() || null);
  });
}

/** Copies to the clipboard, also where the page is served over plain HTTP to another host and the clipboard API is missing. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const box = document.createElement('textarea');
    box.value = text;
    box.className = 'unseen';
    button.after(box);
    box.select();
    document.execCommand('copy');
    box.remove();
    button.focus();
  }
  const words = button.textContent;
  if (words === 'Copied') return;
  button.textContent = 'Copied';
  setTimeout(() => (button.textContent = words), 1500);
}

/** Offers a text as a file to keep. */
export function download(name, type, text) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
