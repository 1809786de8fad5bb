/** The server as JupyterLab reaches it: its address, its token, its XSRF cookie. */
import { ServerConnection } from '@jupyterlab/services';

import type { Connection } from './api';

export function labConnection(settings: ServerConnection.ISettings): Connection {
  return {
    baseUrl: settings.baseUrl,
    request: (url, init) => ServerConnection.makeRequest(url, init, settings)
  };
}
