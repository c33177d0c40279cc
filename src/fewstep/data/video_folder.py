"""Videos in folders: every sub-folder is a class, its name the class's name."""

from __future__ import annotations

from typing import Literal

import PIL
from pydantic import Field

from fewstep.data.api import Split
from fewstep.data.class_folders import ClassFolders, ClassFoldersSection, FileKind
from fewstep.data.video_clip import SUFFIXES, read_clip
from fewstep.errors import UserError


class VideoFolderSection(ClassFoldersSection):
    """Videos in class sub-folders, ``path/<class>/.../<video>``: the first frames of each file, decoded once, into
    ``cache``. Needs PyAV: ``pip install 'fewstep[video]'``."""

    name: Literal["video_folder"] = "video_folder"
    frames: int = Field(ge=1)
    """Frames of a clip; one clip is taken from a file, from its first frame on."""
    stride: int = Field(default=1, ge=1)
    """Of this many frames in a row the first is taken; a file needs (``frames`` - 1) x ``stride`` + 1 frames."""


class VideoFolder(ClassFolders):
    """The beginnings of the videos below a folder, as ``read_clip`` reads them, one clip a file.

    Beside the errors of ``ClassFolders``, raises UserError if PyAV is not installed; videos that are too short are
    among the files that cannot be used.
    """

    def __init__(self, section: VideoFolderSection, split: Split = "train"):
        frames, stride, (height, width) = section.frames, section.stride, section.height_width
        kind = FileKind(
            name="video",
            suffixes=SUFFIXES,
            read=lambda path: read_clip(path, frames, stride, section.channels, height, width),
            version=f"1, {_pyav_version()}, Pillow {PIL.__version__}, stride {stride}",  # 1 rises with read_clip
        )
        super().__init__(section, split, kind, frames)


def _pyav_version() -> str:
    """With its libraries', whose pixels may differ. Raises UserError if PyAV is not installed."""
    try:
        import av
    except ImportError as error:
        raise UserError(
            "data.name: video_folder reads videos with PyAV, which is not installed; pip install 'fewstep[video]'"
        ) from error
    return f"PyAV {av.__version__} {sorted(av.library_versions.items())}"
