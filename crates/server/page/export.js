/** Conversations as files: Markdown to read, JSON to keep and to bring back. */

import { readConversation } from './store.js';

const NAMES = { user: 'You', assistant: 'kipp' };

/** One conversation as Markdown, with the thinking as a quote. */
export function toMarkdown({ title, created, messages }) {
  const parts = [`# ${title}`, new Date(created).toISOString()];
  for (const { role, content, reasoning } of messages) {
    parts.push(`## ${NAMES[role]}`);
    if (reasoning?.trim()) parts.push(reasoning.trim().replaceAll(/^/gm, '> '));
    parts.push(content);
  }
  return `${parts.join('\n\n')}\n`;
}

export function toJson(conversations) {
  return JSON.stringify(conversations, null, 1);
}

/** The conversations in a file written by `toJson`; whatever is not one is passed over. */
export function fromJson(text) {
  try {
    return JSON.parse(text).map((value) => readConversation(JSON.stringify(value))).filter(Boolean);
  } catch {
    return [];
  }
}
