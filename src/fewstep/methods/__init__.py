"""The training methods. One paper, one file; ``METHODS`` is the list."""

from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.methods.sft import SFT, SFTSection

METHODS = (SFT, DMD2)
SECTIONS = (SFTSection, DMD2Section)
