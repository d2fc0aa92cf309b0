"""Records of what the engine's thread and the devices do, by torch's profiler."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Profiler:
    """One record at a time. A profiler that fails is logged, and the engine goes on."""

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._record: Any = None  # torch's profile while it records

    def start(self) -> None:
        if self._record is not None:
            return
        try:
            record = profile(activities=self._activities)
            record.start()
            self._record = record
        except Exception:  # for instance another profiler is attached to the GPU; torch asserts, too
            logger.exception("the profiler did not start")

    def stop(self, directory: str = "") -> None:
        """Write the record into `directory`, in the format of Chrome's trace viewer; "": drop it."""
        record, self._record = self._record, None
        if record is None:
            return
        try:
            record.stop()
            if directory:
                path = Path(directory) / f"engine-{os.getpid()}-{time.time_ns() // 1_000_000}.json.gz"
                path.parent.mkdir(parents=True, exist_ok=True)
                record.export_chrome_trace(str(path))
                logger.info("wrote a profile to %s", path)
        except Exception:  # the disk, and torch, which also asserts
            logger.exception("the profile was not written")
