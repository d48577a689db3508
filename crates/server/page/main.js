/** Ties the page together: what the reader does, what the server answers, what is kept. */

import { receiver, requestFor, titleOf, toMarkdown } from './answer.js';
import { ApiError, chat, health, models } from './api.js';
import { offerModels, onSaved, openSettings, settings } from './settings.js';
import * as store from './store.js';
import * as view from './view.js';

const { $ } = view;
const SAVE_EVERY_MS = 1000; // while an answer streams
const PAUSE_SHARE = 3; // a frame that took n ms to draw is followed by a pause of 3 n ms

const loaded = store.loadConversations();
const conversations = new Map(loaded.conversations.map((conversation) => [conversation.id, conversation]));
const running = new Map(); // id of a conversation -> AbortController of the answer being written in it
let current = store.newConversation();

// Conversations -----------------------------------------------------------------------------------------------------

function open(conversation) {
  current = conversation;
  store.saveCurrentId(current.id);
  drawAll();
  view.scrollToEnd();
}

function drawAll() {
  drawList();
  view.showTranscript(current, running.has(current.id));
  drawComposer();
}

function drawList() {
  const newestFirst = [...conversations.values()].sort((a, b) => b.updated - a.updated);
  view.showConversations(newestFirst, current.id, (id) => running.has(id));
}

function drawComposer() {
  const busy = running.has(current.id);
  $('stop').hidden = !busy;
  $('send').hidden = busy;
}

function keep(conversation) {
  conversations.set(conversation.id, conversation);
  if (!store.saveConversation(conversation)) {
    view.showNotice('The browser has no room left: this conversation is lost when the page is closed. Export or delete some.');
  }
}

function startNew() {
  view.showSidebar(false);
  open(store.newConversation());
  focusPrompt();
}

const actions = {
  async rename(conversation) {
    const title = await view.ask({ title: 'Rename the conversation', value: conversation.title, label: 'Rename' });
    if (!title) return;
    conversation.title = title;
    keep(conversation);
    drawAll();
  },
  export(conversation) {
    const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, '-').slice(0, 60);
    view.download(`${name || 'conversation'}.md`, 'text/markdown', toMarkdown(conversation));
  },
  async delete({ id, title }) {
    const text = `"${title}" is removed from this browser for good.`;
    if (!(await view.ask({ title: 'Delete the conversation?', text, label: 'Delete', danger: true }))) return;
    running.get(id)?.abort();
    running.delete(id);
    conversations.delete(id);
    store.removeConversation(id);
    startNew();
  },
};

// Answers -----------------------------------------------------------------------------------------------------------

function send(text) {
  if (!conversations.has(current.id)) current.title = titleOf(text);
  current.messages.push(store.newMessage('user', text));
  answer(current);
}

/** Drops a message and all that follow it, then asks again: with the new text of a question, or for another answer. */
function sendAgain(message, text) {
  running.get(current.id)?.abort();
  current.messages.length = current.messages.indexOf(message);
  if (text === undefined) answer(current);
  else send(text);
  focusPrompt();
}

/** Streams an answer into the conversation, whichever one is on the screen meanwhile. */
async function answer(conversation) {
  const request = requestFor(conversation, settings, $('model').value);
  const message = { ...store.newMessage('assistant'), state: 'streaming' };
  const receive = receiver(message);
  const controller = new AbortController();
  const { signal } = controller;
  conversation.messages.push(message);
  conversation.updated = Date.now();
  running.set(conversation.id, controller);
  keep(conversation);
  drawAll();
  view.scrollToEnd();
  view.announce('Answering');

  const started = performance.now();
  let saved = started;
  try {
    for await (const chunk of chat(request, { key: settings.key, signal, conversation: conversation.id })) {
      signal.throwIfAborted();
      const now = performance.now();
      receive(chunk, now - started);
      drawSoon(conversation, message);
      if (now - saved > SAVE_EVERY_MS) {
        saved = now;
        keep(conversation);
      }
    }
    if (message.state === 'streaming') message.state = 'done';
  } catch (error) {
    message.state = signal.aborted ? 'stopped' : 'failed';
    if (!signal.aborted) message.error = explain(error);
  }
  if (running.get(conversation.id) !== controller) return; // sent again or deleted meanwhile
  running.delete(conversation.id);
  keep(conversation);
  drawList();
  if (conversation !== current) return;
  view.showMessage(message, false);
  view.announceBlocks(message, true);
  drawComposer();
}

function explain(error) {
  if (!(error instanceof ApiError)) return `Something went wrong in the page: ${error.message}`;
  return error.status === 401 ? `${error.message} Enter an API key in the settings.` : error.message;
}

let drawing = false;
let stale = false; // whether more came since the last drawing

