/** Texts of the monitor's view in a reader's language. */
import type { TranslationBundle } from '@jupyterlab/translation';

import type { Text } from './schema';

export type Trans = Pick<TranslationBundle, '__' | '_n'>;

/** The text as the catalogue has it, its arguments in their places. */
export function say(text: Text, trans: Trans): string {
  if (typeof text !== 'object') {
    return String(text);
  }
  const [template, ...args] = text;
  const said = args.map(one => say(one, trans));
  if (typeof template === 'string') {
    return trans.__(template, ...said);
  }
  const [one, many] = template;
  return trans._n(one, many, Number(args[0]), ...said.slice(1));
}

/** Several texts side by side; what is empty is left out. */
export function sayAll(texts: readonly Text[], trans: Trans): string {
  return texts
    .map(text => say(text, trans))
    .filter(text => text)
    .join(' · ');
}
