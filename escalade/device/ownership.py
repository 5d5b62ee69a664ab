"""Whether what lies in a folder can only have been put there by this user, by root or by who installed Escalade."""

from __future__ import annotations

import grp
import os
import pathlib
import pwd
import stat
from functools import cache

_AROUND = frozenset(pathlib.Path(__file__).resolve().parents)
_WHOLE_NAMESPACE = ["0", "0", "4294967295"]


def untrusted_reason(folder: pathlib.Path) -> str:
    """Who else could change what is found in a folder, or put another one in its place; empty if nobody could.

    The path has no links in it. Where a folder is sticky, only owners remove and rename: then those count. Who can
    write to a folder that this package lies in could change what runs anyway.
    """
    for place in (folder, *folder.parents):
        if place in _AROUND:
            break
        status = os.stat(place)
        owner_is_unknown = place != folder and _is_unmapped(status.st_uid)
        if not owner_is_unknown and not has_trusted_owner(status):
            return f"{place} belongs to another user, {_user(status.st_uid)}"
        if is_writable_by_others(status) and not status.st_mode & stat.S_ISVTX:
            return f"other users can write to {place} (chmod go-w would end that)"
    return ""


def has_trusted_owner(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid(), _author())


@cache
def _author() -> int:
    """Whom this package belongs to: what runs is in their hands already."""
    return os.stat(__file__).st_uid


def is_writable_by_others(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid, os.geteuid())


@cache
def _is_private(group: int, user: int) -> bool:
    """A group of one, as many systems give every user: it has the user's name and no other member."""
    if group == 0:
        return True  # root's, whose members may do as they like
    try:
        entry, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
    except KeyError:
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


@cache
def _is_unmapped(user: int) -> bool:
    """Root's files outside a container can have an owner that the container has no number for."""
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
