"""Images in folders: every sub-folder is a class, its name the class's name."""

from __future__ import annotations

from typing import Literal

import PIL

from fewstep.data.api import Split
from fewstep.data.class_folders import ClassFolders, ClassFoldersSection, FileKind
from fewstep.data.still_image import SUFFIXES, read_image


class ImageFolderSection(ClassFoldersSection):
    """Images in class sub-folders, ``path/<class>/.../<image>``; they are decoded once, into ``cache``."""

    name: Literal["image_folder"] = "image_folder"


class ImageFolder(ClassFolders):
    """The images below a folder, as ``read_image`` reads them; clips of one frame."""

    def __init__(self, section: ImageFolderSection, split: Split = "train"):
        height, width = section.height_width
        kind = FileKind(
            name="image",
            suffixes=SUFFIXES,
            read=lambda path: read_image(path, section.channels, height, width)[None],
            version=f"1, Pillow {PIL.__version__}",  # 1 is to be raised when read_image is changed
        )
        super().__init__(section, split, kind, frames=1)
