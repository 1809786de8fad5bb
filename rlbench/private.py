"""Whose a file is: what lies under a name that other users can know is looked at before it is read or written.

Standard library alone.
"""

from __future__ import annotations

import os
import stat

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def others_access(status: os.stat_result) -> str | None:
    """Say how another user may have written a file or folder; None where only this user can have.

    Args:
        status: of `lstat`, where a symbolic link is not to be followed: one counts as writable by others.
    """
    if status.st_uid == os.geteuid() and not status.st_mode & WRITABLE_BY_OTHERS:
        return None
    return f"{stat.filemode(status.st_mode)} of user {status.st_uid} (yours is {os.geteuid()})"
