// The messages of the socket: the only place that writes or reads JSON.
//
// CLIENT and SERVER list every field this page sends or looks at (null: a plain value). They are
// plain JSON so that a test can hold them against the protocol's schema; nothing that is not
// listed here can leave through `encode` or come in through `decode`.

export const CLIENT = {
  "session.start": {
    "format": null,
    "prompt": null,
    "image_reference": { "image_url": null },
    "width": null,
    "height": null,
    "fps": null,
    "seed": null,
    "queue": null,
    "unbounded": null,
    "max_lead_ms": null
  },
  "session.interaction": {
    "interaction": {
      "event_id": null,
      "event": {
        "prompt": null,
        "multi_modal_data": {
          "camera": { "mode": null, "data": { "translation": null, "rotation": null } }
        }
      },
      "transition_chunks": null
    }
  },
  "session.reset": {
    "prompt": null,
    "image_reference": { "image_url": null },
    "seed": null
  },
  "session.stop": {},
  "session.ping": {}
};

export const SERVER = {
  "session.queued": { "position": null },
  "video.start": {
    "request_id": null,
    "capabilities": {
      "height": null,
      "width": null,
      "native_fps": null,
      "frames_first_chunk": null,
      "max_sessions": null
    }
  },
  "video.chunk_metadata": {
    "kind": null,
    "num_frames": null,
    "byte_length": null,
    "generation_chunk_index": null,
    "started_event_ids": null,
    "completed_event_ids": null,
    "applied": null
  },
  "session.interaction.queued": { "event_id": null },
  "session.reset.done": {},
  "session.pong": {},
  "session.done": { "chunks": null, "stopped": null },
  "error": { "message": null, "code": null, "event_id": null }
};

/** Text of a client message; throws on a type or field that is not in the table. */
export function encode(type, fields = {}) {
  const shape = CLIENT[type];
  if (!shape) throw new TypeError(`no client message ${type}`);
  checkFields(fields, shape, type);
  return JSON.stringify({ type, ...fields });
}

/** A server message reduced to the listed fields, or null if this page has no use for it. */
export function decode(text) {
  const raw = JSON.parse(text);
  const shape = SERVER[raw.type];
  if (!shape) return null;
  return { type: raw.type, ...pick(raw, shape) };
}

/** Capabilities as `GET /v1/realtime/capabilities` gives them: the same object as in the start. */
export function pickCapabilities(raw) {
  return pick(raw, SERVER["video.start"].capabilities);
}

/** A camera event: move and turn by this much in every latent frame until told otherwise. */
export function cameraEvent(eventId, velocity) {
  return encode("session.interaction", {
    interaction: {
      event_id: eventId,
      event: { multi_modal_data: { camera: { mode: "velocity", data: velocity } } },
    },
  });
}

/** A prompt event: blend to this prompt over so many chunks (0: at once). */
export function promptEvent(eventId, prompt, transitionChunks) {
  return encode("session.interaction", {
    interaction: { event_id: eventId, event: { prompt }, transition_chunks: transitionChunks },
  });
}

function checkFields(value, shape, path) {
  if (shape === null) return;
  for (const [name, inner] of Object.entries(value)) {
    if (!(name in shape)) throw new TypeError(`no field ${path}.${name}`);
    checkFields(inner, shape[name], `${path}.${name}`);
  }
}

function pick(raw, shape) {
  if (shape === null || raw === null || raw === undefined) return raw ?? null;
  return Object.fromEntries(
    Object.entries(shape).map(([name, inner]) => [name, pick(raw[name], inner)]),
  );
}
