"""The training methods. One paper, one file; ``METHODS`` is the list."""

from fewstep.methods.consistency import Consistency
from fewstep.methods.diffusion_forcing import DiffusionForcing
from fewstep.methods.dmd2 import DMD2
from fewstep.methods.ode_init import OdeInit
from fewstep.methods.sft import SFT
from fewstep.methods.sid import SiD
from fewstep.methods.teacher_forcing import TeacherForcing

METHODS = (SFT, DiffusionForcing, TeacherForcing, OdeInit, Consistency, DMD2, SiD)
