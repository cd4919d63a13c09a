"""A named picture, as vLLM's class of this name gives it."""

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vllm.assets.base import get_vllm_public_assets

VLM_IMAGES_DIR = "vision_model_images"


@dataclass(frozen=True)
class ImageAsset:
    """A picture by its name."""

    name: str

    def get_path(self, ext: str) -> Path:
        """The picture as a file of this format."""
        return get_vllm_public_assets(f"{self.name}.{ext}", VLM_IMAGES_DIR)

    def read_bytes(self, ext: str) -> bytes:
        """What that file holds."""
        return self.get_path(ext).read_bytes()

    @property
    def pil_image(self) -> Image.Image:
        """The picture itself, RGB."""
        return Image.open(self.get_path("jpg"))
