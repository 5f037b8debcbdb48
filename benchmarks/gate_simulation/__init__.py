# SPDX-License-Identifier: Apache-2.0
"""A model of one engine with a known machine, in which the gate's decisions are judged.

Time is simulated and every random number comes from a seed, so that a run can be repeated.
"""
