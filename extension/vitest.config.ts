import { defineConfig } from 'vitest/config';

export default defineConfig({
  // a context of its own per file, in threads that stay: one that ends loads jsdom and vitest anew for the next file
  test: { include: ['src/**/*.test.{ts,tsx}'], pool: 'vmThreads' }
});
