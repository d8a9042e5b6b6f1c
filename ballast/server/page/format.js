// Short texts for bytes, durations and rates, as `ballast top` writes them.

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (n >= 1024 && power < units.length - 1) { n /= 1024; power++; }
  return `${power && n < 99.95 ? n.toFixed(1) : Math.round(n)} ${units[power]}`;
}

export function seconds(s) {
  if (s < 0.9995) return `${s < 0.0095 ? (s * 1e3).toFixed(1) : Math.round(s * 1e3)} ms`;
  return `${s < 100 ? s.toFixed(1) : Math.round(s)} s`;
}

export function span(s) {
  const whole = Math.max(0, Math.floor(s));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

export const rate = (n) => (n >= 99.95 || n === 0 ? n.toFixed(0) : n.toFixed(1));

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

// Names as a list, of which `most` are written out.
export function listed(names, most) {
  const more = names.length - most;
  return `${names.slice(0, most).join(", ")}${more > 0 ? ` and ${more} more` : ""}`;
}
