import React from 'react';

import { icons } from '../icons';
import type { Action, Chip } from '../view/shape';

interface Props<T extends Action> {
  action: T;
  onPress: (action: T) => void;
  /** Where it stands in the order of Tab: -1 in a row that is one stop. */
  tabIndex?: number;
}

/**
 * What every control shares. One that cannot be pressed stays focusable (`aria-disabled`): its title says why, and the
 * keyboard does not lose its place when a number changes.
 */
function common<T extends Action>({
  action,
  onPress,
  tabIndex = 0
}: Props<T>): React.JSX.IntrinsicElements['button'] {
  return {
    type: 'button',
    title: action.title,
    tabIndex,
    'aria-disabled': !action.enabled,
    'aria-busy': action.pending,
    onClick: () => {
      if (action.enabled) {
        onPress(action);
      }
    }
  };
}

/** One of JupyterLab's icons, with its words for a screen reader. */
export function IconButton(props: Props<Action>): React.JSX.Element {
  const { action } = props;
  const icon = icons[action.verb];
  return (
    <button
      {...common(props)}
      className={`rlb-Button rlb-mod-${action.verb}`}
      aria-label={`${action.label}: ${action.title}`}
      data-verb={action.verb}
    >
      {icon ? <icon.react tag="span" elementSize="small" /> : action.label}
    </button>
  );
}

/** `weights ● resident`: says where a part is, and moves it. */
export function ChipButton(props: Props<Chip>): React.JSX.Element {
  const { action } = props;
  return (
    <button
      {...common(props)}
      className={`rlb-Chip${action.resident ? ' rlb-mod-resident' : ''}`}
      aria-pressed={action.resident}
      aria-label={`${action.part}: ${action.word}. ${action.title}`}
    >
      {action.part} <span aria-hidden="true">{action.sign}</span> {action.word}
    </button>
  );
}

/** Buttons in a row: one stop for Tab, arrow keys go from one to the next. */
export function Toolbar(props: {
  label: string;
  actions: readonly Action[];
  onPress: (action: Action) => void;
}): React.JSX.Element {
  const [stop, setStop] = React.useState(0);
  return (
    <div
      className="rlb-Toolbar"
      role="toolbar"
      aria-label={props.label}
      onKeyDown={moveFocus}
      onFocus={event => setStop(buttonsIn(event.currentTarget).indexOf(event.target))}
    >
      {props.actions.map((action, index) => (
        // by place: "resume" is the button that was "pause", and keeps the focus
        <IconButton
          key={index}
          action={action}
          onPress={props.onPress}
          tabIndex={index === stop ? 0 : -1}
        />
      ))}
    </div>
  );
}

function buttonsIn(toolbar: HTMLElement): readonly HTMLElement[] {
  return [...toolbar.querySelectorAll('button')];
}

function moveFocus(event: React.KeyboardEvent<HTMLElement>): void {
  const buttons = buttonsIn(event.currentTarget);
  const at = buttons.indexOf(document.activeElement as HTMLElement);
  const last = buttons.length - 1;
  const steps: Record<string, number> = {
    ArrowRight: at === last ? 0 : at + 1,
    ArrowLeft: at <= 0 ? last : at - 1,
    Home: 0,
    End: last
  };
  const to = steps[event.key];
  if (to !== undefined) {
    event.preventDefault();
    event.stopPropagation();
    buttons[to]?.focus();
  }
}
