import js from '@eslint/js';
import ts from 'typescript-eslint';

export default ts.config(
  { ignores: ['lib/', 'node_modules/'] },
  js.configs.recommended,
  {
    files: ['bundle.mjs'],
    languageOptions: { globals: { console: 'readonly', process: 'readonly' } }
  },
  {
    files: ['src/**/*.{ts,tsx}'],
    extends: [...ts.configs.strictTypeChecked],
    languageOptions: { parserOptions: { project: './tsconfig.json' } },
    rules: {
      eqeqeq: 'error',
      // numbers and counts stand in texts
      '@typescript-eslint/restrict-template-expressions': ['error', { allowNumber: true }],
      // handlers of React and of signals
      '@typescript-eslint/no-confusing-void-expression': ['error', { ignoreArrowShorthand: true }]
    }
  }
);
