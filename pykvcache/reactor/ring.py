# SPDX-License-Identifier: Apache-2.0
"""A submission and a completion ring, shared with the kernel: io_uring(7) and nothing above it.

Why not through a binding: the one with wheels for x86-64 (PyPI ``liburing`` 2026.3.30) is
compiled for its author's processor, and making a ring with it ends the process with SIGILL
where there is no AVX-512. It also holds the interpreter's lock in every call, and leaks
memory for each buffer. What is needed here is small, and the kernel's stable ABI: two
system calls and two mappings.

Facts that the code rests on:

- The kernel reads the submission ring only inside ``io_uring_enter`` on this thread (there
  is no SQPOLL), so entries need no barrier before the tail.
- Completions may be written by another processor. The tail must be read before the entries,
  and x86-64 keeps plain loads in order. Other processors need a barrier, which Python lacks:
  :class:`Ring` refuses them.
- ``COOP_TASKRUN`` saves an interrupt per completion; a thread that sleeps in poll(2) on the
  ring is woken all the same (with ``DEFER_TASKRUN`` it is not). ``SINGLE_ISSUER`` promises
  that only the creating thread submits. ``SUBMIT_ALL`` keeps a refused entry from holding up
  those behind it. Kernels before 6.0 refuse them with EINVAL; without flags all works alike.
- The completion ring is twice as long as the submission ring: who never has more operations
  with the kernel than the latter holds cannot overflow the former.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct

from pykvcache.errors import InvariantError

NOP, READV, WRITEV, FSYNC, CLOSE, READ, WRITE, OPENAT2 = 0, 1, 2, 3, 19, 22, 23, 28
RENAMEAT, UNLINKAT, MKDIRAT, LINKAT = 35, 36, 37, 39
"""Operation codes, ``enum io_uring_op``."""

ASYNC = 1 << 4
"""``IOSQE_ASYNC``: hand the operation to a kernel worker at once, without an inline attempt."""

_SYS_SETUP, _SYS_ENTER = 425, 426

_FLAG_SETS = (
    (1 << 8) | (1 << 12) | (1 << 7),  # COOP_TASKRUN | SINGLE_ISSUER | SUBMIT_ALL, Linux 6.0
    0,
)
_FEATURES_NEEDED = (1 << 0) | (1 << 1)  # SINGLE_MMAP | NODROP, Linux 5.5

_OFFSET_RINGS = 0
_OFFSET_ENTRIES = 0x10000000

_PARAMS = struct.Struct("<10I 8IQ 8IQ")
_SUBMISSION = struct.Struct("<BBHiQQIIQ24x")
_COMPLETION = struct.Struct("<QiI")

_system_call = ctypes.CDLL(None, use_errno=True).syscall
_system_call.argtypes = (ctypes.c_long,) * 7
_system_call.restype = ctypes.c_long


class Ring:
    """One io_uring instance; made, used and closed on one thread.

    Args:
        entries: operations that one submission can hold, a power of two.

    Raises:
        OSError: the kernel or a sandbox refuses; ENOTSUP on a processor other than x86-64.
    """

    def __init__(self, entries: int) -> None:
        if platform.machine() != "x86_64":
            raise OSError(errno.ENOTSUP, f"no io_uring engine for {platform.machine()}")
        self.descriptor, params = _setup(entries)
        try:
            self._map(params)
        except BaseException:
            os.close(self.descriptor)
            raise

    def _map(self, params: bytearray) -> None:
        fields = _PARAMS.unpack(params)
        self.entries, completions, features = fields[0], fields[1], fields[5]
        if features & _FEATURES_NEEDED != _FEATURES_NEEDED:
            raise OSError(errno.ENOSYS, "the kernel's io_uring is too old")
        sq_head, sq_tail, _, _, _, _, sq_array = fields[10:17]
        cq_head, cq_tail, _, _, _, cq_entries = fields[19:25]
        size = max(
            sq_array + 4 * self.entries,
            cq_entries + _COMPLETION.size * completions,
        )
        self._rings = self._shared(size, _OFFSET_RINGS)
        self._submissions = self._shared(_SUBMISSION.size * self.entries, _OFFSET_ENTRIES)
        words = memoryview(self._rings)[: size // 4 * 4].cast("I")
        words[sq_array // 4 : sq_array // 4 + self.entries] = memoryview(
            struct.pack(f"{self.entries}I", *range(self.entries))
        ).cast("I")
        self._words = words
        self._sq_head_at, self._sq_tail_at = sq_head // 4, sq_tail // 4
        self._cq_head_at, self._cq_tail_at = cq_head // 4, cq_tail // 4
        self._cq_entries_at, self._cq_mask = cq_entries, completions - 1
        self._tail: int = words[self._sq_tail_at]

    def _shared(self, size: int, offset: int) -> mmap.mmap:
        return mmap.mmap(
            self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset
        )

    @property
    def unsubmitted(self) -> int:
        """Entries pushed that the kernel has not taken."""
        head: int = self._words[self._sq_head_at]
        return (self._tail - head) & 0xFFFFFFFF

    def push(
        self,
        opcode: int,
        descriptor: int,
        user_data: int,
        *,
        flags: int = 0,
        address: int = 0,
        length: int = 0,
        offset: int = 0,
        argument: int = 0,
    ) -> None:
        """Add an operation to the next submission.

        Args:
            opcode: one of this module's operation codes.
            descriptor: a descriptor, or AT_FDCWD.
            user_data: what :meth:`completions` returns with the result.
            flags: of the entry, such as :data:`ASYNC`.
            address: of a buffer or path, which must live until the completion.
            length: of the buffer in bytes; for some operations a mode or descriptor.
            offset: in the file in bytes; for LINKAT and RENAMEAT the address of the second path,
                for OPENAT2 that of its flags.
            argument: the operation's own flags.

        Raises:
            InvariantError: the ring is full.
        """
        if self.unsubmitted >= self.entries:
            raise InvariantError(f"{self.entries} entries are unsubmitted, the ring is full")
        _SUBMISSION.pack_into(
            self._submissions,
            (self._tail & (self.entries - 1)) * _SUBMISSION.size,
            opcode,
            flags,
            0,
            descriptor,
            offset,
            address,
            length,
            argument,
            user_data,
        )
        self._tail = (self._tail + 1) & 0xFFFFFFFF

    def submit(self) -> None:
        """Hand what was pushed to the kernel; releases the interpreter's lock meanwhile.

        What the kernel cannot take now (EAGAIN: no memory for requests; EBUSY, EINTR) stays
        for the next call.

        Raises:
            OSError: any other error.
        """
        self._words[self._sq_tail_at] = self._tail
        while count := self.unsubmitted:
            if int(_system_call(_SYS_ENTER, self.descriptor, count, 0, 0, 0, 0)) < 0:
                code = ctypes.get_errno()
                if code in (errno.EAGAIN, errno.EBUSY, errno.EINTR):
                    return
                raise OSError(code, os.strerror(code))

    def completions(self) -> list[tuple[int, int]]:
        """Take what has completed: ``(user_data, result)``, a result below 0 is -errno."""
        words = self._words
        head, tail = words[self._cq_head_at], words[self._cq_tail_at]
        taken: list[tuple[int, int]] = []
        if head == tail:
            return taken
        while head != tail:
            at = self._cq_entries_at + (head & self._cq_mask) * _COMPLETION.size
            user_data, result, _ = _COMPLETION.unpack_from(self._rings, at)
            taken.append((user_data, result))
            head = (head + 1) & 0xFFFFFFFF
        words[self._cq_head_at] = head
        return taken

    def close(self) -> None:
        """Give the ring back. Operations in flight would go on: drain it first."""
        self._words.release()
        self._rings.close()
        self._submissions.close()
        os.close(self.descriptor)


def _setup(entries: int) -> tuple[int, bytearray]:
    code = errno.EINVAL
    for flags in _FLAG_SETS:
        params = bytearray(_PARAMS.size)
        struct.pack_into("<I", params, 8, flags)
        address = ctypes.addressof(ctypes.c_char.from_buffer(params))
        descriptor = int(_system_call(_SYS_SETUP, entries, address, 0, 0, 0, 0))
        if descriptor >= 0:
            return descriptor, params
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            break
    raise OSError(code, os.strerror(code))
