/** Speaks to the server: health, models and streamed chat completions. Knows nothing of the page. */

/** A failure worth showing to the reader; `status` is the HTTP status, or 0 when none arrived. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The status of `/health`: 200 when ready, 503 while the model is loading, 0 when nobody answers. */
export async function health() {
  try {
    return (await fetch('health', { cache: 'no-store' })).status;
  } catch {
    return 0;
  }
}

/** The names of the models that the server offers. */
export async function models(key) {
  const answer = await json(await request('v1/models', { key }));
  const names = Array.isArray(answer?.data) ? answer.data.map((model) => model?.id) : [];
  return names.filter((name) => typeof name === 'string');
}

/** Yields the chunks of a streamed chat completion; throws ApiError unless the stream ends as it should. */
export async function* chat(body, { key, signal, conversation }) {
  const response = await request('v1/chat/completions', { key, body, signal, conversation });
  if (!response.headers.get('content-type')?.startsWith('text/event-stream')) {
    throw new ApiError('The answer is not an event stream. Is something else listening here?');
  }
  try {
    for await (const data of events(response.body)) {
      if (data === '[DONE]') return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message ?? 'The server gave up on this answer.');
      yield chunk;
    }
  } catch (error) {
    if (signal.aborted || error instanceof ApiError) throw error;
    if (error instanceof SyntaxError) throw new ApiError('The server sent a chunk that is not JSON.');
  }
  throw new ApiError('The connection broke off before the answer was complete.');
}

/** Yields the data of each server-sent event in a byte stream, however the bytes were cut. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = '';
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (pending + value).split('\n');
      pending = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith('\r') ? raw.slice(0, -1) : raw;
        if (line.startsWith('data:')) {
          data.push(line.slice(line[5] === ' ' ? 6 : 5));
        } else if (line === '' && data.length > 0) {
          yield data.join('\n');
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function request(path, { key, body, signal, conversation }) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers['content-type'] = 'application/json';
  // For a proxy: whoever answered before still has the beginning in its cache.
  if (conversation) headers['x-conversation-id'] = conversation;
  const options = { method: body ? 'POST' : 'GET', headers, signal, body: body && JSON.stringify(body) };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError('The server does not answer. Is it still running?');
  }
  if (!response.ok) throw new ApiError(await reason(response), response.status);
  return response;
}

/** The server's own words where it gave some, else its status. */
async function reason(response) {
  const { error } = (await json(response)) ?? {};
  const words = typeof error === 'string' ? error : error?.message;
  return words ? `${words} (HTTP ${response.status})` : `The server answered with HTTP ${response.status}.`;
}

async function json(response) {
  try {
    return await response.json();
  } catch {
    return null;
  }
}
