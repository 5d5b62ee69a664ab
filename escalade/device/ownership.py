"""Trust checks for folders: only this user, root or the owner of Escalade's files may be able to write there."""

from __future__ import annotations

import grp
import os
import pathlib
import pwd
import stat
from functools import cache

_PACKAGE_PARENTS = frozenset(pathlib.Path(__file__).resolve().parents)
_WHOLE_NAMESPACE = ["0", "0", "4294967295"]


def untrusted_reason(folder: pathlib.Path) -> str:
    """Return why others could change or replace a folder; empty if they could not. The path must have no symlinks.

    In a sticky folder only owners remove and rename files, so write access to it is harmless. Folders that contain
    this package are trusted: a user who can write there can change the code anyway.
    """
    for place in (folder, *folder.parents):
        if place in _PACKAGE_PARENTS:
            break
        status = os.stat(place)
        owner_is_unknown = place != folder and _is_unmapped(status.st_uid)
        if not owner_is_unknown and not has_trusted_owner(status):
            return f"{place} belongs to another user, {_user(status.st_uid)}"
        if is_writable_by_others(status) and not status.st_mode & stat.S_ISVTX:
            return f"other users can write to {place} (fix it with chmod go-w)"
    return ""


def has_trusted_owner(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid(), _author())


@cache
def _author() -> int:
    """Return the owner of this package, who controls the code anyway."""
    return os.stat(__file__).st_uid


def is_writable_by_others(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid, os.geteuid())


@cache
def _is_private(group: int, user: int) -> bool:
    """Return True for a user-private group: it has the user's name and no other member."""
    if group == 0:
        return True  # root's group
    try:
        entry, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
    except KeyError:
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


@cache
def _is_unmapped(user: int) -> bool:
    """Return True for the overflow uid, which a container shows for files of users outside its namespace."""
    try:
        inside = pathlib.Path("/proc/self/uid_map").read_text().split() != _WHOLE_NAMESPACE
        return inside and user == int(pathlib.Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return False


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
