// Camera arithmetic: held directions to a velocity, and velocities to the path they draw.
//
// Frame: +X right, +Y down, +Z forward, identity at the start. A velocity is the motion of one
// latent frame in the camera's own frame: T <- T * delta.

const STEP = 0.05;
const YAW_STEP = (6 * Math.PI) / 180;
const PITCH_STEP = (4 * Math.PI) / 180;
const PITCH_LIMIT = (85 * Math.PI) / 180;
const DIGITS = 1e6;
// Coarse enough that rounding in the pose never counts as a change of the velocity.
const PITCH_LEVELS = 1e3;

export const STILL = { translation: [0, 0, 0], rotation: [0, 0, 0, 1] };

/**
 * Velocity of directions in [-1, 1] for a camera that looks up by `cameraPitch` radians.
 *
 * Walking stays level and turning stays about the vertical however far the camera looks up or
 * down, so the horizon never rolls; looking up and down ends at 85 degrees.
 */
export function velocityOf({ forward, right, yaw, pitch: look }, cameraPitch = 0) {
  const pitch = Math.round(cameraPitch * PITCH_LEVELS) / PITCH_LEVELS;
  const [sin, cos] = [Math.sin(pitch), Math.cos(pitch)];
  const up = limitedPitch(look * PITCH_STEP, pitch);
  const turn = axisAngle([0, cos, -sin], yaw * YAW_STEP);
  const tilt = axisAngle([1, 0, 0], up);
  const [sideways, ahead] = turned(right, forward, yaw * YAW_STEP);
  return {
    translation: [sideways, ahead * sin, ahead * cos].map((part) => tidy(part * STEP)),
    rotation: multiply(turn, tilt).map(tidy),
  };
}

/** The camera's pose, advanced latent frame by latent frame. */
export class Pose {
  position = [0, 0, 0];
  rotation = [0, 0, 0, 1];

  /** Move by one latent frame of a velocity. */
  advance({ translation, rotation }) {
    const step = rotate(this.rotation, translation);
    this.position = this.position.map((part, axis) => part + step[axis]);
    this.rotation = normalised(multiply(this.rotation, rotation));
  }

  /** Radians above the horizon. */
  get pitch() {
    const [, down] = rotate(this.rotation, [0, 0, 1]);
    return Math.asin(Math.min(1, Math.max(-1, -down)));
  }

  /** Radians to the right of the first view. */
  get heading() {
    const [x, , z] = rotate(this.rotation, [0, 0, 1]);
    return Math.atan2(x, z);
  }
}

/** Steps on the ground along the heading that the turn leads to. */
function turned(right, forward, angle) {
  const [sin, cos] = [Math.sin(angle), Math.cos(angle)];
  return [right * cos + forward * sin, forward * cos - right * sin];
}

function limitedPitch(step, pitch) {
  return Math.abs(pitch + step) > PITCH_LIMIT ? 0 : step;
}

function tidy(value) {
  return Math.round(value * DIGITS) / DIGITS + 0;
}

function axisAngle([x, y, z], angle) {
  const sin = Math.sin(angle / 2);
  return [x * sin, y * sin, z * sin, Math.cos(angle / 2)];
}

function multiply([ax, ay, az, aw], [bx, by, bz, bw]) {
  return [
    aw * bx + ax * bw + ay * bz - az * by,
    aw * by - ax * bz + ay * bw + az * bx,
    aw * bz + ax * by - ay * bx + az * bw,
    aw * bw - ax * bx - ay * by - az * bz,
  ];
}

function normalised(quaternion) {
  const length = Math.hypot(...quaternion);
  return quaternion.map((part) => part / length);
}

function rotate([x, y, z, w], vector) {
  const [vx, vy, vz] = vector;
  const [cx, cy, cz] = [y * vz - z * vy + w * vx, z * vx - x * vz + w * vy, x * vy - y * vx + w * vz];
  return [
    vx + 2 * (y * cz - z * cy),
    vy + 2 * (z * cx - x * cz),
    vz + 2 * (x * cy - y * cx),
  ];
}
