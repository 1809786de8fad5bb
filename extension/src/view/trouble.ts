/** What a reader is told of a question that got no good answer. */
import { Trouble } from '../asks';
import type { Trans } from '../text';

/** Our own words; what the server and the monitors say stays theirs. */
export function troubleSaid(error: Error | null, trans: Trans): string {
  if (!(error instanceof Trouble)) {
    return error?.message ?? '';
  }
  switch (error.kind) {
    case 'absent':
      return trans.__('it was started without the extension %1', 'rlbench.labapp');
    case 'lasting':
      return trans.__('it has not ended yet');
    case 'old':
      return trans.__('its monitor is of another version of %1', 'rlbench');
    default:
      return error.message;
  }
}
