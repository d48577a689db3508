/** What is asked of the server for a conversation, and what its stream makes of an answer. Touches no page. */

import { SAMPLING } from './store.js';

/** The body of a chat completion request. Thinking is not sent back, and what was left to the server is not named. */
export function requestFor({ messages }, settings, model) {
  const system = settings.system.trim();
  const said = messages.filter(({ content }) => content !== '').map(({ role, content }) => ({ role, content }));
  const request = {
    model: model || undefined,
    messages: system ? [{ role: 'system', content: system }, ...said] : said,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of SAMPLING) if (settings[name] !== null) request[name] = settings[name];
  if (!settings.thinking) request.chat_template_kwargs = { enable_thinking: false };
  return request;
}

/** Returns a function that adds one chunk of the stream to the answer, at a time in milliseconds since the request. */
export function receiver(message) {
  const stats = (message.stats = {});
  return ({ choices, usage, timings }, now) => {
    const { delta = {}, finish_reason: finish } = choices?.[0] ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? '';
    const words = delta.content ?? '';
    if (thought || words) {
      stats.firstMs ??= now;
      stats.tokens = (stats.tokens ?? 0) + 1; // a delta is about a token; the server's own count follows at the end
      if (now - stats.firstMs > 300) stats.perSecond = ((stats.tokens - 1) * 1000) / (now - stats.firstMs);
    }
    if (thought) message.reasoning = (message.reasoning ?? '') + thought;
    if (words) {
      if (message.reasoning) message.thoughtMs ??= now - stats.firstMs;
      // What a chat template leaves between thinking and answer is no part of the answer.
      message.content = message.content === '' ? words.trimStart() : message.content + words;
    }
    if (finish === 'length') message.state = 'length';
    if (usage) {
      stats.tokens = usage.completion_tokens;
      stats.promptTokens = usage.prompt_tokens;
      stats.cached = usage.prompt_tokens_details?.cached_tokens;
    }
    if (timings) {
      stats.perSecond = timings.predicted_per_second;
      stats.counted = true;
    }
  };
}

/** A conversation is named after the first line said in it. */
export function titleOf(text) {
  const line = text.trim().split('\n')[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}\u2026` : line;
}

const NAMES = { user: 'You', assistant: 'kipp' };

/** A conversation as Markdown to keep, with the thinking as a quote. */
export function toMarkdown({ title, created, messages }) {
  const parts = [`# ${title}`, new Date(created).toISOString()];
  for (const { role, content, reasoning } of messages) {
    parts.push(`## ${NAMES[role]}`);
    if (reasoning?.trim()) parts.push(reasoning.trim().replaceAll(/^/gm, '> '));
    parts.push(content);
  }
  return `${parts.join('\n\n')}\n`;
}
