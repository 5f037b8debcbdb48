# SPDX-License-Identifier: Apache-2.0
"""openat2(2), which Python lacks: opens under conditions on the way to the file."""

from __future__ import annotations

import ctypes

SYSTEM_CALL = 437
"""The same on all architectures; Linux 5.6."""

AT_FDCWD = -100
"""The directory that relative paths start from is the current one (openat(2))."""

RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_CACHED = 0x20
"""Only if the kernel knows the way without asking the filesystem, else EAGAIN; Linux 5.12."""


class OpenHow(ctypes.Structure):
    """``struct open_how``."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_system_call = ctypes.CDLL(None, use_errno=True).syscall
_system_call.restype = ctypes.c_long
_system_call.argtypes = (
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
)
_HOW_BYTES = ctypes.sizeof(OpenHow)


def openat2(path: bytes, how: OpenHow) -> int:
    """Open a path.

    Returns:
        The descriptor, or an errno below 0.
    """
    descriptor = int(_system_call(SYSTEM_CALL, AT_FDCWD, path, ctypes.addressof(how), _HOW_BYTES))
    return descriptor if descriptor >= 0 else -ctypes.get_errno()
