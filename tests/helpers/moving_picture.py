"""A video without an encoder: gradients that change from frame to frame."""

import numpy as np

HEIGHT, WIDTH = 64, 96


def moving_picture(pixel_frames: int) -> np.ndarray:
    """Smooth gradients that change with time; every frame differs from its neighbours."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    frames = [
        np.stack([columns * 2 + index, rows * 3, np.full_like(rows, 40 + 4 * index)], axis=-1)
        for index in range(pixel_frames)
    ]
    return np.clip(np.stack(frames), 0, 255).astype(np.uint8)
