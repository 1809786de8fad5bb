/** The Jupyter server as any page of it can reach it: the page's own settings, the XSRF cookie. */
import { Api } from '../api';

/** A client of the server this page came from; null where the page does not say (a saved notebook elsewhere). */
export function pageApi(): Api | null {
  const config = settings();
  const { baseUrl, token } = config;
  if (!baseUrl) {
    return null;
  }
  return new Api({
    baseUrl,
    request: (url, init) => {
      const headers = new Headers({ 'Content-Type': 'application/json' });
      const xsrf = /(?:^|; )_xsrf=([^;]*)/.exec(document.cookie)?.[1];
      if (xsrf) {
        headers.set('X-XSRFToken', xsrf);
      }
      if (token) {
        headers.set('Authorization', `token ${token}`);
      }
      return fetch(url, { ...init, headers, credentials: 'same-origin', cache: 'no-store' });
    }
  });
}

function settings(): { baseUrl?: string; token?: string } {
  const text = document.getElementById('jupyter-config-data')?.textContent;
  return text ? (JSON.parse(text) as { baseUrl?: string; token?: string }) : {};
}
