/** The reader's settings: the dialog, the switch for thinking, the theme. */

import * as store from './store.js';
import { $ } from './view.js';

/** The settings in force; see store.js for their names. */
export const settings = store.loadSettings();

const TEXTS = ['system', 'key'];
const dialog = $('settings');
const fields = dialog.querySelector('form').elements;

export function openSettings() {
  for (const name of [...TEXTS, ...store.SAMPLING]) fields[name].value = settings[name] ?? '';
  dialog.returnValue = 'cancel';
  dialog.showModal();
}

/** Calls back after the settings were changed, with whether they could be kept. */
export function onSaved(callback) {
  dialog.addEventListener('close', () => {
    if (dialog.returnValue !== 'save') return;
    for (const name of TEXTS) settings[name] = fields[name].value.trim();
    for (const name of store.SAMPLING) settings[name] = fields[name].value === '' ? null : fields[name].valueAsNumber;
    callback(store.saveSettings(settings));
  });
}

$('thinking').checked = settings.thinking;
$('thinking').addEventListener('change', () => {
  settings.thinking = $('thinking').checked;
  store.saveSettings(settings);
});

$('model').addEventListener('change', () => {
  settings.model = $('model').value;
  store.saveSettings(settings);
});

/** Offers the server's models; with one there is nothing to choose. */
export function offerModels(names) {
  const options = names.map((name) => new Option(name, name, false, name === settings.model));
  $('model').replaceChildren(...(options.length > 0 ? options : [new Option('no model', '')]));
  $('model').disabled = options.length < 2;
}

// The theme follows the system until it is switched, and again once it is switched back.
const root = document.documentElement.dataset;
const systemDark = matchMedia('(prefers-color-scheme: dark)');
const systemTheme = () => (systemDark.matches ? 'dark' : 'light');
const opposite = () => ((root.theme ?? systemTheme()) === 'dark' ? 'light' : 'dark');

function nameTheme() {
  $('theme').textContent = opposite() === 'dark' ? 'Dark theme' : 'Light theme';
}

$('theme').addEventListener('click', () => {
  const wanted = opposite();
  const follows = wanted === systemTheme();
  if (follows) delete root.theme;
  else root.theme = wanted;
  store.saveTheme(follows ? null : wanted);
  nameTheme();
});
systemDark.addEventListener('change', nameTheme);
nameTheme();
