// The few facts of a fragmented MP4 that a player needs: init segment, codec, first picture.

/** Top-level boxes of a buffer as {type, start, end}. */
export function boxes(bytes, from = 0, to = bytes.byteLength) {
  const view = new DataView(bytes);
  const found = [];
  let start = from;
  while (start + 8 <= to) {
    const size = view.getUint32(start);
    if (size < 8 || start + size > to) break;
    found.push({ type: boxType(view, start), start, end: start + size });
    start += size;
  }
  return found;
}

/** The init segment (everything before the first fragment), or null if it has none. */
export function initSegment(bytes) {
  const top = boxes(bytes);
  if (top[0]?.type !== "ftyp") return null;
  const fragment = top.find((box) => box.type === "moof");
  return bytes.slice(0, fragment ? fragment.start : bytes.byteLength);
}

/** The decoder configuration (avcC payload) of an init segment, or null. */
export function decoderConfig(init) {
  const view = new DataView(init);
  for (let at = 4; at + 8 < init.byteLength; at += 1) {
    if (view.getUint32(at) === 0x61766343) {
      return init.slice(at + 4, at - 4 + view.getUint32(at - 4));
    }
  }
  return null;
}

/** RFC 6381 name of the codec, for example avc1.42C01E. */
export function codecName(config) {
  const [, profile, compatibility, level] = new Uint8Array(config);
  const hex = [profile, compatibility, level].map((byte) => byte.toString(16).padStart(2, "0"));
  return `avc1.${hex.join("").toUpperCase()}`;
}

/** Bytes of the first picture of the first fragment, or null. */
export function firstSample(bytes) {
  const top = boxes(bytes);
  const moof = top.findIndex((box) => box.type === "moof");
  const data = top.slice(moof).find((box) => box.type === "mdat");
  const size = moof < 0 ? null : firstSampleSize(bytes, top[moof]);
  if (!data || !size) return null;
  return bytes.slice(data.start + 8, data.start + 8 + size);
}

/** Ticks at which the first fragment starts. */
export function decodeTime(bytes) {
  const [at] = decodeTimes(bytes);
  return at ? at.read() : 0n;
}

/** A copy whose fragments start so many ticks earlier. */
export function earlier(bytes, ticks) {
  const copy = bytes.slice(0);
  for (const at of decodeTimes(copy)) at.write(at.read() - ticks);
  return copy;
}

/** Accessors of the decode times of all fragments. */
function decodeTimes(bytes) {
  const view = new DataView(bytes);
  const fragments = boxes(bytes).filter(({ type }) => type === "moof");
  const inside = (box) => boxes(bytes, box.start + 8, box.end);
  const tracks = fragments.flatMap(inside).filter(({ type }) => type === "traf");
  const times = tracks.flatMap(inside).filter(({ type }) => type === "tfdt");
  return times.map(({ start }) => {
    const long = view.getUint8(start + 8) === 1;
    return {
      read: () => (long ? view.getBigUint64(start + 12) : BigInt(view.getUint32(start + 12))),
      write: (ticks) =>
        long ? view.setBigUint64(start + 12, ticks) : view.setUint32(start + 12, Number(ticks)),
    };
  });
}

function firstSampleSize(bytes, moof) {
  const track = boxes(bytes, moof.start + 8, moof.end).find((box) => box.type === "traf");
  const inner = track ? boxes(bytes, track.start + 8, track.end) : [];
  const run = inner.find((box) => box.type === "trun");
  const header = inner.find((box) => box.type === "tfhd");
  if (!run || !header) return null;
  return sizeInRun(new DataView(bytes), run) ?? defaultSize(new DataView(bytes), header);
}

function sizeInRun(view, run) {
  const flags = view.getUint32(run.start + 8) & 0xffffff;
  if (!(flags & 0x200)) return null;
  const before = [0x1, 0x4, 0x100].filter((flag) => flags & flag).length;
  return view.getUint32(run.start + 16 + 4 * before);
}

function defaultSize(view, header) {
  const flags = view.getUint32(header.start + 8) & 0xffffff;
  if (!(flags & 0x10)) return null;
  let at = header.start + 16;
  if (flags & 0x1) at += 8;
  at += 4 * [0x2, 0x8].filter((flag) => flags & flag).length;
  return view.getUint32(at);
}

function boxType(view, start) {
  return String.fromCharCode(...[4, 5, 6, 7].map((at) => view.getUint8(start + at)));
}
