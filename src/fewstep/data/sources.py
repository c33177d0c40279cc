"""The data sets that a recipe can name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fewstep.data.api import Dataset, Split
from fewstep.data.fashion_mnist import FashionMnist, FashionMnistSection
from fewstep.data.image_folder import ImageFolder, ImageFolderSection
from fewstep.data.latents import LatentFolder, LatentsSection
from fewstep.data.moving_fashion_mnist import MovingFashionMnist, MovingFashionMnistSection
from fewstep.data.video_folder import VideoFolder, VideoFolderSection

DataSection = Annotated[
    FashionMnistSection | ImageFolderSection | LatentsSection | MovingFashionMnistSection | VideoFolderSection,
    Field(discriminator="name"),
]


def open_dataset(section: DataSection, split: Split = "train") -> Dataset:
    """The data set that ``section`` describes: what is trained on, or the ``test`` split that evaluation compares with.

    Raises UserError for everything that would stop the run later: nothing found, damaged files, wrong channels,
    videos that are too short. Latents have one split.
    """
    match section:
        case FashionMnistSection():
            return FashionMnist(section, split)
        case ImageFolderSection():
            return ImageFolder(section, split)
        case LatentsSection():
            return LatentFolder(section)  # type: ignore[return-value]  # no pixels: nothing that wants some is given it
        case MovingFashionMnistSection():
            return MovingFashionMnist(section, split)
        case VideoFolderSection():
            return VideoFolder(section, split)
