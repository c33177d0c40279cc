"""The training methods. One paper, one file; ``METHODS`` is the list."""

from fewstep.methods.dmd2 import DMD2
from fewstep.methods.sft import SFT

METHODS = (SFT, DMD2)
