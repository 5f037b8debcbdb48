#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds io_uring to a container engine's seccomp profile.

    python3 docker/seccomp.py default.json > seccomp-io_uring.json

Docker's default profile leaves io_uring out (since 25.0), and an engine takes whole profiles only.
So its own profile is read, which keeps everything else as that version has it, and one statement
is appended. Runs with Python alone, where the containers run.
"""

import json
import sys

CALLS = ("io_uring_enter", "io_uring_register", "io_uring_setup")
STATEMENT = {"names": list(CALLS), "action": "SCMP_ACT_ALLOW"}


def with_io_uring(profile: object) -> dict[str, object]:
    """The profile with one more statement.

    Raises:
        ValueError: it isn't a profile that allows calls by name.
    """
    if not isinstance(profile, dict):
        raise ValueError(f"it holds a {type(profile).__name__}, a seccomp profile is an object")
    syscalls = profile.get("syscalls")
    if not isinstance(syscalls, list):
        raise ValueError(f"'syscalls' is {syscalls!r}: a list of statements is expected")
    if profile.get("defaultAction") not in ("SCMP_ACT_ERRNO", "SCMP_ACT_KILL_PROCESS"):
        raise ValueError(
            f"'defaultAction' is {profile.get('defaultAction')!r}: a profile that refuses what it "
            "doesn't name (SCMP_ACT_ERRNO) is expected"
        )
    return {**profile, "syscalls": [*syscalls, STATEMENT]}


def main(arguments: list[str]) -> int:
    """Print the new profile; returns the exit status."""
    if len(arguments) != 1:
        print("usage: seccomp.py PROFILE.json > NEW.json", file=sys.stderr)
        return 2
    try:
        with open(arguments[0], encoding="utf-8") as file:
            profile = with_io_uring(json.load(file))
    except (OSError, ValueError) as error:
        print(f"error: {arguments[0]}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(profile, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
