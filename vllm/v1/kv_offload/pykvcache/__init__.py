# SPDX-License-Identifier: Apache-2.0
"""The overlay: everything of py-kvcache that imports vLLM.

Importing this package imports nothing else, because vLLM's own modules import it
(through the hooks that the patch series adds) before they are complete themselves.
"""
