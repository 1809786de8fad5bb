/** Which of JupyterLab's icons stands for what. */
import {
  addBelowIcon,
  closeIcon,
  deleteIcon,
  downloadIcon,
  fileUploadIcon,
  folderIcon,
  offlineBoltIcon,
  pauseIcon,
  refreshIcon,
  runIcon,
  saveIcon,
  stopIcon
} from '@jupyterlab/ui-components';
import type { LabIcon } from '@jupyterlab/ui-components';

export const panelIcon = offlineBoltIcon;

export const icons: Readonly<Record<string, LabIcon>> = {
  stop: stopIcon,
  pause: pauseIcon,
  resume: runIcon,
  sync: refreshIcon,
  snapshot: saveIcon,
  attach: addBelowIcon,
  park: folderIcon,
  close: closeIcon,
  kill: deleteIcon,
  offload: downloadIcon,
  onload: fileUploadIcon
};