/** Draws an answer in the next frame, and less often when drawing it takes long. */
function drawSoon(conversation, message) {
  stale = true;
  if (drawing || conversation !== current) return;
  drawing = true;
  requestAnimationFrame(() => {
    const started = performance.now();
    stale = false;
    if (conversation === current && conversation.messages.at(-1) === message && running.has(conversation.id)) {
      view.showMessage(message, true);
      view.announceBlocks(message, false);
    }
    const again = () => {
      drawing = false;
      if (stale) drawSoon(conversation, message);
    };
    setTimeout(again, PAUSE_SHARE * (performance.now() - started));
  });
}

// What the reader does ----------------------------------------------------------------------------------------------

const touch = matchMedia('(pointer: coarse)');

/** Not where that would bring up a keyboard nobody asked for. */
function focusPrompt() {
  if (!touch.matches) $('prompt').focus({ preventScroll: true });
}

$('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  const text = $('prompt').value.trim();
  if (!text || running.has(current.id)) return;
  $('prompt').value = '';
  view.grow($('prompt'));
  send(text);
  focusPrompt();
});
$('prompt').addEventListener('input', () => view.grow($('prompt')));
$('prompt').addEventListener('keydown', (event) => {
  // On a touch keyboard Enter starts a line, since there is no Shift+Enter. While a text is being composed, as in Japanese,
  // Enter belongs to the input method; Safari tells only by key code 229.
  if (event.key !== 'Enter' || event.shiftKey || touch.matches || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  $('composer').requestSubmit();
});
$('hint').hidden = touch.matches;

$('stop').addEventListener('click', () => {
  running.get(current.id)?.abort();
  focusPrompt();
});
addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || document.querySelector('dialog[open]')) return;
  if (view.showSidebar(false)) $('menu').focus();
  else if (!event.target.closest?.('.edit')) running.get(current.id)?.abort();
});

$('turns').addEventListener('click', ({ target }) => {
  const message = current.messages.find(({ id }) => id === target.closest('.turn')?.dataset.id);
  if (!message) return;
  if (target.className === 'copy-code') view.copy(target.closest('figure').querySelector('code').textContent, target);
  switch (target.dataset.action) {
    case 'copy': return view.copy(message.content, target);
    case 'edit': return view.editMessage(message, (text) => sendAgain(message, text));
    case 'regenerate': return sendAgain(message);
  }
});

$('conversations').addEventListener('click', ({ target }) => {
  const conversation = conversations.get(target.closest('li')?.dataset.id);
  if (conversation && target.dataset.action) actions[target.dataset.action](conversation);
  if (!conversation || target.localName !== 'button' || target.dataset.action) return;
  const covered = view.showSidebar(false);
  open(conversation);
  if (covered) $('title').focus();
});
$('new').addEventListener('click', startNew);
$('menu').addEventListener('click', () => {
  view.showSidebar(true);
  $('new').focus();
});
$('scrim').addEventListener('click', () => view.showSidebar(false));
$('open-settings').addEventListener('click', () => {
  view.showSidebar(false);
  openSettings();
});

// Start -------------------------------------------------------------------------------------------------------------

let retry;
let warning = !store.persistent
  ? 'The browser forbids storage: conversations are lost when the page is closed.'
  : loaded.unreadable > 0
    ? `Records in this browser that could not be read and were left as they are: ${loaded.unreadable}.`
    : null;

/** Waits until the server is ready, says meanwhile why it is not, and asks for its models. */
async function connect() {
  clearTimeout(retry);
  const status = await health();
  if (status === 0 || status === 503) {
    view.showNotice(status === 0 ? 'The server does not answer. Trying again.' : 'The model is loading.');
    retry = setTimeout(connect, 1500);
    return;
  }
  try {
    offerModels(await models(settings.key));
    view.showNotice(warning, 'Dismiss', () => {
      warning = null;
      view.showNotice(null);
    });
  } catch (error) {
    if (error.status === 401) view.showNotice('This server asks for an API key.', 'Settings', openSettings);
    else view.showNotice(error.message, 'Try again', connect);
  }
}

onSaved((kept) => {
  if (!kept) warning = 'The browser has no room left: the settings are lost when the page is closed.';
  connect();
});
store.onForeignChange((id, conversation) => {
  if (running.has(id)) return;
  if (conversation) conversations.set(id, conversation);
  else conversations.delete(id);
  if (id === current.id) current = conversation ?? store.newConversation();
  drawAll();
});
addEventListener('pagehide', () => {
  for (const [id, controller] of running) {
    controller.abort();
    keep(conversations.get(id));
  }
});

open(conversations.get(store.loadCurrentId()) ?? current);
focusPrompt();
connect();
