# SPDX-License-Identifier: Apache-2.0
"""What of this machine decides how, and whether, the backend works: looked at, or tried.

``machine`` asks the kernel, ``place`` the root and its filesystem, ``software`` what is installed.
"""
