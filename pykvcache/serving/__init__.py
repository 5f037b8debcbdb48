# SPDX-License-Identifier: Apache-2.0
"""Real servers started by a program, and what is asked of them. Serving never imports it."""
