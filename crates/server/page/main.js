/** Ties the page together: what the reader does, what the server answers, what is kept. */

import { ApiError, chat, health, models } from './api.js';
import * as store from './store.js';
import { fromJson, toJson, toMarkdown } from './export.js';
import * as view from './view.js';

const { $ } = view;
const SAVE_EVERY_MS = 1000; // while an answer streams
const FRAME_SHARE = 3; // a frame that took n ms to draw is followed by a pause of 3 n ms

const settings = store.loadSettings();
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

function forget(id) {
  running.get(id)?.abort();
  conversations.delete(id);
  store.removeConversation(id);
}

const actions = {
  async rename(conversation) {
    const title = await view.ask({ title: 'Rename the conversation', value: conversation.title, label: 'Rename' });
    if (!title) return;
    Object.assign(conversation, { title, named: true });
    keep(conversation);
    drawAll();
  },
  export(conversation) {
    const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, '-').slice(0, 60) || 'conversation';
    view.download(`${name}.md`, 'text/markdown', toMarkdown(conversation));
  },
  async delete(conversation) {
    const text = `"${conversation.title}" is removed from this browser for good.`;
    if (!(await view.ask({ title: 'Delete the conversation?', text, label: 'Delete', danger: true }))) return;
    forget(conversation.id);
    startNew();
  },
};

function startNew() {
  closeSidebar();
  open(store.newConversation());
  focusPrompt();
}

// Answers -----------------------------------------------------------------------------------------------------------

function send(text) {
  if (current.messages.length === 0 && !current.named) current.title = titleOf(text);
  current.messages.push(store.newMessage('user', text));
  answer(current);
}

/** Drops a message and all that follow it, then asks again: with the new text of a question, or for another answer. */
function sendAgain(message, text) {
  running.get(current.id)?.abort();
  current.messages.length = current.messages.indexOf(message);
  if (text === undefined) answer(current);
  else send(text);
}

