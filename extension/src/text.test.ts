import { expect, it } from 'vitest';

import { foreign, trans } from './testing';
import { say, sayAll } from './text';

it('templates are translated, data is not', () => {
  const text = ['%1: frees %2', ['Offload %1 of %2', ['weights'], 'actor'], '1 GiB'] as const;
  expect(say(text, trans)).toBe('Offload weights of actor: frees 1 GiB');
  expect(say(['weights'], foreign)).toBe('«weights»');
  expect([say('actor', foreign), say(7, foreign)]).toEqual(['actor', '7']);
});

it('a count decides between one and many', () => {
  const behind = [['%2, %1 version behind', '%2, %1 versions behind'], 2, 'v3'] as const;
  expect(say(behind, trans)).toBe('v3, 2 versions behind');
});

it('texts stand side by side', () => {
  expect(sayAll(['v4', '', ['step %1', 3]], trans)).toBe('v4 · step 3');
});
