/**
 * What the browser keeps: one record a conversation, and the settings.
 *
 * A conversation is { id, title, created, updated, messages }; a message is { id, role, content } and, for
 * answers, { reasoning, thoughtMs, state, error, stats }. A record that cannot be read is left where it is and counted, so
 * that one broken record costs neither the others nor itself.
 */

const CONVERSATION = 'kipp.conversation.';
const SETTINGS = 'kipp.settings';
const CURRENT = 'kipp.current';
const STATES = ['streaming', 'done', 'length', 'stopped', 'failed'];

/** Sampling settings by their name in the API; null leaves the choice to the server. */
export const SAMPLING = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed'];
const TEXTS = { system: '', key: '', model: '' };

const storage = openStorage();

/** False where the browser forbids storage: then everything lasts only as long as the page. */
export const persistent = !storage.forgetful;

/** Reads every conversation, newest first, and how many records could not be read. */
export function loadConversations() {
  const conversations = [];
  let unreadable = 0;
  for (const key of Object.keys(storage)) {
    if (!key.startsWith(CONVERSATION)) continue;
    const conversation = readConversation(storage.getItem(key));
    if (conversation && key === CONVERSATION + conversation.id) conversations.push(conversation);
    else unreadable += 1;
  }
  conversations.sort((a, b) => b.updated - a.updated);
  return { conversations, unreadable };
}

/** Writes one conversation; false when the browser has no room left. */
export function saveConversation(conversation) {
  return write(CONVERSATION + conversation.id, JSON.stringify(conversation));
}

export function removeConversation(id) {
  storage.removeItem(CONVERSATION + id);
}

/** The conversation that this tab shows, so that a reload comes back to it. */
export function loadCurrentId() {
  return persistent ? sessionStorage.getItem(CURRENT) : null;
}

export function saveCurrentId(id) {
  if (persistent) sessionStorage.setItem(CURRENT, id);
}

/** Calls back with (id, conversation or null) when another tab writes or removes a conversation. */
export function onForeignChange(callback) {
  addEventListener('storage', ({ key, newValue }) => {
    if (!key?.startsWith(CONVERSATION)) return;
    const conversation = newValue === null ? null : readConversation(newValue);
    if (newValue === null || conversation) callback(key.slice(CONVERSATION.length), conversation);
  });
}

/** A new conversation without messages; it is written with its first message. */
export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: 'New conversation', created: now, updated: now, messages: [] };
}

export function newMessage(role, content = '') {
  return { id: newId(), role, content };
}

/** Parses and checks one conversation record; null when it is not one. */
export function readConversation(text) {
  const value = parse(text);
  if (!isText(value?.id) || !isText(value.title) || !Array.isArray(value.messages)) return null;
  if (!Number.isFinite(value.created) || !Number.isFinite(value.updated)) return null;
  if (!value.messages.every(isMessage)) return null;
  return value;
}

export function loadSettings() {
  const kept = parse(storage.getItem(SETTINGS)) ?? {};
  const settings = { thinking: kept.thinking !== false };
  for (const name of SAMPLING) settings[name] = Number.isFinite(kept[name]) ? kept[name] : null;
  for (const [name, fallback] of Object.entries(TEXTS)) settings[name] = isText(kept[name]) ? kept[name] : fallback;
  return settings;
}

export function saveSettings(settings) {
  return write(SETTINGS, JSON.stringify(settings));
}

/** Keeps 'light' or 'dark', or with null follows the system again. */
export function saveTheme(theme) {
  if (theme) write('kipp.theme', theme);
  else storage.removeItem('kipp.theme');
}

function isMessage(value) {
  return (
    isText(value?.id) &&
    (value.role === 'user' || (value.role === 'assistant' && STATES.includes(value.state))) &&
    isText(value.content) &&
    (value.reasoning === undefined || isText(value.reasoning)) &&
    (value.error === undefined || isText(value.error)) &&
    (value.stats === undefined || (value.stats !== null && typeof value.stats === 'object'))
  );
}

function isText(value) {
  return typeof value === 'string';
}

/** Sixteen hexadecimal digits. `crypto.randomUUID` is missing where the page is served over plain HTTP to another host. */
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function write(key, text) {
  try {
    storage.setItem(key, text);
    return true;
  } catch {
    return false;
  }
}

/** The browser's storage, or an object that forgets where there is none or the mere access throws. */
function openStorage() {
  try {
    if (globalThis.localStorage) return localStorage;
  } catch {
    // Forbidden: as if there were none.
  }
  return {
    getItem(key) { return this[key] ?? null; },
    setItem(key, text) { this[key] = text; },
    removeItem(key) { delete this[key]; },
    forgetful: true,
  };
}