function titleOf(text) {
  const line = text.trim().split('\n')[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}\u2026` : line;
}

/** Streams an answer into the conversation, whichever one is on the screen meanwhile. */
async function answer(conversation) {
  const request = requestFor(conversation);
  const message = { ...store.newMessage('assistant'), state: 'streaming' };
  const controller = new AbortController();
  const { signal } = controller;
  conversation.messages.push(message);
  conversation.updated = Date.now();
  running.set(conversation.id, controller);
  keep(conversation);
  drawAll();
  view.scrollToEnd();
  view.announce('Answering');

  const meter = { started: performance.now(), deltas: 0, saved: performance.now() };
  try {
    for await (const chunk of chat(request, { key: settings.key, signal })) {
      signal.throwIfAborted();
      take(chunk, message, meter);
      drawSoon(conversation, message);
      if (performance.now() - meter.saved > SAVE_EVERY_MS) {
        meter.saved = performance.now();
        keep(conversation);
      }
    }
    if (message.state === 'streaming') message.state = 'done';
  } catch (error) {
    message.state = signal.aborted ? 'stopped' : 'failed';
    if (!signal.aborted) message.error = explain(error);
  }
  if (running.get(conversation.id) !== controller) return; // replaced by the answer to a message sent again
  running.delete(conversation.id);
  if (!conversations.has(conversation.id)) return; // deleted meanwhile
  keep(conversation);
  drawList();
  if (conversation !== current) return;
  view.showMessage(message, false);
  view.announceBlocks(message, true);
  drawComposer();
  if (message.state === 'failed') view.announce(message.error);
}

function requestFor({ messages }) {
  const system = settings.system.trim();
  const request = {
    model: settings.model || undefined,
    messages: [
      ...(system ? [{ role: 'system', content: system }] : []),
      ...messages.filter(({ content }) => content !== '').map(({ role, content }) => ({ role, content })),
    ],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of store.SAMPLING) if (settings[name] !== null) request[name] = settings[name];
  if (!settings.thinking) request.chat_template_kwargs = { enable_thinking: false };
  return request;
}

/** Adds one chunk of the stream to the answer and to its figures. */
function take({ choices, usage, timings }, message, meter) {
  const { delta = {}, finish_reason: finish } = choices?.[0] ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning ?? '';
  const words = delta.content ?? '';
  const now = performance.now();
  message.stats ??= {};
  if (thought || words) {
    meter.deltas += 1;
    meter.first ??= now;
    message.stats.firstMs = meter.first - meter.started;
    message.stats.tokens = meter.deltas; // a delta is about a token; the server's own count follows at the end
    if (now - meter.first > 300) message.stats.perSecond = ((meter.deltas - 1) * 1000) / (now - meter.first);
  }
  if (thought) message.reasoning = (message.reasoning ?? '') + thought;
  if (words) {
    if (message.reasoning && message.thoughtMs === undefined) message.thoughtMs = now - meter.first;
    // What a chat template leaves between thinking and answer is no part of the answer.
    message.content = message.content === '' ? words.trimStart() : message.content + words;
  }
  if (finish === 'length') message.state = 'length';
  if (usage) {
    message.stats.tokens = usage.completion_tokens;
    message.stats.promptTokens = usage.prompt_tokens;
    message.stats.cached = usage.prompt_tokens_details?.cached_tokens;
  }
  if (timings) {
    message.stats.perSecond = timings.predicted_per_second;
    message.stats.counted = true;
  }
}

function explain(error) {
  if (!(error instanceof ApiError)) return `Something went wrong in the page: ${error.message}`;
  if (error.status === 401 || error.status === 403) return `${error.message} Enter an API key in the settings.`;
  return error.message;
}

let drawing = false;

/** Draws an answer in the next frame, and less often when drawing it takes long. */
function drawSoon(conversation, message) {
  if (drawing || conversation !== current) return;
  drawing = true;
  requestAnimationFrame(() => {
    const started = performance.now();
    const live = running.has(conversation.id) && conversation.messages.at(-1) === message;
    if (live && conversation === current) {
      view.showMessage(message, true);
      view.announceBlocks(message, false);
    }
    setTimeout(() => (drawing = false), FRAME_SHARE * (performance.now() - started));
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
  if (document.body.classList.contains('sidebar-open')) {
    closeSidebar();
    $('menu').focus();
  } else if (!event.target.closest?.('.edit')) {
    running.get(current.id)?.abort();
  }
});

$('turns').addEventListener('click', (event) => {
  const button = event.target.closest('button');
  const message = current.messages.find(({ id }) => id === event.target.closest('.turn')?.dataset.id);
  if (!button || !message) return;
  if (button.classList.contains('copy-code')) view.copy(button.closest('figure').querySelector('code').textContent, button);
  switch (button.dataset.action) {
    case 'copy': return view.copy(message.content, button);
    case 'edit': return view.editMessage(message, (text) => sendAgain(message, text));
    case 'regenerate':
      sendAgain(message);
      return focusPrompt();
  }
});

$('conversations').addEventListener('click', (event) => {
  const conversation = conversations.get(event.target.closest('li')?.dataset.id);
  if (!conversation) return;
  const { action } = event.target.dataset;
  if (action) return actions[action](conversation);
  if (!event.target.classList.contains('open')) return;
  const covered = document.body.classList.contains('sidebar-open');
  closeSidebar();
  open(conversation);
  if (covered) $('title').focus();
});
$('new').addEventListener('click', startNew);

$('thinking').checked = settings.thinking;
$('thinking').addEventListener('change', () => {
  settings.thinking = $('thinking').checked;
  store.saveSettings(settings);
});

$('model').addEventListener('change', () => {
  settings.model = $('model').value;
  store.saveSettings(settings);
});

// On a narrow screen the list of conversations lies over the transcript.
$('menu').addEventListener('click', () => {
  showSidebar(true);
  $('new').focus();
});
$('scrim').addEventListener('click', closeSidebar);

function closeSidebar() {
  showSidebar(false);
}

function showSidebar(shown) {
  document.body.classList.toggle('sidebar-open', shown);
  document.querySelector('main').inert = shown;
  $('scrim').hidden = !shown;
  $('menu').setAttribute('aria-expanded', String(shown));
}

// Theme -------------------------------------------------------------------------------------------------------------

const systemDark = matchMedia('(prefers-color-scheme: dark)');

function drawTheme() {
  const { theme = systemDark.matches ? 'dark' : 'light' } = document.documentElement.dataset;
  $('theme').textContent = theme === 'dark' ? 'Light theme' : 'Dark theme';
  return theme;
}

$('theme').addEventListener('click', () => {
  const wanted = drawTheme() === 'dark' ? 'light' : 'dark';
  const follows = wanted === (systemDark.matches ? 'dark' : 'light'); // back to the system's choice
  if (follows) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = wanted;
  store.saveTheme(follows ? null : wanted);
  drawTheme();
});
systemDark.addEventListener('change', drawTheme);

// Settings ----------------------------------------------------------------------------------------------------------

const form = $('settings').querySelector('form');

function openSettings() {
  closeSidebar();
  for (const name of ['system', 'key', ...store.SAMPLING]) form.elements[name].value = settings[name] ?? '';
  $('settings').returnValue = 'cancel';
  $('settings').showModal();
}

$('open-settings').addEventListener('click', openSettings);
$('settings').addEventListener('close', () => {
  if ($('settings').returnValue !== 'save') return;
  for (const name of ['system', 'key']) settings[name] = form.elements[name].value.trim();
  for (const name of store.SAMPLING) {
    const { value, valueAsNumber } = form.elements[name];
    settings[name] = value === '' ? null : valueAsNumber;
  }
  if (!store.saveSettings(settings)) view.showNotice('The browser has no room left for the settings.');
  connect();
});

$('export-all').addEventListener('click', () => {
  view.download('kipp-conversations.json', 'application/json', toJson([...conversations.values()]));
});
$('import').addEventListener('click', () => $('import-file').click());
$('import-file').addEventListener('change', async () => {
  const [file] = $('import-file').files;
  $('import-file').value = '';
  const found = fromJson(await file.text());
  const isNews = ({ id, updated }) => !running.has(id) && !(conversations.get(id)?.updated >= updated);
  const news = found.filter(isNews);
  news.forEach(keep);
  $('settings').close();
  view.showNotice(`Conversations in the file: ${found.length}; new ones: ${news.length}.`, 'Dismiss', connect);
  open(conversations.get(current.id) ?? current);
});
$('delete-all').addEventListener('click', async () => {
  $('settings').close();
  const text = 'All of them are removed from this browser for good.';
  if (!(await view.ask({ title: 'Delete all conversations?', text, label: 'Delete all', danger: true }))) return;
  for (const id of [...conversations.keys()]) forget(id);
  startNew();
});

// Start -------------------------------------------------------------------------------------------------------------

let retry;
let lasting = !store.persistent
  ? 'The browser forbids storage: conversations are lost when the page is closed.'
  : loaded.unreadable > 0
    ? `Records in this browser that could not be read and were left as they are: ${loaded.unreadable}.`
    : null;

function dismiss() {
  lasting = null;
  connect();
}

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
    drawModels(await models(settings.key));
    view.showNotice(lasting, 'Dismiss', dismiss);
  } catch (error) {
    if (error.status === 401) view.showNotice('This server asks for an API key.', 'Settings', openSettings);
    else view.showNotice(error.message, 'Try again', connect);
  }
}

function drawModels(names) {
  const options = names.map((name) => new Option(name, name, false, name === settings.model));
  $('model').replaceChildren(...(options.length > 0 ? options : [new Option('no model', '')]));
  $('model').disabled = options.length < 2;
  settings.model = $('model').value;
}

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

drawTheme();
open(conversations.get(store.loadCurrentId()) ?? current);
focusPrompt();
connect();
