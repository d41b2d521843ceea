"""Turns: what changes a setting of the whole process for a moment and puts it back must not overlap with other code.

Random generators and the default dtype belong to the process. On the thread that runs the user's code nothing overlaps;
whoever works beside it, as widgets do, brings a way to take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

#: Around each moment in which settings of the process are not as the user left them.
around: Callable[[], AbstractContextManager] = contextlib.nullcontext
