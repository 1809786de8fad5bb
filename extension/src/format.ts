/** Numbers with their units, as in the notebook's views: three significant digits. */

const KIB = 2 ** 10;
const MIB = 2 ** 20;
const GIB = 2 ** 30;

/** `1.23`, `12,346`: three significant digits below a thousand, whole numbers above. */
export function digits(value: number): string {
  return Math.abs(value) >= 1000
    ? Math.round(value).toLocaleString('en')
    : String(Number(value.toPrecision(3)));
}

/** Bytes as `6.4 GiB`, `900 MiB`, `12 KiB` or `640 B`. */
export function gib(bytes: number): string {
  const units: [number, string][] = [
    [GIB, 'GiB'],
    [MIB, 'MiB'],
    [KIB, 'KiB']
  ];
  const found = units.find(([size]) => Math.abs(bytes) >= (1000 * size) / 1024);
  return found ? `${digits(bytes / found[0])} ${found[1]}` : `${Math.round(bytes)} B`;
}

/** `3 s`, `12 min`, `3.5 h`. */
export function duration(seconds: number): string {
  if (seconds < 100) {
    return `${Math.round(seconds)} s`;
  }
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${digits(seconds / 3600)} h`;
}

/** A share of 0 to 1 as `44 %`. */
export function percent(share: number): string {
  return `${Math.round(100 * share)} %`;
}

/** Text of somebody else's, cut to what one line can hold. */
export function short(text: string, most = 80): string {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
