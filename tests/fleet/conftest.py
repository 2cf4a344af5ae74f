"""The helpers of these tests are modules beside them, which the processes of a job import too."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
