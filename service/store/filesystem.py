"""Check whether a directory is on a file system that SQLite cannot be trusted with.

SQLite's log needs memory that all its processes share, and reliable locks. Network file systems and
FUSE guarantee neither: two hosts that both wrote left a malformed database, without an error.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

# f_type of statfs(2), from the Linux kernel's magic.h and the file systems' own sources.
REFUSED = {
    0x00006969: "NFS",
    0x0000517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x65735546: "FUSE",
    0x01021997: "9p",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0xAAD7AAEA: "PanFS",
    0x013111A8: "IBRIX",
    0x0000564C: "NCP",
    0x20030528: "OrangeFS",
    0x786F4256: "VirtualBox's shared folders",
    0xBACBACBC: "VMware's shared folders",
}


def refused_filesystem(path: Path) -> str | None:
    """Return the name of the file system at `path` if SQLite may not be used on it; else None.

    For a path that does not exist yet, its nearest parent counts. On systems other than Linux the
    answer is not known: None.
    """
    kind = _filesystem_type(path)
    return None if kind is None else REFUSED.get(kind)


def _filesystem_type(path: Path) -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    # os.statvfs does not tell the type. It is the first word of the structure, and unsigned of
    # 32 bits in the kernel's table, however wide and signed the word is.
    libc = ctypes.CDLL(None, use_errno=True)
    found = (ctypes.c_long * 64)()
    for each in (path, *path.absolute().parents):
        if libc.statfs(os.fsencode(each), found) == 0:
            return found[0] & 0xFFFFFFFF
    return None
