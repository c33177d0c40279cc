"""``python -m fewstep.cli.reference [FOLDER]``."""

import sys
from pathlib import Path

from fewstep.cli.reference import write_pages

write_pages(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference"))
